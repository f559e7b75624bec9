"""A workload of everything, from a seed, for tests that compare runs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

import crossrail as xr
from crossrail import sim

NBYTES = 1 << 16


@dataclass
class Outcome:
    log: list[str]
    digest: str
    statuses: list[str]


def run_workload(seed: int, *, keep_log: bool = True) -> Outcome:
    """Writes, reads, pages, scatters, messages, cancels; a rail goes down, one engine freezes, one is killed."""
    rng = np.random.default_rng(seed)
    statuses: list[str] = []
    with sim.World(seed, keep_log=keep_log) as world:
        hosts = [world.host(f"n{i}", nic) for i, nic in enumerate(("2xcx7", "2xcx7", "cx7", "2xcx7"))]
        engines = [host.engine(f"e{i}", peer_timeout_s=1.0) for i, host in enumerate(hosts)]
        regions = [engine.register(rng.integers(0, 256, NBYTES, dtype=np.uint8)) for engine in engines]
        pools = [engine.submit_recvs(256, 256) for engine in engines]
        world.rail_down(hosts[0], 1, at_s=1e-4, for_s=0.3)
        world.freeze(engines[1], at_s=2e-4, for_s=0.2)
        world.kill(engines[3], at_s=3e-4)
        transfers: list[xr.Transfer] = []
        for _ in range(150):
            i, k = rng.choice(4, 2, replace=False)
            try:
                transfers.append(_submit(engines[i], regions[i], regions[k].descriptor, int(rng.integers(0, 5)), rng))
            except (xr.EngineClosed, xr.UsageError):
                statuses.append("refused")
            if rng.random() < 0.1:
                rng.choice(transfers).cancel()  # type: ignore[arg-type]
            world.run(float(rng.integers(0, 5000)) * 1e-9)
        for transfer in transfers:
            try:
                transfer.wait(30)
            except (xr.TransferError, xr.EngineClosed):
                pass
            statuses.append(transfer.status)
        for pool in pools:
            pool.close()
    return Outcome(world.log, world.log_digest, statuses)


def _submit(
    engine: xr.Engine, src: xr.Region, dst: xr.RegionDescriptor, kind: int, rng: np.random.Generator
) -> xr.Transfer:
    if kind == 0:
        return engine.submit_write(src, dst, imm=1)
    if kind == 1:
        return engine.submit_read(src, dst)
    if kind == 2:
        pages = rng.permutation(16).astype(np.uint32)
        return engine.submit_paged_writes(src, pages, dst, pages[::-1].copy(), 4096, imm=2)
    if kind == 3:
        return engine.submit_scatter(src, [dst], lengths=NBYTES, src_offsets=0, dst_offsets=0, imm=3)
    return engine.submit_send(dst.owner, bytes(100))

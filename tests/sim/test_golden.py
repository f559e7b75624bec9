"""One run whose event log is known beforehand: the simulator is the same on every machine and in every build.

What the workload draws comes from the generator below and not from a library's, its times are exact as floats, and
nothing in it is computed by functions whose last bits are the C library's business. The native side has integers only.
"""

from __future__ import annotations

import numpy as np

import crossrail as xr
from crossrail import sim

_NBYTES = 1 << 16
_GOLDEN = "218660169ed1e9a1eabbe094d8254f37"


class _Draws:
    """Numbers from a linear congruential generator (Knuth's MMIX): the same wherever integers are."""

    def __init__(self, seed: int) -> None:
        self._state = seed

    def below(self, bound: int) -> int:
        self._state = (self._state * 6364136223846793005 + 1442695040888963407) % (1 << 64)
        return (self._state >> 33) % bound


def _submit(draws: _Draws, src: xr.Region, engine: xr.Engine, dst: xr.RegionDescriptor) -> xr.Transfer:
    length = 1 + draws.below(_NBYTES)
    kind = draws.below(5)
    if kind == 0:
        return engine.submit_write(src, dst, length, imm=1)
    if kind == 1:
        return engine.submit_read(src, dst, length)
    if kind == 2:
        pages = (5 * np.arange(16) + length) % 16
        return engine.submit_paged_writes(src, pages, dst, pages[::-1].copy(), 4096, imm=2)
    if kind == 3:
        return engine.submit_scatter(src, [dst] * 3, lengths=length // 3, src_offsets=0, dst_offsets=0, imm=3)
    return engine.submit_send(dst.owner, bytes(length % 200))


def _digest_of_everything(seed: int) -> str:
    """Every operation, over rails with and without order; cancels, a rail down, an engine frozen and one killed."""
    draws = _Draws(seed)
    with sim.World(seed) as world:
        hosts = [world.host(f"n{i}", nic) for i, nic in enumerate(("2xcx7", "2xefa200", "cx7", "2xcx7"))]
        engines = [host.engine(f"e{i}", peer_timeout_s=1.0) for i, host in enumerate(hosts)]
        regions = [engine.alloc(_NBYTES) for engine in engines]
        pools = [engine.submit_recvs(256, 256) for engine in engines]
        world.lose_datagrams(0.125, doubling=0.125)
        world.rail_down(hosts[0], 1, at_s=0.0001, for_s=0.25)
        world.freeze(engines[1], at_s=0.0002, for_s=0.125)
        world.kill(engines[3], at_s=0.001)
        transfers: list[xr.Transfer] = []
        for _ in range(300):
            i = draws.below(4)
            k = (i + 1 + draws.below(3)) % 4
            if not engines[i].closed:
                transfers.append(_submit(draws, regions[i], engines[i], regions[k].descriptor))
            if transfers and draws.below(10) == 0:
                transfers[draws.below(len(transfers))].cancel()
            world.run(draws.below(16_384) / (1 << 30))  # up to 15 us, in steps that a float holds exactly
        world.run(30)
        assert {transfer.status for transfer in transfers} == {"done", "cancelled", "peer-lost", "engine-closed"}
        assert sum(len(pool.poll(256)) for pool in pools[:3]) > 10
    return world.log_digest


def test_the_log_is_the_same_on_every_machine() -> None:
    """When the engine or the network is changed on purpose, so is this digest: look why, and write the new one down."""
    assert _digest_of_everything(7) == _GOLDEN

"""Scenarios in which engines die and come back under the same name."""

from __future__ import annotations

import asyncio
import contextlib

import numpy as np
import numpy.typing as npt

import crossrail as xr
from crossrail.sim.profiles import NicProfile
from crossrail.sim.scenarios.base import Run
from crossrail.sim.world import Host

_KIB = 1 << 10
_WAIT_S = 5.0


class _Store:
    """A service that keeps blocks for others, and its supervisor. `region` is what it tells those who ask by name."""

    BLOCKS = 64
    BLOCK_BYTES = 64 * _KIB

    def __init__(self, run: Run) -> None:
        self.run = run
        self.host = run.host("store", nic="2xefa200")
        self.starts = 0
        self.start()

    def start(self) -> None:
        self.starts += 1
        self.engine = self.host.engine("store")
        self.region = self.engine.alloc(self.BLOCKS * self.BLOCK_BYTES)
        self.counter = self.run.counter(self.engine)

    async def supervise(self, deaths: int) -> None:
        for _ in range(deaths):
            await asyncio.sleep(self.run.rng.uniform(1e-4, 4e-3))
            self.run.world.kill(self.engine)
            await asyncio.sleep(self.run.rng.uniform(0.1, 2.0))
            self.start()


async def peer_restart(run: Run) -> None:
    """A store dies and is restarted under its name while clients write: they learn of it, ask again and end well."""
    store = _Store(run)
    clients = [run.host(f"client{i}", nic="2xefa200").engine(f"client{i}", peer_timeout_s=3.0) for i in range(4)]
    deaths = run.rng.randint(1, 3)
    supervisor = asyncio.create_task(store.supervise(deaths))
    blocks = run.random_bytes(store.BLOCKS * store.BLOCK_BYTES)
    each = store.BLOCKS // len(clients)
    repeats = await asyncio.gather(
        *(_put(run, store, client, blocks, range(i * each, (i + 1) * each)) for i, client in enumerate(clients))
    )
    await supervisor
    # The last incarnation has nothing from earlier ones: run everything once more, with nobody dying.
    for i, client in enumerate(clients):
        await _put(run, store, client, blocks, range(i * each, (i + 1) * each))
    run.check.same_bytes("what the store holds", store.region.array(), blocks)
    store.counter.try_consume(store.counter.poll())
    run.check.equal("incarnations", store.starts, deaths + 1)
    run.figure("deaths", deaths, "")
    run.figure("writes repeated", sum(repeats), "")


async def _put(run: Run, store: _Store, client: xr.Engine, blocks: npt.NDArray[np.uint8], which: range) -> int:
    """Writes these blocks, each until it is done. How many times one had to be written again."""
    source = client.register(blocks, access="local")
    again = 0
    for block in which:
        while True:
            target, counter = store.region.descriptor, store.counter  # whatever has that name now
            offset = block * store.BLOCK_BYTES
            transfer = client.submit_write(
                source, target, store.BLOCK_BYTES, src_offset=offset, dst_offset=offset, imm=counter.imm
            )
            try:
                await run.track(transfer, f"block {block}")
                break
            except xr.PeerLost:
                again += 1
                client.forget_peer(target.owner)
                await asyncio.sleep(0.05)
        await asyncio.sleep(2e-4)
    source.close()
    return again


# Far apart, so that much is on its way when its sender is gone.
_FAR = NicProfile("far", gbps=100.0, latency_us=200.0, completion_us=200.0, jitter_us=50.0)
_WRITES = 32
_WRITE_BYTES = 64 * _KIB


async def late_packets(run: Run) -> None:
    """A writer is killed with writes under way: none lands in closed memory, none counts for the next writer."""
    receiver = run.host("receiver", nic=_FAR).engine("receiver")
    host = run.host("writer", nic=_FAR)
    memory = np.zeros(_WRITES * _WRITE_BYTES, np.uint8)
    generations = run.rng.randint(2, 5)
    for generation in range(1, generations):
        writer, target, counter = await _begin_writing(run, host, receiver, memory)
        await asyncio.sleep(run.rng.uniform(10e-6, 200e-6))
        run.world.kill(writer)
        # No word of it reaches us. Our patience ends, and from close() on the memory is ours again.
        with contextlib.suppress(xr.WaitTimeout):
            await counter.wait_async(_WRITES, timeout_s=run.rng.uniform(1e-6, 150e-6))
        await asyncio.to_thread(target.close)
        memory[:] = generation
        before = memory.copy()
        await asyncio.sleep(0.01)
        run.check.same_bytes(f"memory closed to writer {generation}", memory, before)
        counter.try_consume(counter.poll())
    writer, target, counter = await _begin_writing(run, host, receiver, memory)
    await counter.wait_async(_WRITES, timeout_s=_WAIT_S)
    run.check.that(bool(np.all(memory == 255)), "not all of what the last writer wrote is there")
    run.seal("what the last writer wrote", memory)
    run.figure("writers", generations, "")


async def _begin_writing(
    run: Run, host: Host, receiver: xr.Engine, memory: npt.NDArray[np.uint8]
) -> tuple[xr.Engine, xr.Region, xr.ImmCounter]:
    """A new writer that has begun to fill the memory with 255, and the count that will say that it has."""
    writer = host.engine("writer")
    await asyncio.to_thread(writer.connect, receiver.address)
    target, source = receiver.register(memory), writer.alloc(memory.nbytes)
    source.array()[:] = 255
    counter = run.counter(receiver)
    for at in range(0, memory.nbytes, _WRITE_BYTES):
        writer.submit_write(source, target.descriptor, _WRITE_BYTES, src_offset=at, dst_offset=at, imm=counter.imm)
    return writer, target, counter

"""Scenarios in which the network misbehaves: rails fail, hosts cannot reach each other, engines freeze."""

from __future__ import annotations

import asyncio
import json

import crossrail as xr
from crossrail.sim.scenarios.base import Run
from crossrail.sim.scenarios.moving import gbps, until_counted

_MIB = 1 << 20
_GIB = 1 << 30
_WAIT_S = 60.0


async def rail_failover(run: Run) -> None:
    """Four rails go down and up at random under load: all arrives, and a write counts one or says that it failed."""
    nic = run.rng.choice(["4xcx7", "4xefa100"])
    hosts = [run.host(name, nic=nic) for name in ("sender", "receiver")]
    sender, receiver = (host.engine(host.name) for host in hosts)
    outages = run.rng.randint(1, 6)
    for _ in range(outages):
        host, rail = run.rng.choice(hosts), run.rng.randrange(3)  # the fourth stays: somebody has to
        run.world.rail_down(host, rail, at_s=run.rng.uniform(0, 2e-4), for_s=run.rng.uniform(1e-4, 0.05))
    writes, nbytes = 64, 256 << 10
    source, target = sender.alloc(writes * nbytes), receiver.alloc(writes * nbytes)
    data = run.random_bytes(writes * nbytes)
    source.array()[:] = data
    room = asyncio.Semaphore(8)
    began_s = run.world.now_s

    async def write(index: int) -> int:
        async with room:
            return await until_counted(run, sender, source, receiver, target, index * nbytes, nbytes)

    repeated = sum(await asyncio.gather(*(write(index) for index in range(writes))))
    run.check.same_bytes("what arrived", target.array(), data)
    run.seal("what arrived", target.array())
    if nic == "4xcx7":
        run.check.equal("writes that failed although their NIC tells what arrived", repeated, 0)
    run.figure("outages", outages, "")
    run.figure("writes repeated", repeated, "")
    run.figure("throughput", gbps(writes * nbytes, run.world.now_s - began_s), "Gb/s")


async def slow_rail(run: Run) -> None:
    """One of four rails becomes ten times slower: the others take over what it does not manage."""
    hosts = [run.host(name, nic="4xefa100") for name in ("sender", "receiver")]
    sender, receiver = (host.engine(host.name) for host in hosts)
    nbytes = _GIB
    source, target = sender.register_phantom(nbytes), receiver.register_phantom(nbytes)
    counter = run.counter(receiver)

    async def timed() -> float:
        began_s = run.world.now_s
        await run.track(sender.submit_write(source, target.descriptor, imm=counter.imm), "long write")
        await counter.wait_async(timeout_s=_WAIT_S)
        return run.world.now_s - began_s

    await timed()  # makes the connections
    even_s = await timed()
    run.world.slow(hosts[0], run.rng.randrange(4), 10.0)
    uneven_s = await timed()
    best_s = even_s * 4 / 3.1
    run.check.that(
        uneven_s <= 1.25 * best_s, f"a rail at a tenth: {uneven_s:.6f} s, with the rails well used {best_s:.6f} s"
    )
    run.figure("four rails", gbps(nbytes, even_s), "Gb/s")
    run.figure("one at a tenth", gbps(nbytes, uneven_s), "Gb/s")


# --- heartbeats of a service's own ---

_BEAT_S = 0.5
_SLOW_AFTER_S = 1.6
_DEAD_AFTER_S = 12.0


class _Monitor:
    """A router's view of its workers: when each was last heard of, and the state that follows from it."""

    def __init__(self, run: Run, engine: xr.Engine) -> None:
        self.run, self.engine = run, engine
        self.heard_s: dict[str, float] = {}
        self.seen: dict[str, list[str]] = {}

    async def listen(self) -> None:
        with self.engine.submit_recvs(64, 4096) as pool:
            async for message in pool:
                self.heard_s[json.loads(message.data)["worker"]] = self.run.world.now_s

    async def judge(self) -> None:
        while True:
            await asyncio.sleep(_BEAT_S / 4)
            for worker, heard_s in self.heard_s.items():
                silent_s = self.run.world.now_s - heard_s
                state = "dead" if silent_s > _DEAD_AFTER_S else "slow" if silent_s > _SLOW_AFTER_S else "well"
                states = self.seen.setdefault(worker, [])
                if not states or states[-1] != state:
                    states.append(state)


async def _beat(engine: xr.Engine, monitor: xr.Address) -> None:
    while True:
        await asyncio.sleep(_BEAT_S)
        try:
            await engine.submit_send(monitor, json.dumps({"worker": engine.name}).encode())
        except xr.PeerLost:
            engine.forget_peer(monitor)  # and try again


async def freeze_thaw(run: Run) -> None:
    """A worker freezes for a while, as in a long pause of its process: slow, never dead, and then well again."""
    router = run.host("router").engine("router")
    workers = [run.host(f"worker{i}").engine(f"worker{i}") for i in range(3)]
    monitor = _Monitor(run, router)
    frozen = run.rng.choice(workers)
    for_s = run.rng.uniform(3.0, 6.0)
    run.world.freeze(frozen, at_s=5.0, for_s=for_s)
    tasks = [asyncio.create_task(work) for work in (monitor.listen(), monitor.judge())]
    tasks += [asyncio.create_task(_beat(worker, router.address)) for worker in workers]

    await asyncio.sleep(6.0)
    target, source = frozen.alloc(_MIB), router.alloc(_MIB)
    source.array()[:] = data = run.random_bytes(_MIB)
    counter = run.counter(frozen)
    write = run.track(router.submit_write(source, target.descriptor, imm=counter.imm), "write into the frozen worker")
    await counter.wait_async(timeout_s=_WAIT_S)
    run.check.same_bytes("what was written meanwhile", target.array(), data)
    await write
    await asyncio.sleep(20.0)
    for task in tasks:
        task.cancel()
    for worker in workers:
        expected = ["well", "slow", "well"] if worker is frozen else ["well"]
        run.check.equal(f"states of {worker.name}", monitor.seen.get(worker.name), expected)
    run.figure("frozen for", for_s, "s")


async def partition(run: Run) -> None:
    """Two halves of a network lose sight of each other, for less or more than engines wait: all is done or told."""
    hosts = [run.host(f"node{i}") for i in range(4)]
    engines = [host.engine(host.name, peer_timeout_s=5.0) for host in hosts]
    for_s = run.rng.choice([run.rng.uniform(0.001, 3.0), run.rng.uniform(8.0, 15.0)])
    run.world.partition(hosts[:2], hosts[2:], at_s=0.002, for_s=for_s)
    lost = sum(await asyncio.gather(*(_talk_across(run, engines[i], engines[(i + 2) % 4]) for i in range(4))))
    run.figure("parted for", for_s, "s")
    run.figure("writes told lost", lost, "")


async def _talk_across(run: Run, here: xr.Engine, there: xr.Engine) -> int:
    """Writes until all are done; a lost write is repeated to another place. Returns how many were lost."""
    nbytes, writes, lost = 64 << 10, 40, 0
    source = here.alloc(nbytes)
    source.array()[:] = data = run.random_bytes(nbytes)
    done = 0
    while done < writes:
        counter, target = run.counter(there), there.alloc(nbytes)
        try:
            await run.track(here.submit_write(source, target.descriptor, imm=counter.imm), "write across")
        except xr.PeerLost:
            # It may or may not have arrived: its counter tells, and no other write uses that counter.
            lost += 1
            counter.try_consume()
            here.forget_peer(there.address)
            await asyncio.sleep(0.1)
            continue
        await counter.wait_async(timeout_s=_WAIT_S)
        run.check.same_bytes("what crossed", target.array(), data)
        run.seal("what crossed", target.array())
        done += 1
        await asyncio.sleep(1e-4)
    return lost

"""Faults of every kind, drawn from the seed, during writes in all directions."""

from __future__ import annotations

import asyncio

import numpy as np

import crossrail as xr
from crossrail.sim.scenarios.base import Run
from crossrail.sim.scenarios.moving import until_counted
from crossrail.sim.world import Host

_HOSTS = 4
_WRITES = 24
_SLOT_BYTES = 96 << 10
_STORM_S = 0.02


async def storm(run: Run) -> None:
    """Four hosts write to each other while everything goes wrong; once it stops, all is in place and counted."""
    nic = run.rng.choice(["cx7", "2xcx7", "2xefa200", "4xefa100"])
    hosts = [run.host(f"node{i}", nic=nic) for i in range(_HOSTS)]
    engines = [host.engine(host.name, peer_timeout_s=3.0) for host in hosts]
    faults = run.rng.randint(3, 25)
    run.world.lose_datagrams(run.rng.uniform(0, 0.2), doubling=run.rng.uniform(0, 0.2))
    run.world.lose_datagrams(0.0, at_s=_STORM_S)
    for _ in range(faults):
        _brew(run, hosts)
    for host in hosts:
        run.world.fail_works(host, at_s=_STORM_S)  # none from then on
    began_s = run.world.now_s
    repeated = await asyncio.gather(*(_write_to_all(run, i, engines) for i in range(_HOSTS)))
    run.figure("faults", faults, "")
    run.figure("writes repeated", sum(repeated), "")
    run.figure("time", run.world.now_s - began_s, "s")


def _brew(run: Run, hosts: list[Host]) -> None:
    """Adds one more fault, at some time of the storm and for some time."""
    rng, world = run.rng, run.world
    host = rng.choice(hosts)
    rail = rng.randrange(len(host.rails))
    at_s, for_s = rng.uniform(0, _STORM_S), 10 ** rng.uniform(-5, -1)
    match rng.randrange(7):
        case 0:
            world.rail_down(host, rail, at_s=at_s, for_s=for_s)
        case 1:
            world.slow(host, rail, 10 ** rng.uniform(0, 2), at_s=at_s, for_s=for_s)
        case 2:
            world.fill_queue(host, rail, at_s=at_s, for_s=for_s)
        case 3:
            world.withhold_completions(host, at_s=at_s, for_s=for_s)
        case 4:
            world.fail_works(host, chance=rng.uniform(0, 0.1), count=rng.randint(0, 3), at_s=at_s)
        case 5:
            world.freeze(host, at_s=at_s, for_s=for_s)
        case 6:
            world.partition([host], [other for other in hosts if other is not host], at_s=at_s, for_s=for_s)


async def _write_to_all(run: Run, index: int, engines: list[xr.Engine]) -> int:
    """Writes slots of all lengths to the others, some at once, and pauses now and then. How many were repeated."""
    here = engines[index]
    source = here.alloc(_WRITES * _SLOT_BYTES)
    source.array()[:] = data = run.random_bytes(source.nbytes)
    others = [engine for engine in engines if engine is not here]
    targets = [engine.alloc(source.nbytes) for engine in others]
    plan = [(run.rng.randrange(len(others)), run.rng.randint(1, _SLOT_BYTES)) for _ in range(_WRITES)]
    room = asyncio.Semaphore(run.rng.randint(1, 8))
    pauses_s = [run.rng.uniform(0, 3 * _STORM_S / _WRITES) for _ in plan]

    async def write(slot: int) -> int:
        to, nbytes = plan[slot]
        async with room:
            await asyncio.sleep(pauses_s[slot])
            return await until_counted(run, here, source, others[to], targets[to], slot * _SLOT_BYTES, nbytes)

    repeated = sum(await asyncio.gather(*(write(slot) for slot in range(_WRITES))))
    for to, target in enumerate(targets):
        expected = np.zeros_like(data)
        for slot, (chosen, nbytes) in enumerate(plan):
            if chosen == to:
                expected[slot * _SLOT_BYTES :][:nbytes] = data[slot * _SLOT_BYTES :][:nbytes]
        run.check.same_bytes(f"what {here.name} wrote to {others[to].name}", target.array(), expected)
        run.seal(f"what {here.name} wrote to {others[to].name}", target.array())
    return repeated

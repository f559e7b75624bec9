"""One simulated update: every trainer and target is an engine on a host of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

import crossrail as xr
from crossrail import sim
from crossrail.cli.weights.simulate.lanes import UPDATE, Meetings, Trainer
from crossrail.cli.weights.simulate.outcome import Outcome, bounds_of
from crossrail.cli.weights.simulate.setting import Setting
from crossrail.cli.weights.simulate.works import collective_works, hulls_of, lanes_of, own_works, quantised_of
from crossrail.errors import UsageError
from crossrail.weights import Inventory, Plan, PlanOptions, make_plan
from crossrail.weights.planning.speeds import measured, moved_bytes

STRAGGLER_RATIO = 1.2  # who is so many times slower than the median has less to send


def simulate(
    plan: Plan, trainers: Sequence[Inventory], targets: Sequence[Inventory], setting: Setting | None = None
) -> Outcome:
    """One update by this plan. Blocks: a minute of CPU for 730 GB in 149,000 writes, growing faster than they do."""
    setting = setting or Setting()
    return sim.run(lambda world: _run(world, plan, trainers, targets, setting), seed=setting.seed)


def adapted(plan: Plan, trainers: Sequence[Inventory], targets: Sequence[Inventory], before: Outcome) -> Plan:
    """The plan of the next update, as a controller makes it that measured this one."""
    speeds = measured(moved_bytes(plan), before.busy_s, {}, STRAGGLER_RATIO)
    return make_plan(trainers, targets, replace(PlanOptions(), speeds=speeds))


async def _run(
    world: sim.World, plan: Plan, trainers: Sequence[Inventory], targets: Sequence[Inventory], setting: Setting
) -> Outcome:
    regions: list[xr.Region] = []  # open as long as they are here
    counters: list[tuple[xr.ImmCounter, int]] = []
    for target in targets:
        engine = world.host(f"target{target.rank}", [setting.nic()] * setting.rails).engine(f"target{target.rank}")
        (region,) = target.regions
        regions.append(engine.register_phantom(region.nbytes))
        counters.append((engine.imm_counter(UPDATE), plan.expected(target.rank)))
    written = {target.rank: region.descriptor for target, region in zip(targets, regions, strict=True)}
    ranks = _trainers(world, plan, trainers, setting)
    needed = max((work.tmp_bytes for trainer in ranks.values() for work in trainer.works), default=0)
    if needed > setting.watermark_bytes:
        raise UsageError(f"a task needs {needed} bytes, the watermark is {setting.watermark_bytes}")
    read = {rank: trainer.source.descriptor for rank, trainer in ranks.items()}
    await asyncio.gather(*(trainer.meet(written, read) for trainer in ranks.values()))

    if setting.rail_down:
        world.rail_down(world.hosts[len(targets)], 0, for_s=None if setting.down_ms is None else setting.down_ms / 1e3)
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    meetings = Meetings(_members(ranks.values()))
    barrier = Meetings({"groups": len(ranks), "end": len(ranks)})
    await asyncio.gather(
        *(trainer.update(meetings, barrier) for trainer in ranks.values()),
        *(counter.wait_async(count) for counter, count in counters if count),
    )
    return _outcome(plan, ranks, setting, began_s, loop.time())


def _trainers(world: sim.World, plan: Plan, trainers: Sequence[Inventory], setting: Setting) -> dict[int, Trainer]:
    """Trainers by rank, ascending; the first is the slow one."""
    hulls = hulls_of(trainers) if setting.collective else {}
    quantised = quantised_of(plan)
    found: dict[int, Trainer] = {}
    for trainer in sorted(trainers, key=lambda one: one.rank):
        first = not found
        own = plan.of_trainer(trainer.rank)
        works = (
            collective_works(own, trainer, hulls, quantised, setting.costs)
            if setting.collective
            else own_works(own, setting.costs)
        )
        nic = [setting.nic(setting.slow_link if first else 1.0)] * setting.rails
        engine = world.host(f"trainer{trainer.rank}", nic).engine(f"trainer{trainer.rank}")
        held = sum(region.nbytes for region in trainer.regions)
        found[trainer.rank] = Trainer(engine, own, works, held, setting, setting.straggler if first else 1.0)
    return found


def _members(ranks: Iterable[Trainer]) -> dict[str, int]:
    members: dict[str, int] = {}
    for rank in ranks:
        for work in rank.works:
            if work.meet:
                members[work.meet] = members.get(work.meet, 0) + 1
    return members


def _outcome(plan: Plan, ranks: dict[int, Trainer], setting: Setting, began_s: float, now_s: float) -> Outcome:
    lanes = {rank: lanes_of(trainer.works, setting.costs) for rank, trainer in ranks.items()}
    reads = {rank: sum(size for work in one.works for _, size in work.reads) for rank, one in ranks.items()}
    by_end = sorted(ranks, key=lambda rank: ranks[rank].done_s)
    shown = sorted({min(ranks), by_end[0], by_end[-1]})
    return Outcome(
        total_s=now_s - began_s,
        stages=max(lanes.values(), key=lambda lane: sum(lane.values())),
        bounds=bounds_of(plan, lanes, reads, setting),
        waited_s=float(np.mean([now_s - one.done_s for one in ranks.values()])),
        writes=len(plan.writes),
        nbytes=int(plan.writes["nbytes"].sum()),
        read_bytes=sum(reads.values()),
        busy_s={rank: one.own_s for rank, one in ranks.items()},
        spans={rank: ranks[rank].spans.all(began_s) for rank in shown},
    )

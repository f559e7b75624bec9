"""A weight update of hundreds of GPUs on simulated NICs: real plans, real engines, no byte, and time for what GPUs do.

Each trainer is a pipeline of three lanes, each busy with one task at a time: host to device, prepare (gather, fuse,
quantise), submit. What the lanes cost is what one rank of the paper's Table 5 took, divided by the bytes that it had:
see Costs. The wire, its sharing at both ends and the counting are the simulator's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

import crossrail as xr
from crossrail import sim
from crossrail.errors import UsageError
from crossrail.sim.profiles import CX7, NicProfile
from crossrail.weights import Inventory, Plan
from crossrail.weights.boxes import Ints, volume
from crossrail.weights.dtypes import DTYPES, ITEM_BYTES

_HELLO, _UPDATE = 1, 2  # immediates


@dataclass(frozen=True)
class Costs:
    """What a trainer's lanes take. Rates are 1e9 bytes of the trainers' dtype a second.

    Of a rank of Table 5 (Kimi-K2, H200): 9.4 GB of shards to the device in 184 ms; 138 GB gathered in 518 ms, fused in
    18 ms, quantised in 88 ms. Every rank gathers, fuses and quantises all that its meshes hold: were it only what it
    sends, quantising would run at a tenth of what its GPU can. A submit took 23 us there.
    barrier_ms: between groups, and at the end: over the CPUs' network, nobody published it.
    """

    h2d: float = 51.2
    gather: float = 267.0
    fuse: float = 7690.0
    quantise: float = 1500.0
    submit_us: float = 23.0
    barrier_ms: float = 2.0


@dataclass(frozen=True)
class Setting:
    """What is simulated besides the plan.

    collective: every rank takes part in the gathering of all that its meshes hold, at the same time as the others,
    as with full_tensor(); groups are separated by barriers. Else each does its own tasks, and nothing else.
    watermark_bytes: of the tasks that a trainer has begun; a task that needs more alone is refused.
    rails: of each trainer and target; together 400 Gb/s. rail_down: trainer 0 loses one of them at the beginning.
    straggler: trainer 0's lanes take so many times longer.
    """

    costs: Costs = Costs()
    collective: bool = False
    watermark_bytes: int = 8 << 30
    rails: int = 1
    rail_down: bool = False
    straggler: float = 1.0
    seed: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.rails <= 4:
            raise UsageError(f"rails={self.rails} must be 1 to 4")
        if self.rail_down and self.rails < 2:
            raise UsageError("a rail can only go down where there is another: rails=2")
        if self.straggler < 1:
            raise UsageError(f"straggler={self.straggler} must be 1 or more")

    def nic(self) -> NicProfile:
        """One of the rails."""
        return replace(CX7, gbps=CX7.gbps / self.rails, ops_per_s=CX7.ops_per_s / self.rails)


class Outcome(NamedTuple):
    """Virtual seconds. total_s: until the last target had all its counts and the last barrier was over.

    stages: what the busiest trainer's lanes took, by name. bounds: what each resource needs at least, however well all
    overlaps; the largest is `bound`. waited_s: the average trainer's, after its own last write, for the others.
    """

    total_s: float
    stages: dict[str, float]
    bounds: dict[str, float]
    waited_s: float
    writes: int
    nbytes: int

    @property
    def bound(self) -> str:
        return max(self.bounds, key=lambda name: self.bounds[name])

    @property
    def over_bound(self) -> float:
        return self.total_s / self.bounds[self.bound]


class Work(NamedTuple):
    """One step of a trainer's pipeline: seconds in each lane, memory until its writes are done, and these.

    meet: who must have come for it to be prepared, "" for nobody. group: as the plan's.
    """

    h2d_s: float
    prepare_s: dict[str, float]
    tmp_bytes: int
    writes: slice
    meet: str
    group: int


# --- what each trainer does ---


def own_works(plan: Plan, costs: Costs) -> list[Work]:
    """Of a plan that has one trainer's tasks: these, one after the other."""
    parts, gathers = plan.parts, plan.gathers
    item = ITEM_BYTES[[DTYPES.index(param.dtype) for param in plan.params]] if plan.params else np.zeros(0, np.int64)
    nbytes = volume(gathers["start"], gathers["stop"]) * item[parts["param"][gathers["part"]]]
    task = parts["task"][gathers["part"]]
    own = gathers["trainer"] == plan.tasks["trainer"][task]
    count = len(plan.tasks)
    loaded = np.bincount(task[own], weights=nbytes[own], minlength=count)
    fetched = np.bincount(task[~own], weights=nbytes[~own], minlength=count)
    made = volume(parts["start"], parts["stop"]) * item[parts["param"]]
    quantised = np.bincount(parts["task"], weights=made * parts["block"].any(axis=1), minlength=count)
    return [
        Work(
            loaded[i] / 1e9 / costs.h2d,
            {"gather": fetched[i] / 1e9 / costs.gather, "quantise": quantised[i] / 1e9 / costs.quantise},
            int(plan.tasks["tmp_bytes"][i] + loaded[i]),
            slice(plan.task_writes[i], plan.task_writes[i + 1]),
            "",
            int(plan.tasks["group"][i]),
        )
        for i in range(count)
    ]


def collective_works(
    plan: Plan, trainer: Inventory, hulls: dict[tuple[str, str], int], quantised: set[str], costs: Costs
) -> list[Work]:
    """All that the trainer holds, gathered by its mesh, and what its tasks in the plan send of it.

    hulls: bytes that a mesh holds of a parameter, by (mesh, parameter). quantised: parameters that become fp8.
    """
    tasks = {plan.params[part["param"]].name: int(part["task"]) for part in plan.parts}
    rows = trainer.rows
    loaded = volume(rows["start"], rows["stop"]) * ITEM_BYTES[rows["dtype"]]
    works = []
    for row, nbytes in zip(rows, loaded.tolist(), strict=True):
        name, mesh = trainer.names[row["name"]], trainer.meshes[row["mesh"]]
        whole = hulls[mesh, name] / 1e9
        task = tasks.get(name)
        writes = slice(plan.task_writes[task], plan.task_writes[task + 1]) if task is not None else slice(0, 0)
        prepare_s = {"gather": whole / costs.gather, "fuse": whole / costs.fuse}
        prepare_s["quantise"] = whole / costs.quantise if name in quantised else 0.0
        tmp = hulls[mesh, name] * 3 // 2
        group = int("experts" in mesh)
        works.append(Work(nbytes / 1e9 / costs.h2d, prepare_s, tmp, writes, f"{mesh} {name}", group))
    return sorted(works, key=lambda work: work.group)


def quantised_of(plan: Plan) -> set[str]:
    """Parameters that some target has as fp8 with scales."""
    parts = plan.parts[plan.parts["block"].any(axis=1)]
    return {plan.params[param].name for param in np.unique(parts["param"])}


def hulls_of(trainers: Sequence[Inventory]) -> dict[tuple[str, str], int]:
    """Bytes that each mesh holds of each parameter, once."""
    found: dict[tuple[str, str], dict[bytes, int]] = {}
    for trainer in trainers:
        rows = trainer.rows
        sizes = (volume(rows["start"], rows["stop"]) * ITEM_BYTES[rows["dtype"]]).tolist()
        for row, nbytes in zip(rows, sizes, strict=True):
            key = trainer.meshes[row["mesh"]], trainer.names[row["name"]]
            found.setdefault(key, {})[row["start"].tobytes()] = nbytes
    return {key: sum(boxes.values()) for key, boxes in found.items()}


# --- meeting ---


class _Meetings:
    """Collective steps: prepared when the last member has come."""

    def __init__(self, members: dict[str, int]) -> None:
        self._missing = dict(members)
        self._come = {name: asyncio.Event() for name in members}

    async def at(self, name: str) -> None:
        self._missing[name] -= 1
        if self._missing[name] == 0:
            self._come[name].set()
        await self._come[name].wait()


class _Memory:
    """The watermark of one trainer."""

    def __init__(self, nbytes: int) -> None:
        self._all = self._free = nbytes
        self._changed = asyncio.Event()

    async def take(self, nbytes: int) -> None:
        if nbytes > self._all:
            raise UsageError(f"a task needs {nbytes} bytes, the watermark is {self._all}")
        while nbytes > self._free:
            self._changed.clear()
            await self._changed.wait()
        self._free -= nbytes

    def give(self, nbytes: int) -> None:
        self._free += nbytes
        self._changed.set()


# --- the run ---


class _Trainer:
    """One trainer's lanes on an engine."""

    def __init__(
        self, engine: xr.Engine, plan: Plan, works: list[Work], targets: dict[int, Any], setting: Setting, slow: float
    ) -> None:
        self.works = works
        self.done_s = 0.0
        self._engine = engine
        self._targets = targets
        self._costs = setting.costs
        self._slow = slow
        self._writing: list[asyncio.Task[None]] = []
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._memory = _Memory(setting.watermark_bytes)
        self._writes = plan.writes
        ends = plan.writes["source"] + plan.writes["nbytes"]
        self._source = engine.register_phantom(max(int(ends.max(initial=1)), 1))
        self._to = [targets[rank] for rank in plan.writes["target"].tolist()]
        self._peers = sorted(set(plan.writes["target"].tolist()))

    async def meet(self) -> None:
        """Connects to all of its targets."""
        if self._peers:
            dsts = [self._targets[rank] for rank in self._peers]
            await self._engine.submit_scatter(self._source, dsts, lengths=0, src_offsets=0, dst_offsets=0, imm=_HELLO)

    async def update(self, meetings: _Meetings, barrier: _Meetings) -> None:
        """All works, each lane as soon as it is free."""
        loaded: asyncio.Queue[Work | None] = asyncio.Queue()
        prepared: asyncio.Queue[Work | None] = asyncio.Queue()
        lanes = asyncio.gather(
            self._load(loaded), self._prepare(loaded, prepared, meetings, barrier), self._submit(prepared)
        )
        # A write that fails never gives its memory back: then the lanes would wait for ever.
        either: set[asyncio.Future[Any]] = {lanes, self._failed}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if self._failed.done():
            lanes.cancel()
            self._failed.result()
        await lanes
        await asyncio.gather(*self._writing)
        self.done_s = asyncio.get_running_loop().time()
        await barrier.at("end")
        await asyncio.sleep(self._costs.barrier_ms / 1e3)

    async def _load(self, loaded: asyncio.Queue[Work | None]) -> None:
        for work in self.works:
            await self._memory.take(work.tmp_bytes)
            await asyncio.sleep(work.h2d_s * self._slow)
            loaded.put_nowait(work)
        loaded.put_nowait(None)

    async def _prepare(
        self,
        loaded: asyncio.Queue[Work | None],
        prepared: asyncio.Queue[Work | None],
        meetings: _Meetings,
        barrier: _Meetings,
    ) -> None:
        group = self.works[0].group if self.works else 0
        while (work := await loaded.get()) is not None:
            if work.meet:
                if work.group != group:
                    group = work.group
                    await barrier.at("groups")
                    await asyncio.sleep(self._costs.barrier_ms / 1e3)
                await meetings.at(work.meet)
            await asyncio.sleep(sum(work.prepare_s.values()) * self._slow)
            prepared.put_nowait(work)
        prepared.put_nowait(None)

    async def _submit(self, prepared: asyncio.Queue[Work | None]) -> None:
        while (work := await prepared.get()) is not None:
            count = work.writes.stop - work.writes.start
            if not count:
                self._memory.give(work.tmp_bytes)
                continue
            await asyncio.sleep(count * self._costs.submit_us / 1e6 * self._slow)
            self._writing.append(asyncio.create_task(self._write(work)))

    async def _write(self, work: Work) -> None:
        rows = self._writes[work.writes]
        try:
            await self._engine.submit_scatter(
                self._source,
                self._to[work.writes],
                lengths=np.ascontiguousarray(rows["nbytes"]),
                src_offsets=np.ascontiguousarray(rows["source"]),
                dst_offsets=np.ascontiguousarray(rows["offset"]),
                imm=_UPDATE,
            )
        except xr.CrossrailError as error:
            if not self._failed.done():
                self._failed.set_exception(error)
            raise
        self._memory.give(work.tmp_bytes)


def simulate(
    plan: Plan, trainers: Sequence[Inventory], targets: Sequence[Inventory], setting: Setting | None = None
) -> Outcome:
    """One update by this plan. Blocks: a minute of CPU for 730 GB in 149,000 writes, growing faster than they do."""
    setting = setting or Setting()
    return sim.run(lambda world: _run(world, plan, trainers, targets, setting), seed=setting.seed)


async def _run(
    world: sim.World, plan: Plan, trainers: Sequence[Inventory], targets: Sequence[Inventory], setting: Setting
) -> Outcome:
    nic = [setting.nic()] * setting.rails
    regions: list[xr.Region] = []  # open as long as they are here
    descriptors: dict[int, xr.RegionDescriptor] = {}
    counters: list[tuple[xr.ImmCounter, int]] = []
    expected = np.bincount(plan.writes["target"], minlength=max(plan.targets) + 1)
    for target in targets:
        engine = world.host(f"target{target.rank}", nic).engine(f"target{target.rank}")
        (region,) = target.regions
        regions.append(engine.register_phantom(region.nbytes))
        descriptors[target.rank] = regions[-1].descriptor
        counters.append((engine.imm_counter(_UPDATE), int(expected[target.rank])))

    hulls = hulls_of(trainers) if setting.collective else {}
    quantised = quantised_of(plan)
    ranks: list[_Trainer] = []
    for trainer in trainers:
        host = world.host(f"trainer{trainer.rank}", nic)
        own = plan.of_trainer(trainer.rank)
        works = (
            collective_works(own, trainer, hulls, quantised, setting.costs)
            if setting.collective
            else own_works(own, setting.costs)
        )
        slow = setting.straggler if trainer.rank == 0 else 1.0
        ranks.append(_Trainer(host.engine(f"trainer{trainer.rank}"), own, works, descriptors, setting, slow))
    await asyncio.gather(*(rank.meet() for rank in ranks))

    if setting.rail_down:
        world.rail_down(world.hosts[len(targets)], 0)
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    meetings = _Meetings(_members(ranks))
    barrier = _Meetings({"groups": len(ranks), "end": len(ranks)})
    await asyncio.gather(
        *(rank.update(meetings, barrier) for rank in ranks),
        *(counter.wait_async(count) for counter, count in counters if count),
    )
    total_s = loop.time() - began_s
    waited_s = float(np.mean([began_s + total_s - rank.done_s for rank in ranks]))
    return Outcome(
        total_s,
        _stages(ranks, setting),
        _bounds(plan, ranks, setting),
        waited_s,
        len(plan.writes),
        int(plan.writes["nbytes"].sum()),
    )


def _members(ranks: Sequence[_Trainer]) -> dict[str, int]:
    members: dict[str, int] = {}
    for rank in ranks:
        for work in rank.works:
            if work.meet:
                members[work.meet] = members.get(work.meet, 0) + 1
    return members


def _lanes(rank: _Trainer, setting: Setting) -> dict[str, float]:
    lanes = {"h2d": sum(work.h2d_s for work in rank.works)}
    for work in rank.works:
        for name, seconds in work.prepare_s.items():
            lanes[name] = lanes.get(name, 0.0) + seconds
    count = sum(work.writes.stop - work.writes.start for work in rank.works)
    lanes["submit"] = count * setting.costs.submit_us / 1e6
    return lanes


def _stages(ranks: Sequence[_Trainer], setting: Setting) -> dict[str, float]:
    return max((_lanes(rank, setting) for rank in ranks), key=lambda lanes: sum(lanes.values()))


def _bounds(plan: Plan, ranks: Sequence[_Trainer], setting: Setting) -> dict[str, float]:
    """Each resource alone, of whoever has most to do with it."""
    rate = CX7.gbps / 8 * 1e9
    senders = plan.tasks["trainer"][plan.writes["task"]]
    sent, received = (_most(of, plan.writes["nbytes"]) / rate for of in (senders, plan.writes["target"]))
    lanes = [_lanes(rank, setting) for rank in ranks]
    if setting.straggler > 1:
        lanes[0] = {name: seconds * setting.straggler for name, seconds in lanes[0].items()}
    prepare = ("gather", "fuse", "quantise")
    return {
        "links of senders": sent,
        "links of receivers": received,
        "host to device": max(lane["h2d"] for lane in lanes),
        "prepare": max(sum(lane.get(name, 0.0) for name in prepare) for lane in lanes),
        "submit": max(lane["submit"] for lane in lanes),
    }


def _most(owner: Ints, nbytes: Ints) -> float:
    return float(np.bincount(owner, weights=nbytes).max())

"""Updates among real engines in one process: every version arrives bit for bit, and nothing else is ever read."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import crossrail as xr
from crossrail.weights.errors import UpdateFailed
from crossrail.weights.inventory.memory import WeightMemory
from crossrail.weights.planning import replanner
from crossrail.weights.planning.plan import Plan
from crossrail.weights.planning.planner import PlanOptions
from crossrail.weights.services import roster
from crossrail.weights.services.receiver import WeightReceiver
from crossrail.weights.services.trainer import WeightTrainer
from crossrail.weights.step.barrier import Barrier, EngineBarrier
from crossrail.weights.step.preparer import NumpyPreparer
from crossrail.weights.step.step import Step
from crossrail.weights.step.task import ReadyTask
from tests.support.limits import SLOWNESS
from tests.weights.allocations import no_engine_memory, python_bytes
from tests.weights.conftest import MakeFleet
from tests.weights.fleet import PATIENCE_S, until
from tests.weights.small_model import TARGETS


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize(("spare", "mapped"), [(True, True), (False, False)])
async def test_versions_arrive_bit_for_bit(make_fleet: MakeFleet, transport: str, spare: bool, mapped: bool) -> None:
    fleet = make_fleet(transport, spare=spare, mapped=mapped)
    await fleet.start()
    for version in range(1, 5):
        report = await fleet.update(version)
        await fleet.assert_holds(version)
        assert (report.plan_s > 0) == (version == 1)
        assert sorted(report.steps) == list(range(4))
        assert report.written_bytes == int(fleet.controller.plan.writes["nbytes"].sum())


async def test_float32_masters_all_gathered(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(dtype="float32", plan_options=PlanOptions(gather="full"))
    await fleet.start()
    report = await fleet.update(1)
    await fleet.assert_holds(1)
    assert sum(step.gathered_bytes for step in report.steps.values()) > 0


async def test_watermark_is_honoured_and_measured(make_fleet: MakeFleet) -> None:
    options = PlanOptions(gather="full")
    roomy = make_fleet(plan_options=options)
    await roomy.start()
    await roomy.update(1)
    sizes = {rank: [t.piece_bytes for t in trainer._assigned.tasks] for rank, trainer in roomy.trainers.items()}
    limit = max(max(pieces) for pieces in sizes.values())
    fleet = make_fleet(plan_options=options, trainer_options={"tmp_bytes_max": limit})
    await fleet.start()
    report = await fleet.update(1)
    await fleet.assert_holds(1)
    # It must have been in the way of some, and taken up by one.
    assert any(sum(pieces) > limit for pieces in sizes.values())
    assert max(step.peak_bytes for step in report.steps.values()) == limit
    for rank, step in report.steps.items():
        assert max(sizes[rank]) <= step.peak_bytes <= limit


@pytest.mark.parametrize(("dtype", "gather", "spare"), [("bfloat16", "needed", True), ("float32", "full", False)])
async def test_nothing_is_allocated_after_the_first_step(
    make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch, dtype: str, gather: Any, spare: bool
) -> None:
    # One trainer: with more, what numpy makes in passing would add up now and then.
    fleet = make_fleet(trainer_count=1, dtype=dtype, spare=spare, plan_options=PlanOptions(gather=gather))
    await fleet.start()
    await fleet.update(1)
    trainer = fleet.trainers[0]
    assert isinstance(trainer._preparer, NumpyPreparer)
    tools = trainer._preparer.tools
    before = trainer._arena, tools.quantiser._wide, tools.caster._wide, trainer._assigned
    with no_engine_memory(monkeypatch):
        left, most = await python_bytes(fleet, range(3, 6))
    after = trainer._arena, tools.quantiser._wide, tools.caster._wide, trainer._assigned
    assert all(now is then for now, then in zip(after, before, strict=True))
    assert left < 16 << 10
    assert most < tools.caster._wide.nbytes  # what numpy makes in passing, and messages


class ToldBarrier:
    """Tells when its trainer comes."""

    def __init__(self, barrier: Barrier, came: Callable[[], None]) -> None:
        self._barrier, self._came = barrier, came
        self.close = barrier.close

    async def wait(self, timeout_s: float) -> None:
        self._came()
        await self._barrier.wait(timeout_s)


@pytest.mark.parametrize("groups", [("first", "second"), ("second", "first")])
async def test_groups_are_written_one_after_another(
    make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch, groups: tuple[str, str]
) -> None:
    def mesh_of(name: str) -> str:
        return "first" if name in ("q", "k", "up") else "second"

    events: list[tuple[str, str]] = []  # what began to be written, by mesh; who came to a barrier

    def make_barrier(engine: xr.Engine, others: Sequence[xr.Address], imm: int) -> Barrier:
        return ToldBarrier(EngineBarrier(engine, others, imm), lambda: events.append(("came", engine.name)))

    write = Step._write

    def recorded(step: Step, index: int) -> None:
        events.append(("write", mesh_of(step._tasks[index].name.split(", ")[0])))
        write(step, index)

    monkeypatch.setattr(Step, "_write", recorded)
    options = PlanOptions(groups=tuple((mesh,) for mesh in groups), write_bytes_min=2000)
    fleet = make_fleet(plan_options=options, mesh_of=mesh_of, trainer_options={"make_barrier": make_barrier})
    await fleet.start()
    for version in (1, 2):
        events.clear()
        await fleet.update(version)
        await fleet.assert_holds(version)
        assert list(dict.fromkeys(what for kind, what in events if kind == "write")) == [*groups]
        second = events.index(("write", groups[1]))
        assert ("write", groups[0]) not in events[second:]
        # All have been at the barrier behind the first group, and at the one before it if they read from each other.
        barriers = 1 + fleet.trainers[0]._assigned.meets_first
        came = Counter(who for kind, who in events[:second] if kind == "came")
        assert came == {f"trainer-{rank}": barriers for rank in range(4)}


async def test_group_of_a_mesh_that_no_trainer_has_is_refused(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(trainer_count=1, plan_options=PlanOptions(groups=(("first",), ("second",))))
    controller = await fleet.start(targets=[0])
    offer = asyncio.ensure_future(fleet.publish(1))
    with pytest.raises(xr.UsageError, match="groups: no trainer has a mesh 'first', 'second', there is 'fsdp'"):
        await controller.update(1, PATIENCE_S)
    with pytest.raises(UpdateFailed, match="no trainer has a mesh 'first', 'second'"):
        await offer


async def test_mesh_whose_trainers_went_is_left_out_of_the_groups(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(trainer_count=0, plan_options=PlanOptions(groups=(("first",), ("second",))))
    controller = await fleet.start(targets=[])
    arrays = {mesh: np.full((8, 4), number, np.float32) for number, mesh in enumerate(("target", "first", "second"))}
    for rank, mesh in enumerate(("first", "second")):  # a replica each
        box = fleet.mailbox(mesh)
        memory = WeightMemory(fleet.engines[mesh], "trainer", rank)
        memory.add("w", arrays[mesh], mesh=mesh)
        fleet.trainers[rank] = WeightTrainer(box, memory)
        await fleet.trainers[rank].join(controller.address, PATIENCE_S)
    box = fleet.mailbox("target")
    memory = WeightMemory(fleet.engines["target"], "target", 0)
    memory.add("w", arrays["target"])
    fleet.receivers[0] = WeightReceiver(box, memory)
    await fleet.receivers[0].join(controller.address, PATIENCE_S)

    for version, there in enumerate(([0, 1], [1])):
        offers = [asyncio.ensure_future(fleet.trainers[rank].publish(version)) for rank in there]
        await controller.update(version, PATIENCE_S)
        await asyncio.gather(*offers)
        await fleet.trainers[0].leave()

    assert (arrays["target"] == 2).all()


async def test_progress_goes_up_to_all_of_it(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    controller = await fleet.start()
    seen: list[tuple[str, int, int]] = []
    report = await fleet.update(1, on_progress=lambda *told: seen.append(told))
    assert controller.plan is not None
    wholes = {"plan": 1, "ready": len(controller.plan.tasks), "open": TARGETS, "write": report.written_bytes}
    assert list(dict.fromkeys(stage for stage, _, _ in seen)) == list(wholes)
    assert all(whole == wholes[stage] for stage, _, whole in seen)
    for stage in wholes:
        done = [count for each, count, _ in seen if each == stage]
        assert done == sorted(done)
    assert seen[-1] == ("write", report.written_bytes, report.written_bytes)
    seen.clear()
    await fleet.update(2, on_progress=lambda *told: seen.append(told))
    assert list(dict.fromkeys(stage for stage, _, _ in seen)) == ["open", "write"]
    assert seen[1] == ("write", 0, report.written_bytes)


async def test_readers_keep_their_version_while_the_next_arrives(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(spare=True)
    await fleet.start()
    await fleet.update(1)
    reader = fleet.receivers[0].reading(PATIENCE_S)
    async with reader as reading:
        kept = {key: reading.like(array).copy() for key, array in fleet.sinks[0].arrays.items()}
        await fleet.update(2)
        assert reading.version == 1
        for key, array in fleet.sinks[0].arrays.items():
            assert (reading.like(array) == kept[key]).all()
        # The one after would go where we read: it waits for us, and gives up.
        why = await fleet.failing_update(3, timeout_s=1.0)
        assert "not complete within 1 s" in why or "still reads" in why
    await fleet.assert_holds(2)
    await fleet.update(3)
    await fleet.assert_holds(3)


async def test_update_in_place_waits_for_readers_and_pauses(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(spare=False)
    await fleet.start()
    calls: list[str] = []

    async def pause(version: int) -> None:
        calls.append(f"pause {version}")

    async def resume(version: int) -> None:
        calls.append(f"resume {version}")

    fleet.receivers[1]._hooks.pause, fleet.receivers[1]._hooks.resume = pause, resume
    async with fleet.receivers[1].reading(PATIENCE_S):
        update = asyncio.ensure_future(fleet.update(1))
        await until(lambda: calls)
        with pytest.raises(xr.WaitTimeout):
            await fleet.receivers[1].wait_version(1, 0.2)
    await update
    assert calls == ["pause 1", "resume 1"]
    await fleet.assert_holds(1)


async def test_hooks_may_be_plain_functions(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(spare=False)
    await fleet.start()
    calls: list[str] = []
    fleet.receivers[1]._hooks.pause = lambda version: calls.append(f"pause {version}")
    fleet.receivers[1]._hooks.resume = lambda version: calls.append(f"resume {version}")
    await fleet.update(1)
    assert calls == ["pause 1", "resume 1"]
    await fleet.assert_holds(1)


async def test_pause_that_raises_is_named(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(trainer_count=1, spare=False)
    await fleet.start(targets=[1])

    def fail(_version: int) -> None:
        raise RuntimeError("no")

    fleet.receivers[1]._hooks.pause = fail
    assert "inference rank 1: pause(1) raised RuntimeError: no" in await fleet.failing_update(1)


@pytest.mark.parametrize("by", ["pause", "reader"])
async def test_whatever_keeps_an_update_in_place_from_opening_is_named(
    make_fleet: MakeFleet, caplog: pytest.LogCaptureFixture, by: str
) -> None:
    fleet = make_fleet(spare=False)
    await fleet.start()
    await fleet.update(1)
    receiver, is_over = fleet.receivers[1], asyncio.Event()

    async def hold(_version: int) -> None:
        await is_over.wait()

    async def read() -> None:
        async with receiver.reading(PATIENCE_S):
            await is_over.wait()

    if by == "pause":
        receiver._hooks.pause = hold
    reader = asyncio.ensure_future(read() if by == "reader" else asyncio.sleep(0))
    await asyncio.sleep(0)
    # The plan is there: opening is all that has to begin in this time. Who opens answers at its end, with the reason.
    said = await fleet.failing_update(2, 2.0 * SLOWNESS)
    assert ("pause(2) has not returned" if by == "pause" else "somebody still reads the weights") in said
    assert "inference rank 1" in said
    assert "Traceback" not in caplog.text
    is_over.set()
    await reader
    await fleet.update(3)
    await fleet.assert_holds(3)


async def test_readers_that_always_come_again_do_not_keep_an_update_in_place_waiting(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(spare=False)
    await fleet.start()
    receiver, is_over = fleet.receivers[1], False

    async def read() -> None:
        while not is_over:
            async with receiver.reading(PATIENCE_S):
                await asyncio.sleep(0.01)

    # They relieve each other: at any time one of them reads.
    readers = [asyncio.ensure_future(read()) for _ in range(3)]
    for version in (1, 2, 3):
        await asyncio.sleep(0.05)
        await fleet.update(version)
    is_over = True
    await asyncio.gather(*readers)
    await fleet.assert_holds(3)


async def test_a_reading_within_another_does_not_wait_for_the_update_that_waits_for_it(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(spare=False)
    await fleet.start()
    receiver = fleet.receivers[1]
    async with receiver.reading(PATIENCE_S) as outer:
        update = asyncio.ensure_future(fleet.update(1))
        await until(lambda: receiver._buffers.versions._openings, update)
        async with receiver.reading(PATIENCE_S) as inner:
            assert inner.version == outer.version
        with pytest.raises(xr.WaitTimeout, match="an update is under way"):
            await asyncio.create_task(read_once(receiver, 0.05))
    await update
    await fleet.assert_holds(1)


async def read_once(receiver: WeightReceiver, timeout_s: float) -> None:
    async with receiver.reading(timeout_s):
        pass


async def test_readers_come_again_when_an_update_that_waited_for_one_gives_up(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(spare=False)
    await fleet.start()
    receiver = fleet.receivers[1]
    async with receiver.reading(PATIENCE_S):
        late_waits = asyncio.Event()
        fleet.run_out_of_time(late_waits.is_set)
        update = asyncio.ensure_future(fleet.failing_update(1))
        await until(lambda: receiver._buffers.versions._openings, update)
        late = asyncio.create_task(read_once(receiver, PATIENCE_S))
        await asyncio.sleep(0)
        late_waits.set()
        await update
        await late


async def test_ranks_come_and_go_between_updates(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    controller = await fleet.start(targets=[0, 1])
    await fleet.update(1)
    late = await fleet.add_target(2)
    report = await fleet.update(2)
    assert report.plan_s > 0
    assert late.version == 2
    await fleet.assert_holds(2)
    await fleet.receivers[0].leave()
    assert controller.ranks("target") == [1, 2]
    await fleet.update(3)
    await fleet.assert_holds(3, [1, 2])
    await fleet.assert_holds(2, [0])
    await fleet.trainers[3].leave()
    await fleet.drop_trainer(3)
    await fleet.add_trainer(3, "another-trainer-3")
    report = await fleet.update(4)
    assert report.plan_s > 0
    await fleet.assert_holds(4, [1, 2])


@pytest.mark.parametrize("role", ["trainer", "target"])
@pytest.mark.parametrize("stage", ["plan", "open", "write"])
async def test_who_joins_during_an_update_is_in_the_next(
    make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stage: str, role: str
) -> None:
    fleet = make_fleet(trainer_count=2)
    await fleet.start([0, 1])
    reached, joined = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    plan, write = replanner.make_plan, fleet.trainers[1]._go

    def planning(*arguments: Any, **more: Any) -> Plan:
        loop.call_soon_threadsafe(reached.set)
        assert joined.wait(PATIENCE_S)
        return plan(*arguments, **more)

    async def waiting(_: int = 0) -> None:
        reached.set()
        await asyncio.to_thread(joined.wait, PATIENCE_S)

    async def writing(*arguments: Any) -> Any:
        await waiting()
        return await write(*arguments)

    if stage == "plan":
        monkeypatch.setattr(replanner, "make_plan", planning)
    elif stage == "write":
        monkeypatch.setattr(fleet.trainers[1], "_go", writing)
    else:
        monkeypatch.setattr(fleet.receivers[0]._buffers, "has_spare", False)  # so that it pauses
        monkeypatch.setattr(fleet.receivers[0]._hooks, "pause", waiting)
    published = asyncio.ensure_future(fleet.publish(1, [0, 1]))
    update = asyncio.ensure_future(fleet.controller.update(1, PATIENCE_S))
    await asyncio.wait_for(reached.wait(), PATIENCE_S)
    await (fleet.add_trainer(2) if role == "trainer" else fleet.add_target(2))
    joined.set()
    await asyncio.gather(update, published)
    await fleet.assert_holds(1, [0, 1])
    assert not [record.message for record in caplog.records if "left out" in record.message]
    assert fleet.controller.ranks(role) == [0, 1, 2]


async def test_small_tasks_are_prepared_many_at_a_time(make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = make_fleet(trainer_count=1, plan_options=PlanOptions(write_bytes_min=1))
    controller = await fleet.start()
    handed: list[int] = []
    prepare = NumpyPreparer.prepare

    def recorded(preparer: NumpyPreparer, tasks: Sequence[tuple[ReadyTask, int]]) -> None:
        handed.append(len(tasks))
        prepare(preparer, tasks)

    monkeypatch.setattr(NumpyPreparer, "prepare", recorded)
    await fleet.update(1)
    await fleet.assert_holds(1)
    assert controller.plan is not None
    prepared = int((~controller.plan.tasks["direct"]).sum())
    assert sum(handed) == prepared > len(handed)


async def test_nobody_reads_from_a_trainer_that_has_not_offered_yet(make_fleet: MakeFleet) -> None:
    """It may still be computing them: what was read before would be of the version before."""
    fleet = make_fleet(plan_options=PlanOptions(gather="full"))
    await fleet.start()
    await fleet.update(1)
    early = asyncio.ensure_future(fleet.publish(2, [0, 1, 2]))
    update = asyncio.ensure_future(fleet.controller.update(2, PATIENCE_S))
    steps = [fleet.trainers[rank] for rank in (0, 1, 2)]
    first = [trainer._step for trainer in steps]
    await until(lambda: all(trainer._step not in (before, None) for trainer, before in zip(steps, first, strict=True)))
    await asyncio.sleep(0.2)  # in which the others would gather all they can
    await fleet.publish(2, [3])
    report = await update
    await early
    assert sum(step.gathered_bytes for step in report.steps.values()) > 0
    await fleet.assert_holds(2)


async def test_trainers_that_read_nothing_of_each_other_do_not_meet_first(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(trainer_count=1)
    await fleet.start()
    await fleet.update(1)
    assert fleet.trainers[0]._assigned is not None and not fleet.trainers[0]._assigned.meets_first


@pytest.mark.parametrize("side", ["trainer", "target", "controller"])
async def test_loop_goes_on_while_thousands_of_arrays_join(
    make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch, side: str
) -> None:
    fleet = make_fleet(trainer_count=1)
    await fleet.start(targets=[0])
    went_on = threading.Event()

    def slow(work: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any) -> Any:
            asyncio.run_coroutine_threadsafe(beat(), loop)
            assert went_on.wait(PATIENCE_S), "the event loop was blocked"
            return work(*args)

        return wrapped

    async def beat() -> None:
        went_on.set()

    loop = asyncio.get_running_loop()
    member = fleet.receivers[0] if side == "target" else fleet.trainers[0]
    if side == "controller":
        monkeypatch.setattr(roster.Inventory, "from_bytes", slow(roster.Inventory.from_bytes))
    else:
        monkeypatch.setattr(member.memory, "inventory", slow(member.memory.inventory))

    await member.join(fleet.controller.address, PATIENCE_S)

    assert went_on.is_set()
    await fleet.update(1)
    await fleet.assert_holds(1)


async def test_calls_of_the_program_that_block_in_the_loops_threads_hold_up_no_update(make_fleet: MakeFleet) -> None:
    """Members join, a plan is made, ranks are opened and fenced, and no thread is left behind."""
    fleet = make_fleet(trainer_count=2, spare=True)
    let_go, loop = threading.Event(), asyncio.get_running_loop()
    pool = ThreadPoolExecutor(2)
    loop.set_default_executor(pool)
    blocked = [loop.run_in_executor(None, let_go.wait, 2 * PATIENCE_S) for _ in range(3)]
    try:
        controller = await asyncio.wait_for(fleet.start(), PATIENCE_S)
        await asyncio.wait_for(fleet.update(1), PATIENCE_S)
        offered = asyncio.ensure_future(fleet.publish(2, [0]))
        with pytest.raises(UpdateFailed):
            await asyncio.wait_for(controller.update(2, 0.5), PATIENCE_S)  # fences
        await asyncio.gather(offered, return_exceptions=True)
        await asyncio.wait_for(fleet.update(3), PATIENCE_S)
        await fleet.assert_holds(3)
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("crossrail-weights_")]
    finally:
        let_go.set()
        await asyncio.gather(*blocked)


async def test_a_load_that_was_dropped_ends_before_its_memory_is_used_anew(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(dtype="float32", plan_options=PlanOptions(gather="full"))
    await fleet.start()
    trainers = fleet.trainers.values()
    let_go = threading.Event()
    held = [trainer._loader.submit(let_go.wait) for trainer in trainers]
    update = asyncio.ensure_future(fleet.update(1))
    try:
        await until(lambda: all(trainer._assigned for trainer in trainers))
        await asyncio.sleep(0.5)
        assert all(trainer._arena is None for trainer in trainers)
    finally:
        let_go.set()
    await update
    await fleet.assert_holds(1)
    assert all(each.done() for each in held)
    assert all(trainer._arena is not None for trainer in trainers)

"""What goes wrong fails on all sides, says whose fault it is, and the next attempt succeeds."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Awaitable
from typing import Any

import pytest

import crossrail as xr
from crossrail.weights.errors import UpdateFailed
from crossrail.weights.inventory.holdings import Role
from crossrail.weights.planning import replanner
from crossrail.weights.planning.planner import PlanOptions
from crossrail.weights.services import messages as m
from crossrail.weights.services.receiver import WeightReceiver
from crossrail.weights.services.reports import ControllerOptions
from crossrail.weights.step.barrier import EngineBarrier
from crossrail.weights.step.preparer import NumpyPreparer
from tests.weights.conftest import MakeFleet
from tests.weights.fleet import PATIENCE_S, unanswered, until


async def test_who_is_late_is_named(make_fleet: MakeFleet) -> None:
    """By the controller, and so at every trainer; those who only wait for it are not."""
    fleet = make_fleet(trainer_count=3)
    controller = await fleet.start()
    published = [asyncio.ensure_future(fleet.publish(1, [rank])) for rank in (0, 2)]
    fleet.run_out_of_time(
        lambda: (
            all(trainer._going is not None for trainer in fleet.trainers.values())
            and all(fleet.trainers[rank]._offer is not None for rank in (0, 2))
        )
    )
    with pytest.raises(
        UpdateFailed,
        match=rf"1 failed: (not complete within {PATIENCE_S:g} s: trainer 1 has not called publish\(\)|"
        r"trainer 1: Go: version 1 was not offered in)[^,]*$",
    ):
        await controller.update(1, PATIENCE_S)
    for outcome in await asyncio.gather(*published, return_exceptions=True):
        assert isinstance(outcome, UpdateFailed)
        assert "trainer 1" in str(outcome)
    await fleet.update(2)
    await fleet.assert_holds(2)


@pytest.mark.parametrize("held_up", [False, True])
@pytest.mark.parametrize("role", ["trainer", "target"])
async def test_who_does_not_answer_is_named(make_fleet: MakeFleet, role: Role, held_up: bool) -> None:
    """held_up: the controller begins to look at the time late, as on a busy machine."""
    fleet = make_fleet(trainer_count=3, options=ControllerOptions(abort_s=2.0))
    controller = await fleet.start()
    await fleet.update(1)
    in_time = controller._in_time

    async def in_time_late(work: Awaitable[None], deadline_at_s: float) -> bool:
        if held_up:
            await asyncio.sleep(0.1)
        return await in_time(work, deadline_at_s)

    controller._in_time = in_time_late  # type: ignore[method-assign]
    member = fleet.trainers[1] if role == "trainer" else fleet.receivers[1]
    handlers = dict(member._mailbox._handlers)

    for kind in handlers:
        member._mailbox.handle(kind, unanswered)
    published = [asyncio.ensure_future(fleet.publish(2, [rank])) for rank in (0, 2)]
    with pytest.raises(UpdateFailed) as raised:
        await controller.update(2, 1.0)
    name = "trainer 1 does not answer" if role == "trainer" else "inference rank 1 has not answered Open"
    assert str(raised.value) == f"weight update 2 failed: not complete within 1 s: {name}"
    for outcome in await asyncio.gather(*published, return_exceptions=True):
        assert name in str(outcome)


async def test_rank_that_stands_still_while_trainers_write_is_named(
    make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = make_fleet(trainer_count=2)
    controller = await fleet.start()
    await fleet.update(1)

    async def never(*_: Any) -> None:
        await asyncio.get_running_loop().create_future()

    def is_written_to() -> bool:
        if any(trainer._going is None or trainer._step is None for trainer in fleet.trainers.values()):
            return False
        fleet.mailboxes["target-1"].handle(m.RollCall, unanswered)
        return True

    with monkeypatch.context() as patched:
        patched.setattr(EngineBarrier, "wait", never)
        fleet.run_out_of_time(is_written_to)
        why = await fleet.failing_update(2)
    assert why == f"weight update 2 failed: not complete within {PATIENCE_S:g} s: inference rank 1 does not answer"
    fleet.mailboxes["target-1"].handle(m.RollCall, fleet.receivers[1]._membership.on_roll_call)
    await controller.ready(range(2), range(3), PATIENCE_S)
    await fleet.update(3)
    await fleet.assert_holds(3)


async def test_plan_that_takes_longer_than_the_update_may_is_named(
    make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = make_fleet(trainer_count=1)
    await fleet.start(targets=[0])
    begun, ends = threading.Event(), threading.Event()
    make_plan = replanner.make_plan

    def making(*args: Any) -> Any:
        begun.set()
        assert ends.wait(PATIENCE_S)
        return make_plan(*args)

    with monkeypatch.context() as patched:
        patched.setattr(replanner, "make_plan", making)
        fleet.run_out_of_time(begun.is_set)
        why = await fleet.failing_update(1)
        ends.set()
    assert why == f"weight update 1 failed: not complete within {PATIENCE_S:g} s: the plan was still being made"
    await fleet.update(2)
    await fleet.assert_holds(2)


@pytest.mark.parametrize("missing", ["q", "down"])
async def test_parameter_that_trainers_lack_is_named(make_fleet: MakeFleet, missing: str) -> None:
    fleet = make_fleet(trainer_count=1)
    await fleet.start()
    for sink in fleet.sinks.values():
        assert any(holding.name == missing for holding in sink.memory.inventory().holdings)
    member = fleet.controller._roster.members["trainer", 0]
    inventory = member.inventory
    kept = [holding for holding in inventory.holdings if holding.name != missing]
    member.inventory = type(inventory).of("trainer", 0, inventory.regions, kept)
    why = await fleet.failing_update(1)
    assert repr(missing) in why
    assert all(receiver.version == -1 for receiver in fleet.receivers.values())


async def test_watermark_too_small_says_what_is_needed(make_fleet: MakeFleet) -> None:
    options = PlanOptions(gather="full")
    fleet = make_fleet(plan_options=options, trainer_options={"tmp_bytes_max": 4096})
    await fleet.start()
    why = await fleet.failing_update(1)
    (needed,) = {int(number) for number in re.findall(r"tmp_bytes_max= of WeightTrainer, .* of at least (\d+)", why)}
    assert "watermark is 4096 bytes, preparing" in why
    # Each trainer says what it needs; the largest suffices for all.
    enough = 8 * needed
    again = make_fleet(plan_options=options, trainer_options={"tmp_bytes_max": enough})
    await again.start()
    await again.update(1)
    await again.assert_holds(1)


async def test_watermark_that_no_memory_holds_is_named(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(trainer_options={"tmp_bytes_max": 1 << 47}, trainer_count=1)
    await fleet.start(targets=[1])

    why = await fleet.failing_update(1)

    assert f"trainer 0: Assign: tmp_bytes_max={1 << 47}: mmap: no address space" in why


async def test_rank_that_waited_in_vain_says_why_an_update_failed(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(trainer_count=1)
    await fleet.start(targets=[0])
    receiver = fleet.receivers[0]
    waiting = asyncio.ensure_future(receiver.wait_version(1, 0.5))
    await asyncio.sleep(0)
    await receiver._updates.on_abort(fleet.controller.address, m.Abort(1, "'mtp': wanted by nobody"))

    with pytest.raises(xr.WaitTimeout, match=r"1 not .* within 0\.5 s; an update failed meanwhile: 'mtp': wanted by"):
        await waiting
    with pytest.raises(xr.WaitTimeout, match=r"version 1 not complete within 0\.1 s$"):
        await receiver.wait_version(1, 0.1)


async def test_nan_is_named_and_the_next_version_comes_through(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    await fleet.start()
    await fleet.update(1)
    with fleet.loading_nan(2):
        why = await fleet.failing_update(2)
    assert re.search(r"up\[\d+, 5\] is nan", why)
    await fleet.assert_holds(1)
    await fleet.update(3)
    await fleet.assert_holds(3)


async def test_target_memory_that_is_closed_in_the_middle_of_an_update(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(spare=True)
    await fleet.start()
    await fleet.update(1)  # into the spare memory
    opened = fleet.receivers[1]._updates.on_open

    async def and_close(sender: bytes, question: m.Open) -> object:
        answer = await opened(sender, question)
        fleet.sinks[1].memory.regions[0].close()
        return answer

    fleet.mailboxes["target-1"].handle(m.Open, and_close)
    why = await fleet.failing_update(2)
    assert "target-1" in why and "region" in why
    assert fleet.controller.ranks("target") == [0, 2]  # it could not be fenced: it is left out
    await fleet.assert_holds(1, [0, 2])
    await fleet.update(3)
    await fleet.assert_holds(3, [0, 2])


async def test_counts_of_a_barrier_that_a_trainer_never_came_to_are_let_go(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(trainer_count=2)
    controller = await fleet.start(targets=[0])
    first = int.from_bytes(fleet.mailboxes["controller"].wire.identity(controller.address)[:8], "little")

    def counted(attempt: int) -> int:
        number = fleet.options.imm_first + 2 * ((first + attempt) % (1 << 19)) + 1
        return fleet.engines["trainer-1"].imm_counter(number).poll()

    offered = asyncio.ensure_future(fleet.publish(1, [0], 2 * PATIENCE_S))
    updating = asyncio.ensure_future(controller.update(1, 2 * PATIENCE_S))
    while not counted(1):  # trainer 0 waits there for trainer 1, which offers nothing
        await asyncio.sleep(0.01)
    updating.cancel()
    await asyncio.gather(offered, updating, return_exceptions=True)

    await fleet.update(2)

    assert counted(1) == 0


async def test_barrier_of_a_step_that_cannot_begin_is_closed(
    make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[EngineBarrier] = []

    def make_barrier(*given: Any) -> EngineBarrier:
        made.append(EngineBarrier(*given))
        return made[-1]

    fleet = make_fleet(trainer_count=2, trainer_options={"make_barrier": make_barrier})
    await fleet.start(targets=[2])
    await fleet.update(1)

    def broken(*_: Any) -> None:
        raise xr.CrossrailError("no view of this memory")

    with monkeypatch.context() as patched:
        patched.setattr(NumpyPreparer, "open", broken)
        assert "no view of this memory" in await fleet.failing_update(2)
    assert len(made) > 2 and all(barrier._group is None for barrier in made)
    await fleet.update(3)
    await fleet.assert_holds(3)


async def test_inference_rank_that_is_not_there_has_no_weights(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(trainer_count=1, spare=False)
    await fleet.start(targets=[0])
    box = fleet.mailbox("new")
    new = WeightReceiver(box, fleet.memory("new", "target", 1)[0])
    with pytest.raises(xr.UsageError, match="inference rank 1 has not joined yet"):
        async with new.reading():
            pass

    receiver = fleet.receivers[0]
    waits = [receiver.wait_version(1, 10 * PATIENCE_S), receiver.receive(1, 10 * PATIENCE_S)]
    waiting = [asyncio.ensure_future(wait) for wait in waits]
    await asyncio.sleep(0.05)
    await receiver.close()

    for each in waiting:
        with pytest.raises(xr.UsageError, match="inference rank 0 is closed"):
            await asyncio.wait_for(each, PATIENCE_S)
    with pytest.raises(xr.UsageError, match="inference rank 0 is closed"):
        async with receiver.reading():
            pass


async def test_surplus_count_is_no_whole_version(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(trainer_count=1)
    await fleet.start(targets=[0])
    await fleet.update(1)
    receiver, engine = fleet.receivers[0], fleet.engines["trainer-0"]
    imm = fleet.controller._imm_of(fleet.controller._attempt + 1)
    group = engine.add_peer_group([fleet.engines["target-0"].address])
    commit = receiver._updates.on_await

    async def after_another_count(sender: bytes, question: object) -> object:
        await engine.submit_barrier(group, imm)
        await until(lambda: receiver._updates.attempt.counter.poll() > receiver._updates.attempt.expected)
        return await commit(sender, question)

    fleet.mailboxes["target-0"].handle(m.Await, after_another_count)
    assert "1 more writes than" in await fleet.failing_update(2)
    fleet.mailboxes["target-0"].handle(m.Await, commit)
    await fleet.update(3)
    await fleet.assert_holds(3)

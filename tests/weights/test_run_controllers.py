"""Several controllers, one after the other or at once, and updates that their controller ends."""

from __future__ import annotations

import asyncio
import gc
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import crossrail as xr
from crossrail.control.mailbox import NoAnswer
from crossrail.weights.errors import UpdateFailed
from crossrail.weights.inventory.holdings import Role
from crossrail.weights.inventory.memory import WeightMemory
from crossrail.weights.services import messages as m
from crossrail.weights.services.controller import WeightController
from crossrail.weights.services.receiver import WeightReceiver
from crossrail.weights.services.reports import ControllerOptions
from crossrail.weights.services.trainer import WeightTrainer
from crossrail.weights.services.versions import State
from tests.weights.conftest import MakeFleet
from tests.weights.fleet import PATIENCE_S, Fleet, until


async def test_progress_that_raises_ends_the_update_everywhere(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    await fleet.start()
    offered = asyncio.ensure_future(fleet.publish(1))

    def broken(stage: str, *_: int) -> None:
        if stage == "write":
            raise LookupError("no such bar")

    with pytest.raises(LookupError, match="no such bar"):
        await fleet.controller.update(1, PATIENCE_S, broken)
    with pytest.raises(UpdateFailed, match="LookupError: no such bar"):
        await offered
    assert fleet.controller.totals.failed == 1
    await fleet.update(1)
    await fleet.assert_holds(1)


async def test_update_that_ends_late_because_its_event_loop_stood_still_blames_nobody_else(
    make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = make_fleet()
    controller = await fleet.start()
    late_s, now_s = 0.0, asyncio.get_running_loop().time
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now_s() + late_s)

    def stand_still(stage: str, *_: int) -> None:
        nonlocal late_s
        late_s = 90.0 if stage == "write" else 0.0

    with pytest.raises(UpdateFailed, match=r"within 30 s: the controller's event loop did not run until [5-9]\d\.\d s"):
        await controller.update(1, 30.0, stand_still)


async def test_progress_that_raises_between_stages_ends_the_update_everywhere(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    await fleet.start()
    offered = asyncio.ensure_future(fleet.publish(1, [0]))  # the others offer nothing: trainers are asked how far

    def broken(stage: str, *_: int) -> None:
        calls.append(stage)
        if calls.count("write") == 2:
            raise LookupError("no such bar")

    calls: list[str] = []
    with pytest.raises(LookupError, match="no such bar"):
        await fleet.controller.update(1, PATIENCE_S, broken)
    with pytest.raises(UpdateFailed, match="LookupError: no such bar"):
        await offered
    await fleet.update(1)
    await fleet.assert_holds(1)


async def test_trainer_that_does_not_say_how_far_it_is_does_not_end_the_telling(
    make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = make_fleet(options=ControllerOptions(abort_s=8.0, progress_s=0.01))
    controller = await fleet.start()
    calls: list[str] = []
    ask, refusals = controller._all, iter(range(2))

    async def ask_all(members: list[Any], question: Any, answer: type, *more: Any) -> list[Any]:
        if answer is m.Progress and next(refusals, None) is not None:
            raise NoAnswer("it is busy")
        return await ask(members, question, answer, *more)

    monkeypatch.setattr(controller, "_all", ask_all)
    update = asyncio.ensure_future(controller.update(1, PATIENCE_S, lambda stage, *_: calls.append(stage)))
    await until(lambda: calls.count("write") >= 3, update)
    await fleet.publish(1)
    await update
    assert calls.count("write") >= 3 and next(refusals, None) is None


async def test_asking_that_is_cancelled_as_one_of_those_asked_fails_ends(
    make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An update that ends cancels who asks how far trainers are, and waits for that.
    fleet = make_fleet(trainer_count=2)
    controller = await fleet.start(targets=[0])
    silent = asyncio.Event()

    async def ask(to: bytes, *_: Any) -> Any:
        if to == fleet.trainers[0].memory.engine.address.to_bytes():
            await silent.wait()
        asking.cancel()
        raise NoAnswer("it is busy")

    monkeypatch.setattr(controller._mailbox, "ask", ask)
    trainers = controller._roster.of("trainer")
    asking = asyncio.ensure_future(controller._all(trainers, lambda _: m.AskProgress(), m.Progress, PATIENCE_S))
    with pytest.raises(asyncio.CancelledError):
        await asking


async def test_second_update_at_the_same_time_is_refused(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    await fleet.start()
    first = asyncio.ensure_future(fleet.controller.update(1, PATIENCE_S))
    await asyncio.sleep(0)
    with pytest.raises(xr.UsageError, match="update to version 1 is under way"):
        await fleet.controller.update(2, PATIENCE_S)
    offer = asyncio.ensure_future(fleet.publish(1))
    await until(lambda: fleet.trainers[0]._offer)
    with pytest.raises(xr.UsageError, match="offers version 1 already"):
        await fleet.trainers[0].publish(2)
    await first
    await offer
    await fleet.assert_holds(1)


async def test_another_controller_is_refused(make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, other = make_fleet(trainer_count=1), make_fleet(trainer_count=1)
    await fleet.start(targets=[0])
    await other.start(targets=[0])
    other.controller._roster.members.update(fleet.controller._roster.members)

    async def nobody(*_: Any) -> None:
        pass

    monkeypatch.setattr(other.controller, "_roll_call", nobody)  # as if they had left it just after
    with pytest.raises(UpdateFailed, match="belongs to another controller"):
        await other.controller.update(1, PATIENCE_S)
    await fleet.update(2)
    await fleet.assert_holds(2)


async def add(fleet: Fleet, role: Role, rank: int, arrays: dict[str, np.ndarray], name: str = "", **more: Any) -> Any:
    """A trainer or inference rank of these arrays, which has joined; closed with the fleet. name: of its engine."""
    box = fleet.mailbox(name := name or f"{role}-{rank}")
    memory = WeightMemory(fleet.engines[name], role, rank)
    for parameter, array in arrays.items():
        memory.add(parameter, array, **more)
    (fleet.sources if role == "trainer" else fleet.sinks)[rank] = SimpleNamespace(memory=memory)
    member = WeightTrainer(box, memory, 1 << 20) if role == "trainer" else WeightReceiver(box, memory)
    (fleet.trainers if role == "trainer" else fleet.receivers)[rank] = member
    await member.join(fleet.controller.address, PATIENCE_S)
    return member


async def test_replicas_that_have_each_lost_another_trainer_serve_together(make_fleet: MakeFleet) -> None:
    """Two of three trainers each; the first plan is of all, so that parts that overlap are no mistake later."""
    fleet = make_fleet(trainer_count=0, spare=False)
    controller = await fleet.start(targets=[])
    shards: dict[int, np.ndarray] = {}

    async def update(version: int) -> None:
        for rank in trainers:
            shards[rank][:] = 100 * version + np.arange(4)[:, np.newaxis] + 4 * (rank % 3)
        offers = asyncio.gather(*(trainer.publish(version, PATIENCE_S) for trainer in trainers.values()))
        await controller.update(version, PATIENCE_S)
        await offers
        assert (whole == 100 * version + np.arange(12)[:, np.newaxis]).all()

    trainers = fleet.trainers
    for rank in range(6):
        shards[rank], begin = np.zeros((4, 8), np.float32), 4 * (rank % 3)
        box, mesh = ((begin, begin + 4), (0, 8)), f"replica {rank // 3}"
        await add(fleet, "trainer", rank, {"w": shards[rank]}, shape=(12, 8), box=box, mesh=mesh)
    whole = np.zeros((12, 8), np.float32)
    await add(fleet, "target", 0, {"w": whole})
    await update(1)
    for rank in (0, 5):
        trainer = trainers.pop(rank)
        await trainer.leave()
        await trainer.close()
    await update(2)
    await trainers.pop(3).close()
    with pytest.raises(UpdateFailed, match=r"'w': \[0:4, 0:8\] is held by no trainer.*trainer 3 \(it is gone: "):
        await controller.update(3, PATIENCE_S)


async def test_inference_rank_that_alone_wants_a_parameter_does_not_fail_updates_once_it_has_gone(
    make_fleet: MakeFleet,
) -> None:
    """A stage of a pipeline, say. What nobody has ever wanted is a mistake of whoever describes it."""
    fleet = make_fleet(trainer_count=0, spare=False)
    controller = await fleet.start(targets=[])
    weights = {name: np.zeros((4, 8), np.float32) for name in ("first", "last")}
    stages = [{name: np.zeros_like(array)} for name, array in weights.items()]

    async def update(version: int) -> None:
        for array in weights.values():
            array[:] = version
        offer = asyncio.ensure_future(trainer.publish(version, PATIENCE_S))
        await controller.update(version, PATIENCE_S)
        await offer

    trainer = await add(fleet, "trainer", 0, weights)
    first = await add(fleet, "target", 0, stages[0])
    with pytest.raises(xr.UsageError, match="'last': held by trainers and wanted by no inference rank"):
        await controller.update(1, PATIENCE_S)
    last = await add(fleet, "target", 1, stages[1])
    await update(2)
    await last.leave()
    await last.close()
    await update(3)
    assert [array.max() for stage in stages for array in stage.values()] == [3, 2]
    await add(fleet, "target", 1, {"first": np.zeros((4, 8), np.float32)}, name="another")
    with pytest.raises(xr.UsageError, match="'last': held by trainers and wanted by no inference rank"):
        await controller.update(4, PATIENCE_S)
    await fleet.receivers[1].leave()
    await first.leave()
    with pytest.raises(UpdateFailed, match="all inference ranks have gone, and none has joined since"):
        await controller.update(4, PATIENCE_S)


@pytest.mark.parametrize("role", ["trainer", "target"])
async def test_member_that_has_joined_another_controller_is_left_out_before_anybody_opens(
    make_fleet: MakeFleet, role: Role
) -> None:
    fleet, other = make_fleet(spare=False, trainer_count=2), make_fleet(trainer_count=0)
    controller = await fleet.start()
    await other.start(targets=[])
    await fleet.update(1)
    member: Any = fleet.trainers[1] if role == "trainer" else fleet.receivers[1]
    await member.join(other.controller.address, PATIENCE_S)
    name = "trainer 1" if role == "trainer" else "inference rank 1"

    if role == "trainer":  # nobody else has its shards
        with pytest.raises(UpdateFailed, match=rf"{name} \(it is gone: {name} has joined another controller\)"):
            await controller.update(2, PATIENCE_S)
        await fleet.assert_holds(1)
    else:
        assert (await fleet.update(2)).left_out == [name]
        await fleet.assert_holds(2, [rank for rank in fleet.receivers if rank != 1])
        await fleet.assert_holds(1, [1])

    await member.join(controller.address, PATIENCE_S)
    await fleet.update(3)
    await fleet.assert_holds(3)


async def test_controller_that_is_made_anew_on_its_mailbox_goes_on(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(trainer_count=1)
    await fleet.start(targets=[0])
    for version in (1, 2):
        await fleet.update(version)

    fleet.controller = WeightController(fleet.mailboxes["controller"])
    for member in (fleet.trainers[0], fleet.receivers[0]):
        await member.join(fleet.controller.address, PATIENCE_S)

    await fleet.update(3)
    await fleet.assert_holds(3)


@pytest.mark.parametrize("spare", [True, False])
async def test_another_controller_takes_over_in_the_middle_of_an_update(make_fleet: MakeFleet, spare: bool) -> None:
    fleet = make_fleet(spare=spare, trainer_count=2)
    first = await fleet.start()
    await fleet.update(1)
    # Trainer 1 offers nothing, so this one stands still after Open, and its controller dies there.
    update = asyncio.ensure_future(first.update(2, PATIENCE_S))
    offer = asyncio.ensure_future(fleet.publish(2, [0]))
    await until(lambda: all(receiver._updates.attempt for receiver in fleet.receivers.values()))
    fleet.engines.pop("controller").close()
    await fleet.mailboxes.pop("controller").close()
    await asyncio.gather(update, return_exceptions=True)
    fleet.controller = WeightController(fleet.mailbox("second"), fleet.plan_options, fleet.options)
    for member in [*fleet.trainers.values(), *fleet.receivers.values()]:
        await member.join(fleet.controller.address, PATIENCE_S)
    offer.cancel()
    await asyncio.gather(offer, return_exceptions=True)
    if spare:
        await fleet.assert_holds(1)
    else:
        assert all(receiver.state is State.TORN for receiver in fleet.receivers.values())
    await fleet.update(3)
    await fleet.assert_holds(3)


@pytest.mark.parametrize("fails", [False, True])
async def test_update_that_is_cancelled_again_and_again_is_under_way_until_it_has_ended(
    make_fleet: MakeFleet, caplog: pytest.LogCaptureFixture, fails: bool
) -> None:
    fleet = make_fleet(trainer_count=2)
    controller = await fleet.start(targets=[0, 1])
    await fleet.update(1)
    receiver, come, may_answer = fleet.receivers[0], asyncio.Event(), asyncio.Event()

    async def slowly(sender: bytes, abort: m.Abort) -> object:
        come.set()
        await may_answer.wait()
        return await receiver._updates.on_abort(sender, abort)

    async def refuse(_sender: bytes, _question: m.Open) -> object:
        raise xr.UsageError("not now")

    fleet.mailboxes["target-0"].handle(m.Abort, slowly)
    if fails:
        fleet.mailboxes["target-1"].handle(m.Open, refuse)
    update = asyncio.ensure_future(controller.update(2, PATIENCE_S))
    await until(lambda: any(each._updates.attempt for each in fleet.receivers.values()) or come.is_set())
    if not fails:
        update.cancel()
    await asyncio.wait_for(come.wait(), PATIENCE_S)
    for _ in range(2):
        update.cancel()
        await asyncio.sleep(0.01)
    assert update.cancelled()
    with pytest.raises(xr.UsageError, match="update to version 2 is under way"):
        await controller.update(3, PATIENCE_S)
    may_answer.set()
    await until(lambda: controller._under_way is None)
    assert (controller.totals.failed, controller.totals.cancelled) == ((1, 0) if fails else (0, 1))
    fleet.mailboxes["target-1"].handle(m.Open, fleet.receivers[1]._updates.on_open)
    assert (await fleet.update(3)).written_bytes
    await fleet.assert_holds(3)
    gc.collect()
    assert "never retrieved" not in caplog.text


@pytest.mark.parametrize("offered", [[], [0], [0, 1]], ids=str)
async def test_update_that_is_cancelled_ends_everywhere(make_fleet: MakeFleet, offered: list[int]) -> None:
    fleet = make_fleet(trainer_count=2)
    controller = await fleet.start(targets=[0, 1])
    await fleet.update(1)
    offers = [asyncio.ensure_future(fleet.publish(2, [rank])) for rank in offered]
    update = asyncio.ensure_future(controller.update(2, PATIENCE_S))
    await until(lambda: all(receiver._updates.attempt for receiver in fleet.receivers.values()), update)
    update.cancel()
    outcomes = await asyncio.gather(update, return_exceptions=True)
    assert isinstance(outcomes[0], asyncio.CancelledError)
    assert all(receiver._updates.attempt is None for receiver in fleet.receivers.values())
    for outcome in await asyncio.gather(*offers, return_exceptions=True):
        # The last answers of a whole update may have come before the cancellation: then it was committed.
        assert outcome is None if controller.version == 2 else "the update was cancelled" in str(outcome)
    await fleet.assert_holds(controller.version)
    await fleet.update(3)
    await fleet.assert_holds(3)

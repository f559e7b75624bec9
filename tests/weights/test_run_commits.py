"""Inference ranks switch first, and then trainers hear that an update is complete."""

from __future__ import annotations

import asyncio

import pytest

import crossrail as xr
from crossrail.weights.errors import UpdateFailed
from crossrail.weights.services import messages as m
from crossrail.weights.services.reports import ControllerOptions
from tests.weights.conftest import MakeFleet
from tests.weights.fleet import PATIENCE_S, Fleet, unanswered, until


async def test_who_does_not_answer_commit_is_named_in_the_report(
    make_fleet: MakeFleet, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = make_fleet(trainer_count=2, options=ControllerOptions(abort_s=1.0))
    controller = await fleet.start()
    fleet.mailboxes["target-0"].handle(m.Commit, unanswered)

    async def resume(_version: int) -> None:
        raise LookupError("no such engine")

    fleet.receivers[2]._hooks.resume = resume
    report = await fleet.update(1)
    assert report.left_out == ["inference rank 0", "inference rank 2"]
    assert "version 1 is complete, but maybe not at inference rank 0: it did not answer Commit: no ans" in caplog.text
    assert "Commit: inference rank 2: resume(1) raised LookupError: no such engine" in caplog.text
    assert controller.version == 1 and controller.totals.done == 1
    await fleet.assert_holds(1, [1])


async def test_version_that_no_inference_rank_has_answered_for_has_failed(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(trainer_count=1, options=ControllerOptions(abort_s=1.0))
    controller = await fleet.start(targets=[0, 1])
    for name in ("target-0", "target-1"):
        fleet.mailboxes[name].handle(m.Commit, unanswered)
    offered = asyncio.ensure_future(fleet.publish(1))
    with pytest.raises(UpdateFailed, match="no inference rank has answered that it has it: inference rank 0: it did"):
        await controller.update(1, PATIENCE_S)
    with pytest.raises(UpdateFailed, match="no inference rank has answered that it has it: inference rank 0: it did"):
        await offered
    assert controller.version == -1 and (controller.totals.failed, controller.totals.done) == (1, 0)
    for rank, receiver in fleet.receivers.items():
        fleet.mailboxes[f"target-{rank}"].handle(m.Commit, receiver._updates.on_commit)
    await controller.ready([0], [0, 1], PATIENCE_S)
    await fleet.update(1)
    await fleet.assert_holds(1)


class SlowToResume:
    """Of inference rank 1."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.is_resuming, self.may_go_on = asyncio.Event(), asyncio.Event()
        fleet.receivers[1]._hooks.resume = self.resume

    async def resume(self, _version: int) -> None:
        self.is_resuming.set()
        await self.may_go_on.wait()


async def test_publish_returns_when_inference_ranks_have_switched_and_resumed(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(trainer_count=2)
    controller = await fleet.start()
    slow = SlowToResume(fleet)
    offered = asyncio.ensure_future(fleet.publish(1))
    updating = asyncio.ensure_future(controller.update(1, PATIENCE_S))
    await asyncio.wait_for(slow.is_resuming.wait(), PATIENCE_S)
    await asyncio.sleep(0.3)
    assert not offered.done() and controller.version == -1
    slow.may_go_on.set()
    await offered
    assert [receiver.version for receiver in fleet.receivers.values()] == [1] * 3
    assert (await updating).left_out == []


async def test_publish_returns_without_a_rank_that_does_not_resume(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(trainer_count=2, options=ControllerOptions(abort_s=1.0))
    await fleet.start()
    SlowToResume(fleet)
    report = await fleet.update(1)
    assert report.left_out == ["inference rank 1"]
    assert fleet.receivers[1].version == 1  # it switched, and nobody knows
    await fleet.controller.ready([], [1], PATIENCE_S)
    await fleet.assert_holds(1)


async def test_update_that_is_cancelled_while_ranks_switch_is_told_to_trainers_all_the_same(
    make_fleet: MakeFleet,
) -> None:
    fleet = make_fleet(trainer_count=2)
    controller = await fleet.start()
    slow = SlowToResume(fleet)
    offered = asyncio.ensure_future(fleet.publish(1))
    updating = asyncio.ensure_future(controller.update(1, PATIENCE_S))
    await asyncio.wait_for(slow.is_resuming.wait(), PATIENCE_S)
    for _ in range(2):  # the second time it returns at once
        updating.cancel()
        await asyncio.sleep(0.01)
    with pytest.raises(asyncio.CancelledError):
        await updating
    with pytest.raises(xr.UsageError, match="under way"):
        await controller.update(2, PATIENCE_S)
    slow.may_go_on.set()
    await asyncio.wait_for(offered, PATIENCE_S)
    assert controller.version == 1
    await until(lambda: controller._under_way is None)
    totals = controller.totals
    assert (totals.done, totals.failed, totals.cancelled, sum(totals.durations.counts)) == (1, 0, 0, 1)
    await fleet.update(2)
    await fleet.assert_holds(2)


async def test_trainer_that_joins_anew_or_is_lost_while_ranks_switch(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(trainer_count=3, options=ControllerOptions(abort_s=4.0), dtype="float32")
    controller = await fleet.start()
    slow = SlowToResume(fleet)
    offers = [asyncio.ensure_future(fleet.publish(1, [rank])) for rank in range(3)]
    updating = asyncio.ensure_future(controller.update(1, PATIENCE_S))
    await asyncio.wait_for(slow.is_resuming.wait(), PATIENCE_S)
    await fleet.trainers[0].join(controller.address, PATIENCE_S)
    await fleet.drop_trainer(2)
    slow.may_go_on.set()
    await asyncio.wait_for(asyncio.gather(*offers[:2]), PATIENCE_S)
    with pytest.raises(UpdateFailed, match="trainer 2 is closing"):
        await offers[2]
    assert (await updating).left_out == ["trainer 2"]


async def test_trainer_that_is_out_of_time_while_ranks_switch_is_told_what_to_offer(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(trainer_count=2)
    controller = await fleet.start()
    slow = SlowToResume(fleet)
    offers = [asyncio.ensure_future(fleet.publish(1, [rank], timeout_s=(4.0, PATIENCE_S)[rank])) for rank in range(2)]
    updating = asyncio.ensure_future(controller.update(1, PATIENCE_S))
    await asyncio.wait_for(slow.is_resuming.wait(), PATIENCE_S)
    with pytest.raises(UpdateFailed, match="has not said that all inference ranks have it"):
        await offers[0]
    slow.may_go_on.set()
    await offers[1]
    assert (await updating).left_out == []
    again = asyncio.ensure_future(fleet.publish(1, [0]))
    with pytest.raises(UpdateFailed):
        await controller.update(2, PATIENCE_S)
    with pytest.raises(UpdateFailed) as raised:
        await again
    assert raised.value.asked_for == 2
    await fleet.update(2)
    await fleet.assert_holds(2)

"""Members that were closed, or whose memory was, without a word: updates go on without them, and say so."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

import crossrail as xr
from crossrail.weights.errors import UpdateFailed
from crossrail.weights.services import messages as m
from crossrail.weights.services.receiver import WeightReceiver
from tests.weights import small_model as small
from tests.weights.conftest import MakeFleet
from tests.weights.fleet import PATIENCE_S, Fleet, until


async def others_get(fleet: Fleet, version: int, caplog: pytest.LogCaptureFixture) -> None:
    """All but inference rank 1, which is named."""
    assert (await fleet.update(version)).left_out == ["inference rank 1"]
    assert f"update to version {version} goes on without inference rank 1: it is gone: inference rank 1" in caplog.text
    assert fleet.controller.ranks("target") == [0, 2]
    await fleet.assert_holds(version, [0, 2])
    assert (await fleet.update(version + 1)).left_out == []
    await fleet.assert_holds(version + 1, [0, 2])
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("how", ["memory", "region"])
@pytest.mark.parametrize("spare", [True, False])
@pytest.mark.parametrize("mapped", [True, False])
async def test_inference_rank_whose_memory_was_closed_is_left_out(
    make_fleet: MakeFleet, caplog: pytest.LogCaptureFixture, mapped: bool, spare: bool, how: str
) -> None:
    fleet = make_fleet(trainer_count=2, spare=spare, mapped=mapped)
    await fleet.start()
    await fleet.update(1)
    memory = fleet.sinks[1].memory
    if how == "memory":
        memory.close()
    else:
        memory.regions[0].close()
    await others_get(fleet, 2, caplog)
    assert "memory of its weights was closed" in caplog.text
    with pytest.raises(xr.UsageError, match="was closed"):
        await fleet.receivers[1].join(fleet.controller.address, PATIENCE_S)


async def test_memory_that_is_closed_in_the_middle_of_an_update_fails_that_one_alone(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(trainer_count=1, spare=False, mapped=False)
    controller = await fleet.start()
    await fleet.update(1)
    opened = fleet.receivers[1]._updates.on_open

    async def and_close(sender: bytes, question: m.Open) -> object:
        answer = await opened(sender, question)
        fleet.sinks[1].memory.close()
        return answer

    fleet.mailboxes["target-1"].handle(m.Open, and_close)
    assert "target-1" in await fleet.failing_update(2)
    assert controller.ranks("target") == [0, 2]
    await fleet.update(3)
    await fleet.assert_holds(3, [0, 2])


@pytest.mark.parametrize("spare", [True, False])
async def test_inference_rank_that_closed_without_leaving_is_left_out(
    make_fleet: MakeFleet, caplog: pytest.LogCaptureFixture, spare: bool
) -> None:
    fleet = make_fleet(trainer_count=2, spare=spare)
    await fleet.start()
    await fleet.update(1)
    paused: list[int] = []

    async def pause(version: int) -> None:
        paused.append(version)

    fleet.receivers[1]._hooks.pause = pause
    await fleet.receivers[1].close()
    await others_get(fleet, 2, caplog)
    assert paused == []


async def test_inference_rank_that_closes_in_the_middle_of_open_says_so(
    make_fleet: MakeFleet, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = make_fleet(trainer_count=1, spare=False)
    controller = await fleet.start()
    receiver = fleet.receivers[1]

    async def pause(_version: int) -> None:
        await receiver.close()

    receiver._hooks.pause = pause
    assert "inference rank 1: Open: attempt 1 is over" in await fleet.failing_update(1)
    assert controller.ranks("target") == [0, 2]
    assert not [record for record in caplog.records if record.exc_info]
    await fleet.update(2)
    await fleet.assert_holds(2, [0, 2])


@pytest.mark.parametrize("how", ["trainer", "memory", "region"])
async def test_trainer_that_was_closed_is_named(make_fleet: MakeFleet, how: str) -> None:
    fleet = make_fleet(trainer_count=2, dtype="float32", mapped=False)
    controller = await fleet.start()
    await fleet.update(1)
    trainer = fleet.trainers[1]
    if how == "trainer":
        await trainer.close()
    elif how == "memory":
        trainer.memory.close()
    else:
        trainer.memory.regions[0].close()
    with pytest.raises(xr.UsageError, match=r"^trainer 1( is closed|: memory of its weights was closed, )"):
        await trainer.publish(2)
    with pytest.raises(UpdateFailed, match=r"Gone since the last plan: trainer 1 \(it is gone: trainer 1.* closed"):
        await controller.update(2, PATIENCE_S)
    assert controller.ranks("trainer") == [0]
    if how == "trainer":
        trainer.memory.close()
    await fleet.add_trainer(1, "another-trainer-1")
    await fleet.update(2)
    await fleet.assert_holds(2)
    await trainer.close()


async def test_regions_of_an_abort_that_are_not_those_of_the_join_are_not_taken(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(trainer_count=1)
    controller = await fleet.start()

    async def other(*_: Any) -> m.Aborted:
        return m.Aborted([[]])

    fleet.mailboxes["target-1"].handle(m.Abort, other)
    update = asyncio.ensure_future(controller.update(1, PATIENCE_S))
    await until(lambda: fleet.receivers[1]._updates.attempt)
    update.cancel()
    await asyncio.gather(update, return_exceptions=True)
    assert controller.ranks("target") == [0, 2] or fleet.receivers[1]._membership._joining is not None
    fleet.mailboxes["target-1"].handle(m.Abort, fleet.receivers[1]._updates.on_abort)
    await controller.ready([], [1], PATIENCE_S)  # it joins again by itself
    await fleet.update(2)
    await fleet.assert_holds(2)


@pytest.mark.parametrize("spare", [True, False])
async def test_closed_member_does_not_join_again(make_fleet: MakeFleet, spare: bool) -> None:
    fleet = make_fleet(trainer_count=2, spare=spare)
    controller = await fleet.start()
    await fleet.update(1)
    for member in (fleet.receivers[0], fleet.trainers[0]):
        await member.leave()
        await member.close()
        with pytest.raises(xr.UsageError, match=r"(inference rank|trainer) 0 is closed\. Next: make another Weight"):
            await member.join(controller.address, PATIENCE_S)
        await member.close()
    assert controller.ranks("target") == [1, 2] and controller.ranks("trainer") == [1]


async def test_receiver_that_is_closed_while_it_joins_keeps_no_memory(
    make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = make_fleet(trainer_count=1, spare=True)
    controller = await fleet.start(targets=[0])
    box = fleet.mailbox("new")
    memory, allocate = fleet.memory("new", "target", 1)
    fleet.sinks[1] = small.Target(memory, allocate)
    receiver = WeightReceiver(box, memory, spare=True)
    made: list[xr.Region] = []
    allocating, closed = threading.Event(), threading.Event()
    alloc_spare = receiver._buffers._alloc_spare

    def slow() -> list[xr.Region]:
        allocating.set()
        closed.wait(PATIENCE_S)
        made.extend(alloc_spare())
        return list(made)

    monkeypatch.setattr(receiver._buffers, "_alloc_spare", slow)
    joining = asyncio.ensure_future(receiver.join(controller.address, PATIENCE_S))
    await asyncio.to_thread(allocating.wait, PATIENCE_S)
    await receiver.close()
    closed.set()
    with pytest.raises(xr.UsageError, match="inference rank 1 is closed"):
        await joining
    assert made and all(region.closed for region in made)
    assert controller.ranks("target") == [0]


def answer_late(fleet: Fleet, name: str) -> None:
    """What this one's mailbox sends from now on takes a while."""
    wire = fleet.mailboxes[name].wire
    post = wire.post

    async def late(to: bytes, packet: bytes) -> None:
        await asyncio.sleep(0.05)
        await post(to, packet)

    wire.post = lambda to, packet: asyncio.ensure_future(late(to, packet))  # type: ignore[method-assign]


async def close_all(fleet: Fleet, name: str, member: Any) -> None:
    """In the order of the documentation."""
    await member.close()
    await fleet.mailboxes.pop(name).close()
    member.memory.close()
    fleet.engines.pop(name).close()


@pytest.mark.parametrize("spare", [True, False])
async def test_rank_that_is_closed_as_soon_as_it_has_a_version_says_that_it_has_it(
    make_fleet: MakeFleet, spare: bool
) -> None:
    fleet = make_fleet(trainer_count=1, spare=spare)
    await fleet.start(targets=[0])
    receiver = fleet.receivers[0]
    resumed: list[int] = []

    async def resume(version: int) -> None:
        await asyncio.sleep(0.05)
        resumed.append(version)

    receiver._hooks.resume = resume

    async def wait_and_end() -> None:
        await receiver.wait_version(1, PATIENCE_S)
        answer_late(fleet, "target-0")
        await close_all(fleet, "target-0", receiver)

    ending = asyncio.ensure_future(wait_and_end())
    report = await fleet.update(1)
    await ending
    assert report.left_out == []
    assert resumed == [1]


async def test_trainer_that_is_closed_as_soon_as_it_has_published_is_not_left_out(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(trainer_count=1)
    await fleet.start(targets=[0])

    async def publish_and_end() -> None:
        await fleet.publish(1)
        answer_late(fleet, "trainer-0")
        await close_all(fleet, "trainer-0", fleet.trainers[0])

    ending = asyncio.ensure_future(publish_and_end())
    report = await fleet.controller.update(1, PATIENCE_S)
    await ending
    assert report.left_out == []

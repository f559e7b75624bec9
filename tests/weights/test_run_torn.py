"""What an inference rank holds after an update that failed, after close(), and for the next receiver."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

import crossrail as xr
from crossrail.weights import gpu as weights_gpu
from crossrail.weights.errors import TornWeights, UpdateFailed
from crossrail.weights.inventory.memory import WeightMemory
from crossrail.weights.services import messages as m
from crossrail.weights.services.receiver import WeightReceiver
from crossrail.weights.services.reports import ControllerOptions
from crossrail.weights.services.versions import State
from tests.weights import small_model as small
from tests.weights.conftest import MakeFleet
from tests.weights.fleet import PATIENCE_S, Fleet, unanswered, until


async def test_update_in_place_that_fails_leaves_torn_weights_until_the_next(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(spare=False)
    await fleet.start()
    await fleet.update(1)
    await fleet.drop_trainer(1)
    await fleet.failing_update(2)
    for receiver in fleet.receivers.values():
        # The one whose Open was not sent before the loss was noticed still has its old weights.
        if receiver.state is State.TORN:
            with pytest.raises(TornWeights, match="after version 1"):
                async with receiver.reading(1.0):
                    pass
        else:
            assert receiver.version == 1
    await fleet.add_trainer(1, "another-trainer-1")
    await fleet.update(3)
    await fleet.assert_holds(3)


async def begun_and_cancelled(fleet: Fleet, version: int) -> None:
    """An update for which trainer 1 does not come, and trainer 0 may have written its half."""
    offered = asyncio.ensure_future(fleet.publish(version, [0], 2 * PATIENCE_S))
    updating = await fleet.begun_update(version, 2 * PATIENCE_S)
    updating.cancel()
    await asyncio.gather(offered, updating, return_exceptions=True)


@asynccontextmanager
async def opening(fleet: Fleet, version: int) -> AsyncIterator[None]:
    """Meanwhile an update waits for inference rank 0 to pause, all others are open, and no trainer writes yet. In the
    end it is cancelled.
    """
    may_pause = asyncio.Event()
    fleet.receivers[0]._hooks.pause = lambda _version: may_pause.wait()
    others = [receiver for rank, receiver in fleet.receivers.items() if rank]
    offered = asyncio.ensure_future(fleet.publish(version))
    updating = asyncio.ensure_future(fleet.controller.update(version, 2 * PATIENCE_S))
    await until(lambda: all(receiver._buffers.versions.is_receiving for receiver in others))
    yield
    updating.cancel()
    outcomes = await asyncio.gather(updating, offered, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [asyncio.CancelledError, UpdateFailed]
    may_pause.set()


@pytest.mark.parametrize("was_torn", [False, True])
async def test_update_that_fails_before_trainers_write_leaves_weights_as_they_were(
    make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch, was_torn: bool
) -> None:
    fleet = make_fleet(trainer_count=2, spare=False)
    await fleet.start()
    await fleet.update(1)
    if was_torn:
        await begun_and_cancelled(fleet, 2)
    fenced = list[xr.Region]()
    with monkeypatch.context() as patched:
        patched.setattr(xr.Region, "revoke", lambda region, _timeout_s: fenced.append(region))
        async with opening(fleet, 3):
            assert all(fleet.sinks[rank].memory.is_torn for rank in (1, 2))
    state = State.TORN if was_torn else State.WHOLE
    for rank, receiver in fleet.receivers.items():
        assert (receiver.state, receiver.memory.is_torn) == (state, was_torn), rank
    assert not fenced
    if not was_torn:
        await fleet.assert_holds(1)
    await fleet.update(4)
    await fleet.assert_holds(4)


async def test_spare_memory_that_no_trainer_has_written_is_what_it_was(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(trainer_count=2, spare=True)
    await fleet.start()
    await fleet.update(1)  # into the spare memory, so that the next one goes into the other
    async with fleet.receivers[0].reading(PATIENCE_S):
        await fleet.update(2)
        offered = asyncio.ensure_future(fleet.publish(3))  # waits for that reader
        updating = asyncio.ensure_future(fleet.controller.update(3, PATIENCE_S))
        await until(lambda: fleet.receivers[1]._buffers.versions.is_receiving)
        updating.cancel()
        await asyncio.gather(updating, offered, return_exceptions=True)
    assert fleet.receivers[1]._buffers.versions._states == [State.WHOLE] * 2
    await fleet.assert_holds(2)


@pytest.mark.parametrize("told", ["nothing", "another attempt", "no more than that it has failed", "writes have begun"])
async def test_weights_are_torn_unless_it_is_certain_that_no_trainer_writes(make_fleet: MakeFleet, told: str) -> None:
    fleet = make_fleet(trainer_count=2, spare=False, options=ControllerOptions(abort_s=1.0))
    controller = await fleet.start()
    await fleet.update(1)
    receiver, box = fleet.receivers[1], fleet.mailboxes["target-1"]
    async with opening(fleet, 2):
        assert receiver._updates.attempt is not None
        number = receiver._updates.attempt.number
        if told == "nothing":
            box.handle(m.Abort, unanswered)  # it is left out, and joins again
        else:
            abort = {
                "another attempt": m.Abort(number + 1, "later", has_begun=False),
                "no more than that it has failed": m.Abort(number, "as older controllers say it"),
                "writes have begun": m.Abort(number, "a trainer died", has_begun=True),
            }[told]
            await fleet.mailboxes["controller"].ask(receiver._mailbox.address, abort, m.Aborted, PATIENCE_S)
    await controller.ready([], [1], PATIENCE_S)
    await until(lambda: receiver._updates.attempt is None)
    assert receiver.state is State.TORN and receiver.memory.is_torn
    assert fleet.receivers[2].state is State.WHOLE


async def test_attempt_of_another_controller_is_not_known_to_be_unwritten(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(trainer_count=2, spare=False)
    await fleet.start()
    await fleet.update(1)
    receiver, second = fleet.receivers[1], fleet.mailbox("second")
    async with opening(fleet, 2):
        assert receiver._updates.attempt is not None
        receiver._updates.controller = second.address  # as join() has it, before it has ended what it was in
        abort = m.Abort(receiver._updates.attempt.number, "of the same number", has_begun=False)
        await second.ask(receiver._mailbox.address, abort, m.Aborted, PATIENCE_S)
        assert receiver.state is State.TORN
        receiver._updates.controller = fleet.controller.address


async def test_fence_that_is_under_way_ends_though_no_trainer_writes(
    make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = make_fleet(trainer_count=2, spare=False)
    await fleet.start()
    await fleet.update(1)
    receiver, revoke = fleet.receivers[1], xr.Region.revoke
    fences, may_fence = threading.Event(), threading.Event()

    def slow_revoke(region: xr.Region, timeout_s: float) -> None:
        fences.set()
        assert may_fence.wait(PATIENCE_S)
        revoke(region, timeout_s)

    monkeypatch.setattr(xr.Region, "revoke", slow_revoke)
    async with opening(fleet, 2):
        attempt = receiver._updates.attempt
        assert attempt is not None
        receiver._updates._end_alone(attempt, "its time was up")
        await asyncio.to_thread(fences.wait, PATIENCE_S)
        abort = m.Abort(attempt.number, "rank 0 does not pause", has_begun=False)
        told = fleet.mailboxes["controller"].ask(receiver._mailbox.address, abort, m.Aborted, PATIENCE_S)
        asking = asyncio.ensure_future(told)
        await until(lambda: attempt.is_unwritten)
        may_fence.set()
        await asking
        assert receiver.state is State.WHOLE and not receiver.memory.is_torn
        assert not any(region.revoked for region in receiver.memory.regions)
    await fleet.update(3)
    await fleet.assert_holds(3)


async def another_receiver(fleet: Fleet, rank: int) -> WeightReceiver:
    """On the same memory, once the one before is closed."""
    box = fleet.receivers[rank]._mailbox
    memory = fleet.sinks[rank].memory
    receiver = fleet.receivers[rank] = WeightReceiver(box, memory, spare=fleet.spare)
    await receiver.join(fleet.controller.address, PATIENCE_S)
    return receiver


async def test_torn_weights_are_torn_for_another_receiver_too(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(trainer_count=2, spare=False)
    await fleet.start(targets=[0])
    await fleet.update(1)
    await begun_and_cancelled(fleet, 2)
    await fleet.receivers[0].close()
    assert fleet.sinks[0].memory.is_torn
    receiver = await another_receiver(fleet, 0)
    with pytest.raises(TornWeights, match="an update in place failed: these"):
        async with receiver.reading(1.0):
            pass
    await fleet.update(3)
    await fleet.assert_holds(3)
    await receiver.close()
    assert not fleet.sinks[0].memory.is_torn


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("is_torn", [True, False])
async def test_version_in_spare_memory_is_brought_back_by_close(
    make_fleet: MakeFleet, is_torn: bool, mapped: bool
) -> None:
    fleet = make_fleet(trainer_count=2, spare=True, mapped=mapped)
    await fleet.start()
    await fleet.update(1)
    receiver, sink = fleet.receivers[0], fleet.sinks[0]
    beside = sink.memory.regions[0].array()[-64:]  # of that region, and no weight
    if mapped:
        beside[:] = 7
    if is_torn:
        await begun_and_cancelled(fleet, 2)
    assert sink.memory.is_torn == is_torn
    await asyncio.gather(receiver.close(), receiver.close())
    assert not sink.memory.is_torn
    weights = small.weights_of(1)
    for key, wanted in sink.expected(weights).items():
        assert np.array_equal(sink.arrays[key], wanted), key
    if mapped:
        assert (beside == 7).all()
    receiver = await another_receiver(fleet, 0)
    assert (receiver.version, receiver.state) == (-1, State.WHOLE)
    await fleet.update(3)
    await fleet.assert_holds(3)


async def test_memory_that_is_still_read_or_cannot_be_copied_to_keeps_what_it_has(
    make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = make_fleet(trainer_count=2, spare=True)
    await fleet.start(targets=[0])
    receiver, sink = fleet.receivers[0], fleet.sinks[0]
    async with receiver.reading(PATIENCE_S):  # what was there first
        await fleet.update(1)
        await receiver.close()
        assert not any(array.any() for array in sink.arrays.values()) and not sink.memory.is_torn
    receiver = await another_receiver(fleet, 0)
    await fleet.update(2)

    def broken(*_: object) -> None:
        raise xr.CrossrailError("no view of this memory")

    with monkeypatch.context() as patched:
        patched.setattr(WeightMemory, "_view", broken)
        await receiver.close()
    assert "version 2 is lost with its spare memory, and what is left is older: CrossrailError: no view" in caplog.text
    assert not sink.memory.is_torn


class InUse:
    """A region of which close() raises as long as somebody uses it."""

    def __init__(self, region: xr.Region) -> None:
        self._region = region
        self.is_used = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._region, name)

    def close(self, *timeout_s: float) -> None:
        if self.is_used:
            raise xr.WaitTimeout("region is still in use by a transfer of ours")
        self._region.close(*timeout_s)


async def test_spare_memory_that_is_still_in_use_is_freed_by_a_later_close(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(trainer_count=2, spare=True, mapped=False)
    await fleet.start(targets=[0])
    await fleet.update(1)
    receiver, sink = fleet.receivers[0], fleet.sinks[0]
    spare = list(receiver._buffers._regions[1])
    assert len(spare) > 2
    used: Any = InUse(spare[1])
    receiver._buffers._regions[1][1] = used
    for _ in range(2):
        with pytest.raises(xr.WaitTimeout, match="still in use by a transfer"):
            await receiver.close()
        assert [region.closed for region in spare] == [region is not spare[1] for region in spare]
    used.is_used = False
    await receiver.close()
    assert all(region.closed for region in spare)
    for key, wanted in sink.expected(small.weights_of(1)).items():
        assert np.array_equal(sink.arrays[key], wanted), key
    await receiver.close()


async def test_spare_memory_stays_open_while_it_is_copied_back_though_close_is_cancelled(
    make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = make_fleet(trainer_count=2, spare=True)
    await fleet.start(targets=[0])
    await fleet.update(1)
    receiver, sink = fleet.receivers[0], fleet.sinks[0]
    spare, copy_from = list(receiver._buffers._regions[1]), WeightMemory.copy_from
    has_begun, may_go_on, closed_before = threading.Event(), threading.Event(), list[bool]()

    def slow_copy_from(memory: WeightMemory, regions: list[xr.Region]) -> None:
        has_begun.set()
        assert may_go_on.wait(PATIENCE_S)
        closed_before.extend(region.closed for region in regions)
        copy_from(memory, regions)

    monkeypatch.setattr(WeightMemory, "copy_from", slow_copy_from)
    closing = asyncio.ensure_future(receiver.close())
    await until(lambda: has_begun.is_set())
    assert receiver._freeing is not None
    for task in (closing, receiver._freeing):  # as at the end of asyncio.run()
        task.cancel()
    await asyncio.gather(closing, receiver._freeing, return_exceptions=True)
    assert not any(region.closed for region in spare)
    again = asyncio.ensure_future(receiver.close())
    await asyncio.sleep(0.1)
    assert not any(region.closed for region in spare)
    may_go_on.set()
    await again
    assert closed_before == [False] * len(spare) and all(region.closed for region in spare)
    for key, wanted in sink.expected(small.weights_of(1)).items():
        assert np.array_equal(sink.arrays[key], wanted), key


async def test_receiver_that_is_made_while_weights_are_copied_back_has_whole_weights_once_they_are(
    make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = make_fleet(trainer_count=2, spare=True)
    await fleet.start(targets=[0])
    await fleet.update(1)
    memory, may_go_on = fleet.sinks[0].memory, threading.Event()

    def copying(_devices: list[str]) -> None:
        if memory.is_torn:
            assert may_go_on.wait(PATIENCE_S)

    monkeypatch.setattr(weights_gpu, "wait_for_kernels", copying)
    closing = asyncio.ensure_future(fleet.receivers[0].close())
    await until(lambda: memory.is_torn)
    closing.cancel()
    joining = asyncio.ensure_future(another_receiver(fleet, 0))
    await asyncio.sleep(0.1)
    may_go_on.set()
    receiver = await joining
    assert not memory.is_torn and receiver.state is State.WHOLE
    async with receiver.reading(PATIENCE_S) as reading:
        for key, wanted in fleet.sinks[0].expected(small.weights_of(1)).items():
            assert np.array_equal(reading.like(fleet.sinks[0].arrays[key]), wanted), key
    await fleet.update(2)
    await fleet.assert_holds(2)
    await asyncio.gather(closing, return_exceptions=True)


async def test_update_in_place_that_is_aborted_while_it_waits_for_a_reader_lets_others_read(
    make_fleet: MakeFleet,
) -> None:
    fleet = make_fleet(trainer_count=2, spare=False)
    controller = await fleet.start()
    await fleet.update(1)
    receiver = fleet.receivers[1]
    async with receiver.reading(PATIENCE_S):
        offered = asyncio.ensure_future(fleet.publish(2))
        updating = asyncio.ensure_future(controller.update(2, PATIENCE_S))
        await until(lambda: receiver._buffers.versions._openings)
        updating.cancel()
        await asyncio.gather(updating, offered, return_exceptions=True)

        async def read() -> int:
            async with receiver.reading(1.0) as reading:
                return reading.version

        assert await asyncio.create_task(read()) == 1  # of another task, as are other requests
    await fleet.update(3)
    await fleet.assert_holds(3)

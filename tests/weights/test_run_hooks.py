"""pause() and resume() of an inference engine: what it sees of updates that fail."""

from __future__ import annotations

import asyncio

import pytest

import crossrail as xr
from crossrail.weights.errors import UpdateFailed
from crossrail.weights.services.receiver import WeightReceiver
from crossrail.weights.services.versions import State
from tests.support.limits import SLOWNESS
from tests.weights.conftest import MakeFleet
from tests.weights.fleet import PATIENCE_S, Fleet, until

FOREVER_S = 1e6
SHORT_S = 2.0 * SLOWNESS  # of an update that has a plan, and is to end in the middle of opening


class Engine:
    """What it is told, in order. Its pause() fails, once all of fails_after have been told so too; or hangs until it is
    cancelled, clings: and then until it may end.
    """

    def __init__(self, receiver: WeightReceiver) -> None:
        self.calls: list[str] = []
        self.fails_after: list[Engine] = []
        self.fails = self.hangs = self.clings = False
        self.may_end = asyncio.Event()
        receiver._hooks.pause, receiver._hooks.resume = self.pause, self.resume

    async def pause(self, version: int) -> None:
        self.calls.append(f"pause {version}")
        if self.fails:
            await until(lambda: all(self.calls[-1] in engine.calls for engine in self.fails_after))
            raise RuntimeError("half of it is paused")
        if self.hangs:
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                if self.clings:
                    await self.may_end.wait()
                self.calls.append(f"pause {version} ends")

    async def resume(self, version: int) -> None:
        self.calls.append(f"resume {version}")

    async def sees(self, calls: list[str]) -> None:
        async def seen() -> None:
            await until(lambda: len(self.calls) >= len(calls))

        await asyncio.wait_for(seen(), PATIENCE_S)
        assert self.calls == calls


async def cancelled_once(fleet: Fleet, version: int, reached: asyncio.Event) -> None:
    """An update that is cancelled by then."""
    offered = asyncio.ensure_future(fleet.publish(version))
    updating = asyncio.ensure_future(fleet.controller.update(version, PATIENCE_S))
    await asyncio.wait_for(reached.wait(), PATIENCE_S)
    updating.cancel()
    outcomes = await asyncio.gather(updating, offered, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [asyncio.CancelledError, UpdateFailed]


@pytest.mark.parametrize("version", [-1, 1])
async def test_engine_with_whole_weights_goes_on_after_an_update_that_failed_elsewhere(
    make_fleet: MakeFleet, version: int
) -> None:
    fleet = make_fleet(trainer_count=2, spare=False)
    await fleet.start()
    if version == 1:
        await fleet.update(1)
    engines = [Engine(receiver) for receiver in fleet.receivers.values()]
    engines[0].fails, engines[0].fails_after = True, engines
    assert "pause(2) raised" in await fleet.failing_update(2)
    for engine in engines:  # also the one that raised: it may have paused a part
        await engine.sees(["pause 2", f"resume {version}"])
    engines[0].fails = False
    await fleet.update(3)
    for engine in engines:
        assert engine.calls[2:] == ["pause 3", "resume 3"]
    await fleet.assert_holds(3)


async def test_engine_that_was_open_goes_on_once_the_update_is_aborted(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(trainer_count=2, spare=False)
    await fleet.start()
    await fleet.update(1)
    engines = [Engine(receiver) for receiver in fleet.receivers.values()]
    engines[0].hangs = True
    are_open = asyncio.Event()

    async def watch() -> None:
        await until(
            lambda: engines[0].calls and all(fleet.receivers[rank]._buffers.versions.is_receiving for rank in (1, 2))
        )
        are_open.set()

    watching = asyncio.ensure_future(watch())
    await cancelled_once(fleet, 2, are_open)
    await watching
    await engines[0].sees(["pause 2", "pause 2 ends", "resume 1"])
    for engine in engines[1:]:
        await engine.sees(["pause 2", "resume 1"])
    await fleet.assert_holds(1)


async def test_engine_with_torn_weights_goes_on_after_the_next_commit_only(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(spare=False)
    await fleet.start()
    await fleet.update(1)
    engines = [Engine(receiver) for receiver in fleet.receivers.values()]
    with fleet.loading_nan(2):
        await fleet.failing_update(2)
    assert fleet.receivers[0].state is State.TORN
    engines[1].fails, engines[1].fails_after = True, engines
    await fleet.failing_update(3)  # before anybody writes: what was torn still is
    assert fleet.receivers[0].state is State.TORN
    engines[1].fails = False
    await fleet.update(4)
    for engine in engines:
        assert engine.calls == ["pause 2", "pause 3", "pause 4", "resume 4"]
    await fleet.assert_holds(4)


async def test_engine_with_spare_memory_is_not_told_of_updates_that_fail(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(spare=True)
    await fleet.start()
    engine = Engine(fleet.receivers[0])
    with fleet.loading_nan(2):
        await fleet.failing_update(1)
    await fleet.update(2)
    assert engine.calls == ["resume 2"]


async def test_pause_that_ends_late_is_waited_for_by_the_next(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(trainer_count=2, spare=False)
    await fleet.start(targets=[0])
    await fleet.update(1)
    engine = Engine(fleet.receivers[0])
    engine.hangs = engine.clings = True
    is_called = asyncio.Event()

    async def watch() -> None:
        await engine.sees(["pause 2"])
        is_called.set()

    watching = asyncio.ensure_future(watch())
    await cancelled_once(fleet, 2, is_called)
    await watching
    engine.hangs = False
    assert "inference rank 0: pause(2) has not returned" in await fleet.failing_update(3, SHORT_S)
    assert engine.calls == ["pause 2"]
    updating = asyncio.ensure_future(fleet.update(4))
    await until(lambda: fleet.receivers[0]._updates.attempt)
    assert engine.calls == ["pause 2"]
    engine.may_end.set()
    await updating
    assert engine.calls == ["pause 2", "pause 2 ends", "resume 1", "pause 4", "resume 4"]
    await fleet.assert_holds(4)


async def test_resume_after_an_update_that_failed_may_raise(
    make_fleet: MakeFleet, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = make_fleet(trainer_count=2, spare=False)
    await fleet.start(targets=[0])
    engine = Engine(fleet.receivers[0])
    engine.fails = True

    def resume(version: int) -> None:
        engine.calls.append(f"resume {version}")
        raise RuntimeError("no")

    receiver = fleet.receivers[0]
    receiver._hooks.resume = resume
    await fleet.failing_update(1)
    await engine.sees(["pause 1", "resume -1"])
    assert [record.message for record in caplog.records if "resume(-1) raised" in record.message]
    assert fleet.controller.ranks("target") == [0]
    receiver._hooks.resume, engine.fails = engine.resume, False
    await fleet.update(2)
    await fleet.assert_holds(2)


@pytest.mark.parametrize("ends", ["close", "leave"])
async def test_engine_goes_on_when_its_rank_takes_part_no_more(make_fleet: MakeFleet, ends: str) -> None:
    fleet = make_fleet(trainer_count=2, spare=False)
    await fleet.start(targets=[0])
    await fleet.update(1)
    receiver, engine = fleet.receivers[0], Engine(fleet.receivers[0])
    engine.hangs = True
    offered = asyncio.ensure_future(fleet.publish(2))
    updating = asyncio.ensure_future(fleet.controller.update(2, PATIENCE_S))
    await engine.sees(["pause 2"])
    if ends == "leave":
        await receiver.leave()
    await receiver.close()
    assert engine.calls == ["pause 2", "pause 2 ends", "resume 1"]
    outcomes = await asyncio.gather(updating, offered, return_exceptions=True)
    assert all(isinstance(outcome, xr.CrossrailError) for outcome in outcomes), outcomes


@pytest.mark.parametrize("within", ["itself", "a task of its own"])
@pytest.mark.parametrize("ends", ["close", "leave"])
async def test_pause_that_ends_its_rank_goes_on(make_fleet: MakeFleet, ends: str, within: str) -> None:
    fleet = make_fleet(trainer_count=2, spare=False)
    await fleet.start(targets=[0])
    await fleet.update(1)
    receiver, engine = fleet.receivers[0], Engine(fleet.receivers[0])

    async def pause(version: int) -> None:
        ending = receiver.close() if ends == "close" else receiver.leave()
        if within == "itself":
            await ending
        else:
            await asyncio.gather(ending, asyncio.sleep(0))
        engine.calls.append(f"pause {version} ends")

    receiver._hooks.pause = pause
    await fleet.failing_update(2)
    await engine.sees(["pause 2 ends", "resume 1"])
    assert receiver._is_closed == (ends == "close")


async def test_resume_after_an_update_that_failed_may_close_its_rank_in_a_task_of_its_own(
    make_fleet: MakeFleet,
) -> None:
    fleet = make_fleet(trainer_count=2, spare=False)
    await fleet.start(targets=[0])
    receiver, engine = fleet.receivers[0], Engine(fleet.receivers[0])
    engine.fails = True

    async def resume(version: int) -> None:
        await asyncio.gather(receiver.close(FOREVER_S))
        engine.calls.append(f"closed {version}")

    receiver._hooks.resume = resume
    await fleet.failing_update(1)
    await engine.sees(["pause 1", "closed -1"])


async def test_close_waits_until_a_pause_that_it_cancels_has_ended(make_fleet: MakeFleet) -> None:
    """Also where nothing is resumed, since weights are torn."""
    fleet = make_fleet(spare=False)
    await fleet.start()
    await fleet.update(1)
    with fleet.loading_nan(2):
        await fleet.failing_update(2)
    receiver, engine = fleet.receivers[0], Engine(fleet.receivers[0])
    assert receiver.state is State.TORN
    engine.hangs = engine.clings = True
    offered = asyncio.ensure_future(fleet.publish(3))
    updating = asyncio.ensure_future(fleet.controller.update(3, PATIENCE_S))
    await engine.sees(["pause 3"])

    closing = asyncio.ensure_future(receiver.close())
    await until(lambda: receiver._updates.attempt is None)
    assert not closing.done()
    engine.may_end.set()

    await closing
    assert engine.calls == ["pause 3", "pause 3 ends"]
    outcomes = await asyncio.gather(updating, offered, return_exceptions=True)
    assert all(isinstance(outcome, xr.CrossrailError) for outcome in outcomes), outcomes


async def test_pause_that_cleans_up_is_not_cancelled_again(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(trainer_count=2, spare=False)
    await fleet.start(targets=[0])
    await fleet.update(1)
    engine = Engine(fleet.receivers[0])
    engine.hangs = engine.clings = True
    offered = asyncio.ensure_future(fleet.publish(2))
    updating = asyncio.ensure_future(fleet.controller.update(2, SHORT_S))
    await engine.sees(["pause 2"])
    [pausing] = fleet.receivers[0]._hooks.tasks
    updating.cancel()
    await asyncio.gather(updating, offered, return_exceptions=True)
    await until(lambda: fleet.receivers[0]._updates.attempt is None)
    await asyncio.sleep(SHORT_S)  # its time to open is over

    assert not pausing.done()
    engine.may_end.set()
    await engine.sees(["pause 2", "pause 2 ends", "resume 1"])

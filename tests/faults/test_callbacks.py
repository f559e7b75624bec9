"""Callbacks that misbehave: raise, submit, block, close, drop. The engine goes on."""

import asyncio
import gc
import sys
import threading
import weakref

import pytest

import crossrail as xr
from crossrail._notify import CallbackThread
from tests.conftest import EngineFactory
from tests.support.leaks import crossrail_threads
from tests.support.limits import WAIT_S, eventually


def write(engine: xr.Engine, imm: int | None = None) -> xr.Transfer:
    """A short write from a region to itself."""
    region = engine.alloc(100)
    transfer = engine.submit_write(region, region.descriptor, 50, dst_offset=50, imm=imm)
    transfer.add_done_callback(lambda _: region.closed)  # keeps the target until then
    return transfer


def test_raising_callback_is_logged_and_the_next_runs(engine: xr.Engine, caplog: pytest.LogCaptureFixture) -> None:
    ran: list[int] = []

    def bad(_: xr.Transfer) -> None:
        raise RuntimeError("callback gone wrong")

    for i in range(3):
        transfer = write(engine)
        transfer.add_done_callback(bad)
        transfer.add_done_callback(lambda _, i=i: ran.append(i))

    eventually(lambda: ran == [0, 1, 2], "the callbacks behind the raising ones")
    eventually(lambda: caplog.text.count("callback gone wrong") >= 3, "a line in the log for each")
    assert {record.name.split(".")[0] for record in caplog.records} == {"crossrail"}
    write(engine).wait(WAIT_S)


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, asyncio.CancelledError, GeneratorExit])
def test_callback_raising_more_than_an_exception_does_not_end_the_thread(
    engine: xr.Engine, error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    ran: list[int] = []

    def bad(_: xr.Transfer) -> None:
        raise error

    write(engine).add_done_callback(bad)
    write(engine).add_done_callback(lambda _: ran.append(1))

    eventually(lambda: ran, "the callback behind it")


def test_raising_on_count_callback_is_logged(engine: xr.Engine, caplog: pytest.LogCaptureFixture) -> None:
    ran: list[int] = []

    def bad() -> None:
        raise RuntimeError("count callback gone wrong")

    engine.imm_counter(1).on_count(1, bad)
    engine.imm_counter(1).on_count(1, lambda: ran.append(1))
    write(engine, imm=1)
    write(engine, imm=1)

    eventually(lambda: ran, "the callback behind it")
    assert "count callback gone wrong" in caplog.text


# Several times: the callback thread, which takes the events, starts while on_event() is under way.
@pytest.mark.parametrize("_turn", range(20))
def test_events_that_came_before_on_event_are_told(engine: xr.Engine, other: xr.Engine, _turn: int) -> None:
    engine.connect(other.address, WAIT_S)
    told: list[xr.EngineEvent] = []
    engine.on_event(told.append)
    eventually(lambda: told, "the event that was waiting")
    assert told[0].kind == "peer-connected"


def test_event_behind_one_whose_callback_raised_is_told(
    open_engine: EngineFactory, caplog: pytest.LogCaptureFixture
) -> None:
    engine, names = open_engine(), ["a", "b", "c"]
    for name in names:
        engine.connect(open_engine(name).address, WAIT_S)
    told: list[str] = []

    def bad(event: xr.EngineEvent) -> None:
        told.append(event.peer)
        raise RuntimeError("event callback gone wrong")

    engine.on_event(bad)  # all three are waiting, and are told together

    eventually(lambda: told == names, "the events behind the first")
    eventually(lambda: caplog.text.count("event callback gone wrong") >= 3, "a line in the log for each")


def test_on_count_that_is_refused_keeps_nothing(engine: xr.Engine) -> None:
    def fn() -> None:
        raise AssertionError("it was never to be called")

    alive = weakref.ref(fn)
    with pytest.raises(xr.UsageError, match="count"):
        engine.imm_counter(1).on_count(-1, fn)
    del fn
    gc.collect()
    assert alive() is None


def test_callback_may_submit_again_and_again(engine: xr.Engine) -> None:
    src, dst = engine.alloc(100), engine.alloc(100)
    remaining = [500]

    def again(_: xr.Transfer) -> None:
        remaining[0] -= 1
        if remaining[0] > 0:
            engine.submit_write(src, dst.descriptor, imm=1).add_done_callback(again)

    engine.submit_write(src, dst.descriptor, imm=1).add_done_callback(again)

    engine.imm_counter(1).wait(500, WAIT_S)
    eventually(lambda: remaining == [0], "the last callback")


def test_callback_may_submit_into_a_small_queue(open_engine: EngineFactory) -> None:
    engine = open_engine(submit_queue_depth=16)
    src, dst = engine.alloc(100), engine.alloc(100)

    def many(_: xr.Transfer) -> None:
        for _ in range(500):
            engine.submit_write(src, dst.descriptor, imm=1)

    engine.submit_write(src, dst.descriptor).add_done_callback(many)

    engine.imm_counter(1).wait(500, WAIT_S)


def test_callback_may_wait_for_another_transfer(engine: xr.Engine) -> None:
    src, dst = engine.alloc(100), engine.alloc(100)
    done: list[str] = []

    def wait(_: xr.Transfer) -> None:
        transfer = engine.submit_write(src, dst.descriptor, imm=1)
        transfer.wait(WAIT_S)
        engine.imm_counter(1).wait(1, WAIT_S)
        done.append(transfer.status)

    engine.submit_write(src, dst.descriptor).add_done_callback(wait)

    eventually(lambda: done == ["done"], "the callback that waits")


def test_slow_callback_does_not_slow_transfers_down(engine: xr.Engine) -> None:
    release = threading.Event()
    write(engine).add_done_callback(lambda _: release.wait(WAIT_S))

    for _ in range(100):
        write(engine, imm=1).wait(WAIT_S)
    engine.imm_counter(1).wait(100, WAIT_S)

    release.set()


def test_callback_may_register_another_on_its_transfer(engine: xr.Engine) -> None:
    ran: list[str] = []

    def first(transfer: xr.Transfer) -> None:
        ran.append("first")
        transfer.add_done_callback(lambda _: ran.append("second"))

    write(engine).add_done_callback(first)

    eventually(lambda: ran == ["first", "second"], "both callbacks")


@pytest.mark.filterwarnings("ignore:engine 'dropped' was not closed:ResourceWarning")
def test_callback_may_drop_the_last_reference_to_everything() -> None:
    held = {"engine": xr.Engine("dropped")}
    done = threading.Event()

    def drop(_: xr.Transfer) -> None:
        held.clear()
        done.set()

    write(held["engine"]).add_done_callback(drop)

    assert done.wait(WAIT_S)
    eventually(lambda: gc.collect() is not None and not crossrail_threads(), "the engine's threads ended")


async def test_asyncio_callbacks_of_a_closed_loop_do_no_harm(engine: xr.Engine, other: xr.Engine) -> None:
    pending = engine.submit_send(other.address, b"nobody receives")

    def await_in_a_loop_that_ends() -> None:
        async def give_up() -> None:
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(pending, 0.02)

        asyncio.run(give_up())

    await asyncio.to_thread(await_in_a_loop_that_ends)
    with other.submit_recvs(1, 16):
        await asyncio.wait_for(pending, WAIT_S)


def test_what_was_awaited_in_a_closed_loop_is_there_for_another(engine: xr.Engine, other: xr.Engine) -> None:
    pool, counter = engine.submit_recvs(2, 16), engine.imm_counter(1)
    source, target = other.alloc(8), engine.alloc(8)

    def leave_awaits_behind() -> None:
        loop = asyncio.new_event_loop()
        tasks = [loop.create_task(pool.recv_async()), loop.create_task(counter.wait_async())]
        loop.run_until_complete(asyncio.sleep(0.01))
        loop.close()
        for task in tasks:
            task._log_destroy_pending = False  # type: ignore[attr-defined]  # that is what this test is for

    async def await_and_cancel() -> asyncio.Task[xr.Message]:
        task = asyncio.create_task(pool.recv_async())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        return task

    async def take_both() -> bytes:
        await counter.wait_async(1, WAIT_S)
        return (await pool.recv_async(WAIT_S)).data

    for _ in range(2):
        leave_awaits_behind()
        kept = asyncio.run(await_and_cancel())
        assert kept.cancelled()
        gc.collect()
        other.submit_send(engine.address, b"for the next").wait(WAIT_S)
        other.submit_write(source, target.descriptor, imm=1).wait(WAIT_S)
        assert asyncio.run(take_both()) == b"for the next"


def test_callbacks_that_a_signal_kept_from_being_made_go_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", raised.append)
    CallbackThread.__new__(CallbackThread)  # gone at once: its __init__ never began
    gc.collect()
    assert not raised

"""Watchers: 64-bit words that call back when they change."""

import ctypes
import gc
import itertools
import threading
import weakref

import numpy as np
import pytest

import crossrail as xr
from crossrail import _core
from tests.conftest import EngineFactory
from tests.support.gil import nobody_else_in_python
from tests.support.leaks import crossrail_threads
from tests.support.limits import WAIT_S, eventually, never


class Changes(list[tuple[int, int]]):
    def __call__(self, old: int, new: int) -> None:
        self.append((old, new))


def assert_a_chain_to(changes: list[tuple[int, int]], last: int) -> None:
    """Values may be skipped, but each change starts where the one before it ended, and the last value is reported."""
    eventually(lambda: changes and changes[-1][1] == last, f"the value {last} reported")
    assert changes[0][0] == 0
    assert all(before[1] == after[0] for before, after in itertools.pairwise(changes))
    assert all(old != new for old, new in changes)


def test_change_calls_back_with_old_and_new(engine: xr.Engine) -> None:
    changes = Changes()
    with_watcher = engine.alloc_watcher(changes)

    with_watcher.add()

    eventually(lambda: changes == [(0, 1)], "the change")
    assert with_watcher.value == 1
    with_watcher.close()


def test_nothing_is_reported_without_a_change(engine: xr.Engine) -> None:
    changes = Changes()
    watcher = engine.alloc_watcher(changes)

    never(lambda: changes, "a report of nothing")
    watcher.store(0)
    never(lambda: changes, "a report of the same value")


@pytest.mark.parametrize("thread_count", [1, 4])
def test_fast_changes_may_be_skipped_but_the_last_is_seen(engine: xr.Engine, thread_count: int) -> None:
    changes = Changes()
    watcher = engine.alloc_watcher(changes)

    def add() -> None:
        for _ in range(5000):
            watcher.add(3)

    threads = [threading.Thread(target=add) for _ in range(thread_count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)

    assert_a_chain_to(changes, 15_000 * thread_count)


def test_store_may_go_down_and_use_all_64_bits(engine: xr.Engine) -> None:
    changes = Changes()
    watcher = engine.alloc_watcher(changes)

    for value in (2**64 - 1, 5, 2**63):
        watcher.store(value)
        eventually(lambda value=value: changes and changes[-1][1] == value, f"{value} reported")

    assert changes == [(0, 2**64 - 1), (2**64 - 1, 5), (5, 2**63)]


def test_address_and_array_are_the_word(engine: xr.Engine) -> None:
    changes = Changes()
    watcher = engine.alloc_watcher(changes)
    assert watcher.address % 8 == 0

    ctypes.c_uint64.from_address(watcher.address).value = 7
    eventually(lambda: changes == [(0, 7)], "a store through the address")
    watcher.array[0] += 1
    eventually(lambda: changes == [(0, 7), (7, 8)], "a store through the array")

    assert (watcher.array.shape, watcher.array.dtype) == ((1,), np.uint64)


def test_words_are_looked_at_only_once_others_can_change_them(engine: xr.Engine) -> None:
    """Looking costs a part of a core."""
    changes = Changes()
    watcher = engine.alloc_watcher(changes)
    watcher.add()
    eventually(lambda: changes == [(0, 1)], "the change")
    assert "crossrail-watch" not in crossrail_threads()

    address = watcher.address
    eventually(lambda: "crossrail-watch" in crossrail_threads(), "a thread that looks")
    ctypes.c_uint64.from_address(address).value = 5
    watcher.add()
    assert_a_chain_to(changes, 6)


def test_a_write_begins_while_somebody_else_has_the_gil(open_engine: EngineFactory) -> None:
    here, there = open_engine("here"), open_engine("there")
    src, dst = here.alloc(1 << 20), there.alloc(1 << 20)
    watcher = here.alloc_watcher(Changes())
    transfers = [
        here.submit_write(src, dst.descriptor, nbytes, trigger=(watcher, 1)) for nbytes in (8, 100_000, 1 << 20)
    ]
    word = ctypes.c_uint64.from_address(watcher.address)

    with nobody_else_in_python() as eventually_alone:
        word.value = 1  # as a kernel would
        eventually_alone(lambda: all(transfer.done for transfer in transfers), "the writes")


def test_many_watchers_do_not_mix(engine: xr.Engine) -> None:
    logs = [Changes() for _ in range(100)]
    watchers = [engine.alloc_watcher(log) for log in logs]

    for i, watcher in enumerate(watchers):
        watcher.add(i + 1)

    for i, log in enumerate(logs):
        eventually(lambda log=log, i=i: log == [(0, i + 1)], f"watcher {i}")


def test_closed_watcher_reports_nothing_more(engine: xr.Engine) -> None:
    changes = Changes()
    watcher = engine.alloc_watcher(changes)
    array = watcher.array

    watcher.close()
    watcher.close()
    array[0] = 9  # still somebody's memory

    never(lambda: changes, "a change of a closed watcher")


def test_watchers_come_and_go(engine: xr.Engine) -> None:
    for i in range(300):
        changes = Changes()
        watcher = engine.alloc_watcher(changes)
        watcher.add(i + 1)
        eventually(lambda changes=changes, i=i: changes == [(0, i + 1)], "the change")
        watcher.close()


def test_callback_that_raises_does_not_stop_the_next(engine: xr.Engine, caplog: pytest.LogCaptureFixture) -> None:
    changes = Changes()

    def on_change(old: int, new: int) -> None:
        changes(old, new)
        raise RuntimeError("watcher callback gone wrong")

    watcher = engine.alloc_watcher(on_change)
    watcher.add()
    eventually(lambda: len(changes) == 1, "the first change")
    watcher.add()

    eventually(lambda: len(changes) == 2, "the second change")
    assert "watcher callback gone wrong" in caplog.text


def test_callback_may_submit(engine: xr.Engine) -> None:
    src, dst = engine.alloc(1000), engine.alloc(1000)
    src.array()[:] = 3
    watcher = engine.alloc_watcher(lambda _, new: engine.submit_write(src, dst.descriptor, imm=new))

    watcher.add(5)

    engine.imm_counter(5).wait(1, WAIT_S)
    assert (dst.array() == 3).all()


@pytest.mark.parametrize("value", [-1, 2**64])
def test_value_past_64_bits_is_refused(engine: xr.Engine, value: int) -> None:
    watcher = engine.alloc_watcher(Changes())

    with pytest.raises((xr.UsageError, OverflowError)):
        watcher.store(value)


def test_closing_the_engine_ends_its_watchers(open_engine: EngineFactory) -> None:
    engine = open_engine()
    changes = Changes()
    watcher = engine.alloc_watcher(changes)

    engine.close()

    watcher.close()
    never(lambda: changes, "a change after close")


def test_dropped_watcher_is_collected_and_cancels_what_waits_for_it(engine: xr.Engine) -> None:
    src, dst = engine.alloc(8), engine.alloc(8)
    watcher = engine.alloc_watcher(Changes())
    waiting = engine.submit_write(src, dst.descriptor, trigger=(watcher, 1))
    gone = weakref.ref(watcher)

    del watcher
    gc.collect()

    assert gone() is None
    with pytest.raises(xr.TransferCancelled):
        waiting.wait(WAIT_S)


def test_dropped_watchers_make_room_for_others(engine: xr.Engine) -> None:
    for _ in range(600):  # an engine has at most 512
        engine.alloc_watcher(Changes())


def test_one_that_was_never_made_has_no_word() -> None:
    with pytest.raises(BufferError, match="its __init__ has not run"):
        memoryview(_core.Watcher.__new__(_core.Watcher))  # type: ignore[arg-type]


def test_array_keeps_its_watcher(engine: xr.Engine) -> None:
    changes = Changes()
    array = engine.alloc_watcher(changes).array
    gc.collect()

    array[0] = 3

    eventually(lambda: changes == [(0, 3)], "the change")

"""Runs Python's garbage collector at the same moments in every run of a simulation.

Objects that only a reference cycle holds (a region, a transfer, an engine) are closed by the collector. The automatic
collector runs after so many allocations, including those that the process made before the simulation.
"""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_lock = threading.RLock()  # of a finalizer too, which may run anywhere
_open = 0  # how many simulations, one within another or in other threads; the following are of the outermost
_was_enabled = False
_has_frozen = False


@contextmanager
def _interrupted_later() -> Iterator[None]:
    """Ctrl-C waits until the end of the block."""
    on_interrupt = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(on_interrupt):
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, on_interrupt)
        if came:
            on_interrupt(*came[0])


def collect() -> None:
    """Collects garbage. Ctrl-C waits meanwhile: what its handler raises in a finalizer, or in a function of
    gc.callbacks, is printed and lost.
    """
    with _interrupted_later():
        gc.collect()


@contextmanager
def collecting_on_time() -> Iterator[None]:
    """begin() at the start of the block, end() at its end."""
    begin()
    try:
        yield
    finally:
        end()


def begin() -> None:
    """Until as many calls of end(), garbage is collected only by gc.collect() and by the last end().

    Existing garbage is left as it is: older objects are not examined until the end, which also makes collections quick.
    """
    global _open, _was_enabled, _has_frozen
    has_begun = False
    try:
        with _interrupted_later():  # or Ctrl-C would leave the collector disabled: counting frozen objects takes long
            with _lock:
                _open += 1
                has_begun = True
                if _open > 1:
                    return
                _was_enabled = gc.isenabled()
                gc.disable()
                _has_frozen = gc.get_freeze_count() == 0
                if _has_frozen:
                    gc.freeze()
            if not _has_frozen:  # the program has frozen objects of its own, which could not be told from ours
                gc.collect()
    except BaseException:  # Ctrl-C
        if has_begun:
            end()
        raise


def end() -> None:
    """See begin()."""
    global _open
    try:
        if _open == 1:
            collect()  # runs finalizers, one of which may begin another simulation
    finally:
        with _lock:
            _open -= 1
            if _open == 0:
                if _has_frozen:
                    gc.unfreeze()
                if _was_enabled:
                    gc.enable()

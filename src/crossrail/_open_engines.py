"""The open engines of this process: closed when the interpreter exits, and left alone by a forked child."""

from __future__ import annotations

import os
import threading
from typing import Protocol

from crossrail import _core, _ending
from crossrail._ordered import OrderedWeakSet
from crossrail.errors import EngineClosed

_EXIT_PATIENCE_S = 0.5  # for daemon threads to return from their waits at interpreter exit


class _OpenEngine(Protocol):
    def close(self) -> None: ...


_open_engines: OrderedWeakSet[_OpenEngine] = OrderedWeakSet()
_had_threads = False  # whether this process had other threads when it forked


def add(engine: _OpenEngine) -> None:
    """Registers an engine that has opened. Holds no reference to it."""
    _open_engines.add(engine)


def discard(engine: _OpenEngine) -> None:
    """Forgets an engine that has closed."""
    _open_engines.discard(engine)


def _hush_closed_engines() -> None:
    """A daemon thread that waits in an engine now gets EngineClosed because the process ends, and a traceback that is
    cut off in the middle would be all that remains of it.
    """
    shown = threading.excepthook

    def show(args: threading.ExceptHookArgs) -> None:
        if not issubclass(args.exc_type, EngineClosed):
            shown(args)

    threading.excepthook = show


def _close_all() -> None:
    if any(thread.daemon for thread in threading.enumerate()):
        _hush_closed_engines()
    for engine in _open_engines:
        engine.close()
    _core._begin_exit(_EXIT_PATIENCE_S)
    # With daemon threads, or other exit handlers that may start threads, leftover objects are legitimate.
    if _ending.is_over or any(thread.daemon for thread in threading.enumerate()):
        _core._tell_no_leaks()


def _before_fork() -> None:
    global _had_threads
    _had_threads = threading.active_count() > 1


def _after_fork() -> None:
    # In the child nobody owns the frames of the parent's other threads: references they hold are never released.
    if _had_threads:
        _core._tell_no_leaks()


_ending.at_exit(_close_all)
os.register_at_fork(before=_before_fork, after_in_child=_after_fork)

"""Threads of tests that wait in an engine, and the engines' own."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import crossrail as xr
from tests.support.limits import WAIT_S


def start_thread(engine: xr.Engine, run: Callable[[], object], name: str) -> threading.Thread:
    """Runs run() on a thread, once the engine has seen that thread.

    Simulated time advances while all threads known to a world wait: it must not run away before this one waits too.
    """
    is_known = threading.Event()

    def begin() -> None:
        engine.progress()
        is_known.set()
        run()

    thread = threading.Thread(target=begin, name=name, daemon=True)
    thread.start()
    assert is_known.wait(WAIT_S), f"thread {name} did not begin"
    return thread


def tasks() -> Iterator[tuple[int, str]]:
    """Threads of this process: the kernel's id, and the name. One that ends meanwhile is left out."""
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            yield int(task.name), (task / "comm").read_text().rstrip("\n")


def tasks_named(name: str) -> list[int]:
    """Numbers of those with that name."""
    return [number for number, its in tasks() if its == name]

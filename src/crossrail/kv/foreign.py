"""Calls of code that is not ours: users' models and tokenizers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def exceptions_only(*, awaits: bool = False) -> Iterator[None]:
    """Around such a call: RuntimeError for what it raises that is no Exception; only KeyboardInterrupt passes.

    A panic of an extension in Rust, as tokenizers is one, derives from BaseException alone. It would pass by everything
    that handles a failed request, and end the task that all other requests depend on. So would a GeneratorExit of the
    callee's own, such as of a generator that it mishandles. SystemExit, of sys.exit(), would end the event loop: one
    prompt could end node after node. A program that embeds a node must therefore not raise SystemExit in a handler of
    signals, which may run in the middle of such a call: use loop.add_signal_handler().

    awaits: the call is awaited. Then a CancelledError passes, which may be meant for the task that waits, and so does
    the GeneratorExit that closes its coroutine. Threads: any.
    """
    task = _task()
    try:
        yield
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:
        is_cancelled = awaits and isinstance(error, asyncio.CancelledError)
        is_closed = awaits and isinstance(error, GeneratorExit) and _task() is not task
        if is_cancelled or is_closed:
            raise
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


def _task() -> asyncio.Task[Any] | None:
    """The task that runs here. A coroutine is closed by others, or by nobody's task when the loop is gone."""
    try:
        return asyncio.current_task()
    except RuntimeError:  # no loop runs in this thread
        return None

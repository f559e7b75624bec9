"""Waits on an event loop that end by a deadline and never lose a cancellation; and the wording of durations."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from crossrail._options import check_seconds

_T = TypeVar("_T")


def loop_time_s() -> float:
    """The time on the running event loop's clock, which all times of services refer to."""
    return asyncio.get_running_loop().time()


def deadline_in(timeout_s: float) -> float:
    """When that time is over, on the clock of the running event loop. UsageError for what is no time of 0 or more."""
    check_seconds(timeout_s=timeout_s)
    return loop_time_s() + timeout_s


def in_words(duration_s: float) -> str:
    """A duration for people, such as what is left of a timeout: three digits, or whole seconds."""
    return f"{duration_s:.3g} s" if duration_s < 1000 else f"{duration_s:.0f} s"


async def in_time(work: Awaitable[_T], timeout_s: float, undo: Callable[[_T], object] | None = None) -> _T:
    """The result of this work. If it takes longer than timeout_s it is cancelled, and ends before asyncio.TimeoutError
    is raised.

    Unlike asyncio.wait_for before Python 3.12, a cancelled caller always ends, even if the work is done at that very
    moment: wait_for would return the result then, and the caller would go on as if nobody had cancelled it. undo: gets
    a result that nobody received for this reason, such as a connection that has to be closed.
    """
    task = asyncio.ensure_future(work)
    overdue = False
    try:
        overdue = not (await asyncio.wait([task], timeout=max(timeout_s, 0.0)))[0]
    except asyncio.CancelledError:
        if undo is not None:
            task.add_done_callback(lambda ended: _undo(ended, undo))
        raise
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # mark as retrieved, also for abandoned work: the loop complains otherwise
    if overdue and task.cancelled():
        raise asyncio.TimeoutError
    return task.result()


def _undo(ended: asyncio.Future[_T], undo: Callable[[_T], object]) -> None:
    if not ended.cancelled() and ended.exception() is None:
        undo(ended.result())


async def set_in_time(event: asyncio.Event, timeout_s: float) -> bool:
    """Whether the event was set by then."""
    try:
        await in_time(event.wait(), timeout_s)
    except asyncio.TimeoutError:
        return False
    return True


async def first_of(ends: Sequence[asyncio.Future[Any]], timeout_s: float | None = None) -> list[asyncio.Future[Any]]:
    """The futures that are done first, in the order of `ends`; the others were cancelled, and have ended."""
    try:
        await asyncio.wait(ends, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        # Evaluated before the others are cancelled, and thereby done as well.
        return [end for end in ends if end.done()]
    finally:
        for end in ends:
            end.cancel()
        await asyncio.wait(ends)
        for end in ends:
            if not end.cancelled():
                end.exception()  # mark as retrieved: the caller may look at one alone

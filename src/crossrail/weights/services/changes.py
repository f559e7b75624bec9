"""Lets tasks wait until something has changed."""

from __future__ import annotations

import asyncio
from typing import Any

from crossrail.control.deadlines import loop_time_s
from crossrail.errors import UsageError, WaitTimeout


class Changes:
    """What tasks of one event loop wait for: notify() wakes all that wait, and each looks again. Threads: the loop's.

    Nothing is lost between a look and the wait() after it, as long as there is no await in between.
    """

    def __init__(self) -> None:
        """UsageError where no event loop runs."""
        try:
            self._next: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        except RuntimeError:
            raise UsageError("WeightReceiver() outside of a coroutine: its event loop has to be running") from None

    def notify(self) -> None:
        """Something changed that tasks may wait for."""
        changed, self._next = self._next, asyncio.get_running_loop().create_future()
        changed.set_result(None)

    async def wait(self, deadline_at_s: float, why: str, *others: asyncio.Future[Any]) -> None:
        """Returns after the next notify(), or once one of the others has ended. WaitTimeout, with `why`, otherwise."""
        left_s = deadline_at_s - loop_time_s()
        ends: list[asyncio.Future[Any]] = [self._next, *others]
        if left_s <= 0 or not (await asyncio.wait(ends, timeout=left_s, return_when=asyncio.FIRST_COMPLETED))[0]:
            raise WaitTimeout(why)

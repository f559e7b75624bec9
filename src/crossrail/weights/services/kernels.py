"""Waits until GPUs have ended the kernels that may use weights."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from crossrail.weights import gpu
from crossrail.weights.services.changes import Changes
from crossrail.weights.services.futures import retrieve_exception
from crossrail.weights.threads import in_thread


class Kernels:
    """The kernels that torch has launched. Threads: the event loop's; it waits in another.

    Invariant: one thread waits, not one for each attempt: one that gave up leaves its wait to the next.
    """

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self._ending: asyncio.Task[None] | None = None  # the last wait

    async def wait_ended(
        self, devices: Sequence[str], deadline_at_s: float, why: str, check: Callable[[], None]
    ) -> None:
        """Returns once all have ended that had been launched on these GPUs before the call. WaitTimeout, with `why`.

        check: raises if they need not be waited for any more; called after each change.
        """
        if self._ending is not None:
            await self._wait(self._ending, deadline_at_s, why, check)
        # Anew: kernels may have been launched since that began.
        ending = self._ending = asyncio.ensure_future(in_thread(gpu.wait_for_kernels, devices))
        ending.add_done_callback(retrieve_exception)
        await self._wait(ending, deadline_at_s, why, check)
        ending.result()

    def cancel(self) -> None:
        """Nobody waits any more; the thread ends with the kernels."""
        if self._ending is not None:
            self._ending.cancel()

    async def _wait(
        self, ending: asyncio.Task[None], deadline_at_s: float, why: str, check: Callable[[], None]
    ) -> None:
        while not ending.done():
            await self._changes.wait(deadline_at_s, why, ending)
            check()

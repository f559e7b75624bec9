"""Notices when the model of a node hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from crossrail.kv import messages as m

# When a future that the model awaits was cancelled, such as one of an executor that was shut down: no reason to stop.
CANCELLED_BY_NOBODY = "the model raised CancelledError, and nobody had cancelled it"


class ModelWatch:
    """A model hangs if it computes and has not been heard from for longer than timeout_s. Threads: the event loop's.

    owes: what the model has failed to do then, in words.
    """

    def __init__(self, node: str, timeout_s: float, owes: str) -> None:
        self._node = node
        self._timeout_s = timeout_s
        self._owes = owes
        self._now_s = asyncio.get_running_loop().time
        self._computing = 0  # calls in progress
        self._heard_s = 0.0  # when it was last heard from, or began to compute; written on any thread

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Wraps a call of the model. Progress of any one of several concurrent calls counts for all."""
        if not self._computing:
            self.heard()
        self._computing += 1
        try:
            yield
        finally:
            self._computing -= 1

    def heard(self) -> None:
        """Notes progress of the model. Any thread."""
        self._heard_s = self._now_s()

    @property
    def silent_s(self) -> float:
        return min(max(self._now_s() - self._heard_s, 0.0), m.SECONDS_MAX) if self._computing else 0.0

    @property
    def hangs(self) -> str:
        """Why the model is considered hung; empty if it is not."""
        if (silent_s := self.silent_s) <= self._timeout_s:
            return ""
        shown = f"{silent_s:.0f}" if silent_s >= 10 else f"{silent_s:.2g}"
        return f"the model of node {self._node!r} hangs: it {self._owes} for {shown} s"

    async def wait(self) -> str:
        """Returns why the model hangs once it does, or a little later."""
        while True:
            await asyncio.sleep(max(self._timeout_s - self.silent_s, self._timeout_s / 8))
            if why := self.hangs:
                return why

    async def wait_until_it_goes_on(self) -> None:
        """Returns once the model makes progress again, or a little later."""
        while True:
            await asyncio.sleep(self._timeout_s / 8)
            if not self.hangs:
                return

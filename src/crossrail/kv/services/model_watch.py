"""Notices when the model of a node hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from crossrail.kv import messages as m

# Of a future that it awaits, and that was cancelled, such as an executor's that is shut down: not what ends a service.
CANCELLED_BY_NOBODY = "the model raised CancelledError, and nobody had cancelled it"


class ModelWatch:
    """A model hangs that computes, and has not been heard for longer than timeout_s. Threads: the event loop's.

    owes: what it has not done then, in words.
    """

    def __init__(self, node: str, timeout_s: float, owes: str) -> None:
        self._node = node
        self._timeout_s = timeout_s
        self._owes = owes
        self._now_s = asyncio.get_running_loop().time
        self._computing = 0  # calls
        self._heard_s = 0.0  # when it was heard last, or began to compute; written on any thread

    @contextmanager
    def computing(self) -> Iterator[None]:
        """While a call of the model is under way. One of several that goes on speaks for all."""
        if not self._computing:
            self.heard()
        self._computing += 1
        try:
            yield
        finally:
            self._computing -= 1

    def heard(self) -> None:
        """The model goes on. Any thread."""
        self._heard_s = self._now_s()

    @property
    def silent_s(self) -> float:
        return min(max(self._now_s() - self._heard_s, 0.0), m.SECONDS_MAX) if self._computing else 0.0

    @property
    def hangs(self) -> str:
        """Why it hangs, in words; empty if it does not."""
        if (silent_s := self.silent_s) <= self._timeout_s:
            return ""
        shown = f"{silent_s:.0f}" if silent_s >= 10 else f"{silent_s:.2g}"
        return f"the model of node {self._node!r} hangs: it {self._owes} for {shown} s"

    async def wait(self) -> str:
        """Returns why it hangs, in words, once it does, or some time later."""
        while True:
            await asyncio.sleep(max(self._timeout_s - self.silent_s, self._timeout_s / 8))
            if why := self.hangs:
                return why

    async def wait_until_it_goes_on(self) -> None:
        """Or some time longer."""
        while True:
            await asyncio.sleep(self._timeout_s / 8)
            if not self.hangs:
                return

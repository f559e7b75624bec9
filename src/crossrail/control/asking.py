"""One question in flight: sent, and sent again until it is answered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

Send = Callable[[], Sequence["asyncio.Future[None]"]]


class Asking:
    """Sends a question, and again resend_s after it was delivered, until end(). If sending raises, so does the answer.

    It needs no task of its own, since services ask for each token. send: sends all packets; returns their deliveries.
    Threads: the event loop's.
    """

    def __init__(self, send: Send, resend_s: float, answer: asyncio.Future[object]) -> None:
        self._send = send
        self._resend_s = resend_s
        self._answer = answer
        self._loop = asyncio.get_running_loop()
        self._under_way: set[asyncio.Future[None]] = set()
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Raises what send() does."""
        self._under_way = set(self._send())
        for delivery in list(self._under_way):
            delivery.add_done_callback(self._on_delivered)

    def end(self) -> None:
        """Stops sending. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        for delivery in list(self._under_way):
            delivery.cancel()

    def _on_delivered(self, delivery: asyncio.Future[None]) -> None:
        self._under_way.discard(delivery)
        error = None if delivery.cancelled() else delivery.exception()
        if self._answer.done():
            return
        if error is not None:
            self._answer.set_exception(error)
        elif not self._under_way and not delivery.cancelled():
            self._timer = self._loop.call_later(self._resend_s, self._again)

    def _again(self) -> None:
        if self._answer.done():
            return
        try:
            self.begin()
        except Exception as error:
            self._answer.set_exception(error)

"""How long a client may take to read what is written to it."""

from __future__ import annotations

import asyncio

from crossrail.control.deadlines import loop_time_s


class Taking:
    """`with taking:` around each write of an answer: a client that does not take one within patience_s is cut off. That
    cancels the handler, or raises ConnectionResetError.

    An answer has one write per token, and most of them never wait. So all share one timer, which re-arms itself if the
    write that it was set for has ended meanwhile. Lifecycle: 1. made. 2. `with`, any number of times. 3. close().
    Threads: the event loop's.
    """

    def __init__(self, transport: asyncio.Transport | None, patience_s: float) -> None:
        self._transport = transport
        self._patience_s = patience_s
        self._begun_s: float | None = None  # of the write in progress
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> None:
        self._begun_s = loop_time_s()
        if self._timer is None:
            self._look_later(self._patience_s)

    def __exit__(self, *_: object) -> None:
        self._begun_s = None

    def close(self) -> None:
        """Nobody is cut off any more. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None

    def _look_later(self, pause_s: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(pause_s, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._begun_s is None:
            return
        if (left_s := self._begun_s + self._patience_s - loop_time_s()) > 0:
            self._look_later(left_s)
        elif self._transport is not None:
            self._transport.abort()

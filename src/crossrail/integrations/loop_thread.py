"""An event loop in a separate thread, for hosts that use kv and weights from threads of their own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent import futures
from typing import Any, TypeVar

from crossrail.errors import CrossrailError

_JOIN_S = 10.0
T = TypeVar("T")


class LoopThread:
    """Threads: any except the loop's.

    Lifecycle: 1. made: running. 2. close(), after everything that was started has ended. Idempotent.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def soon(self, call: Callable[..., object], *args: Any) -> None:
        """Runs it on the loop; returns at once. Calls run in the order in which they were given."""
        self._loop.call_soon_threadsafe(call, *args)

    def start(self, work: Coroutine[Any, Any, T]) -> futures.Future[T]:
        """Runs it on the loop; returns at once."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Runs it on the loop and waits. After timeout_s it is cancelled, and CrossrailError raised."""
        future = self.start(work)
        if not futures.wait([future], timeout_s).done:
            future.cancel()
            raise CrossrailError(f"the event loop of {self._name} did not get it done in {timeout_s:g} s")
        return future.result()

    def close(self) -> None:
        """Waits 10 s at most for what is running on the loop at this moment."""
        if self._loop.is_closed():
            return
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_JOIN_S)
        if not self._thread.is_alive():
            self._loop.close()

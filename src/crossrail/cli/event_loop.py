"""asyncio.run() for commands that Ctrl-C may interrupt at any moment."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


def run(main: Coroutine[Any, Any, _T]) -> _T:
    """Like asyncio.run(), but Ctrl-C waits until `main` begins. Threads: the main thread.

    An event loop that was interrupted while it was being made prints a traceback when it is garbage-collected.
    """

    async def begun() -> _T:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return await main

    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return asyncio.run(begun())
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

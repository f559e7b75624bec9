"""An inference engine's pause() and resume() hooks: they are called one at a time, and know when they call back in."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable
from contextvars import ContextVar

from crossrail.errors import CrossrailError

log = logging.getLogger("crossrail.weights")

Hook = Callable[[int], Awaitable[object] | object]
# The call of a hook that this task is in, or was when it was made.
_call_of: ContextVar[object] = ContextVar("_call_of", default=None)


def _nothing() -> None:
    return


def no_hook(_version: int) -> None:
    return


class Hooks:
    """The hooks of one inference rank. Threads: that of the event loop.

    running: the call in progress, as text; "": none. tasks: running tasks that call hooks, and those passed to keep().
    """

    def __init__(self, rank: int, pause: Hook, resume: Hook) -> None:
        self.pause, self.resume = pause, resume
        self.running = ""
        self.tasks: set[asyncio.Task[None]] = set()
        self._rank = rank
        self._turns = asyncio.Lock()  # first come, first served
        self._call: object = None  # that runs: what _call_of has in it

    async def call_pause(self, version: int, on_call: Callable[[], None]) -> None:
        """Calls pause() after all earlier calls have ended, and on_call() right before it. What the hook raises is
        logged, and raised as a CrossrailError; likewise in call_resume().
        """
        await self._in_turn("pause", self.pause, version, on_call)

    async def call_resume(self, version: int) -> None:
        await self._in_turn("resume", self.resume, version, _nothing)

    def is_within(self) -> bool:
        """Whether we are called by the running hook, in its own task or in one that it has created."""
        return self._call is not None and _call_of.get() is self._call

    def keep(self, task: asyncio.Task[None]) -> None:
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _in_turn(self, name: str, hook: Hook, version: int, on_call: Callable[[], None]) -> None:
        async with self._turns:
            on_call()
            self.running, self._call = f"{name}({version})", object()
            token = _call_of.set(self._call)
            try:
                pending = hook(version)
                if inspect.isawaitable(pending):
                    await pending
            except Exception as error:
                log.exception("inference rank %d: %s(%d) raised", self._rank, name, version)
                what = f"{type(error).__name__}: {error}"
                raise CrossrailError(f"inference rank {self._rank}: {name}({version}) raised {what}") from error
            finally:
                self.running, self._call = "", None
                _call_of.reset(token)

"""Two-sided messages: a bounded pool of receive buffers."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from crossrail import _core, _options, _raise
from crossrail._closing import Closing
from crossrail._core import Message
from crossrail._notify import LoopNotifier, arrival, callbacks_of, log_raised, loop_time, resolve, weakly
from crossrail.errors import EngineClosed, UsageError

if TYPE_CHECKING:
    import asyncio

__all__ = ["Message", "ReceivePool"]

_BATCH = 64  # messages per turn on the callback thread, so that other callbacks are not starved


class ReceivePool(_core.ReceivePool, Closing):
    """Buffers for messages to this engine. Made by Engine.submit_recvs; one pool is open at a time.

    A pool whose buffers are all taken holds senders back; nothing is lost. Messages are taken by poll, recv, recv_async
    or `async for`, or by the callback given to submit_recvs and then by nothing else. Each message is delivered once.
    A pool that is dropped, and has no callback, is closed. Any thread; tasks of one event loop at a time.
    """

    def __init__(
        self, engine: _core.Engine, count: int, nbytes: int, on_message: Callable[[Message], object] | None
    ) -> None:
        callbacks = callbacks_of(engine)
        if on_message is not None:
            _raise.check_callable(on_message, "on_message")
            callbacks.start()
        super().__init__(engine, count, nbytes, on_message is not None)
        # Both weak: waiters of a loop that is dropped end with it. The loop itself holds its waiters.
        self._waiters: weakref.WeakValueDictionary[int, asyncio.Future[bool]] = weakref.WeakValueDictionary()
        self._places = itertools.count()  # positions in the queue of waiters: the keys of _waiters
        self._loop: weakref.ref[LoopNotifier] | None = None  # the loop whose tasks wait
        self._armed: int | None = None  # the cookie that _loop will get
        self._on_message = on_message
        self._callbacks = callbacks
        if on_message is not None:
            self._cookie = self._callbacks.register(self._deliver, once=False)
            self._notify(self._callbacks.notifier, self._cookie)
            self._callbacks.start()

    async def recv_async(self, timeout_s: float | None = None) -> Message:
        """Takes the next message, for a task of the running event loop; no polling.

        Tasks that wait are served in the order in which they came; one that is cancelled takes none. Raises
        WaitTimeout, EngineClosed, UsageError once closed and empty.
        """
        _options.check_timeout(timeout_s)
        deadline = None if timeout_s is None else loop_time(self._engine) + timeout_s
        place = next(self._places)  # kept throughout: a task that finds the pool empty keeps its turn
        while True:
            messages = self.poll(1)
            if messages:
                return messages[0]
            if self.closed:
                raise _raise.pool_closed(self._engine)
            left_s = None if deadline is None else deadline - loop_time(self._engine)
            if not await self._ready(place, left_s) and timeout_s is not None:
                raise _raise.recv_timeout(self._engine, timeout_s)

    async def _ready(self, place: int, timeout_s: float | None) -> bool:
        """Waits for its turn; True when another look at the pool is worthwhile."""
        loop = LoopNotifier.running(self._engine)
        if self._loop is None or self._loop() is not loop:
            self._move_to(loop)
        cookie, future = loop.expect()
        self._waiters[place] = future
        if self._armed is None:
            self._armed = loop.register(weakly(self._wake))
            self._notify(loop.notifier, self._armed)
        try:
            return await arrival(future, timeout_s)
        finally:
            self._waiters.pop(place, None)
            loop.forget(cookie)

    def _move_to(self, loop: LoopNotifier) -> None:
        last = None if self._loop is None else self._loop()
        if self._waiters and last is not None and not last.closed:
            raise UsageError("tasks of another event loop wait for messages of this pool: use one loop per pool")
        self._waiters.clear()  # they belong to a loop that was closed, and nobody will await them again
        self._loop, self._armed = weakref.ref(loop), None

    def _wake(self) -> None:
        # Wakes all waiters: one that finds the pool empty again re-arms.
        self._armed = None
        for _, future in sorted(self._waiters.items()):
            resolve(future, True)

    def __aiter__(self) -> AsyncIterator[Message]:
        """Yields messages until the pool is closed. Raises EngineClosed if the engine is closed first."""
        return self._iterate()

    async def _iterate(self) -> AsyncIterator[Message]:
        while True:
            try:
                message = await self.recv_async()
            except UsageError:
                if self.closed:
                    return
                raise
            yield message

    def close(self) -> None:
        """Stops receiving; senders wait for another pool. Messages in the pool can still be taken. Idempotent.

        With on_message they are still delivered to it.
        """
        self._close()

    def _deliver(self) -> None:
        assert self._on_message is not None
        messages = self._take(_BATCH)
        for message in messages:
            try:
                self._on_message(message)
            except BaseException:
                log_raised(self._engine.name, "on_message")
        if not self.closed:
            self._notify(self._callbacks.notifier, self._cookie)
        elif messages:
            self._callbacks.notifier.post(self._cookie)
        else:
            self._callbacks.forget(self._cookie)

    def __repr__(self) -> str:
        if not hasattr(self, "_callbacks"):
            return "<ReceivePool that did not open>"
        try:
            return f"<ReceivePool of {self.count} x {self.nbytes} bytes{', closed' if self.closed else ''}>"
        except EngineClosed:
            return _raise.inherited(self)

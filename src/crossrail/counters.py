"""Counting arrivals: all synchronisation of the contract."""

from __future__ import annotations

from collections.abc import Callable

from crossrail import _core, _options, _raise
from crossrail._notify import LoopNotifier, arrival, callbacks_of, log
from crossrail.errors import EngineClosed


class CountTicket:
    """A callback that waits for counts; ImmCounter.on_count returns it."""

    __slots__ = ("_cookie", "_counter", "_ticket")

    def __init__(self, counter: ImmCounter, ticket: int, cookie: int) -> None:
        self._counter = counter
        self._ticket = ticket
        self._cookie = cookie

    def cancel(self) -> bool:
        """True: fn will not be called, and no counts were taken. False: too late, it has been or is being called."""
        if not self._counter._cancel_notify(self._ticket):
            return False
        callbacks_of(self._counter._engine).forget(self._cookie)
        return True

    def __repr__(self) -> str:
        return f"<CountTicket of {self._counter!r}>"


class ImmCounter(_core.ImmCounter):
    """Counts what arrives at this engine with one immediate number. Engine.imm_counter and Engine.alloc_imm make it.

    Counts are credits: a wait for n takes n of them. Those that arrive before anybody waits are kept. An operation
    counts 1, paged writes count 1 per page, however many rails carried them. A count comes only after its bytes are in
    place. wait, wait_async and on_count are served in the order in which they were called. Any thread.
    """

    __slots__ = ()

    async def wait_async(self, count: int = 1, timeout_s: float | None = None) -> None:
        """Like wait(), for a task of the running event loop. Does not poll.

        A task that is cancelled takes nothing: counts that it was just given are given back.
        Raises WaitTimeout or EngineClosed; none is taken then.
        """
        _options.check_timeout(timeout_s)
        if self.try_consume(count):
            return
        loop = LoopNotifier.running(self._engine)
        cookie, served = loop.expect()
        ticket = self._notify(count, loop.notifier, cookie)
        try:
            arrived = await arrival(served, timeout_s)
        except BaseException:
            if not self._cancel_notify(ticket) and not self.closed:
                self._give_back(count)
            raise
        finally:
            loop.forget(cookie)
        if not arrived and self._cancel_notify(ticket):
            raise _raise.counter_timeout(self._engine, self.imm, self.poll(), count, timeout_s)
        if self.closed:
            raise _raise.counter_closed(self._engine, self.imm, self.poll(), count)

    def on_count(self, count: int, fn: Callable[[], object]) -> CountTicket:
        """Takes `count` counts as soon as there are as many, then calls fn() once on the engine's callback thread.

        fn may submit, wait, and close regions; an exception in it is logged. If the engine closes first, fn is not
        called. Raises EngineClosed if the engine is closed already, or the number was released. Never blocks.
        """
        _raise.check_callable(fn, "fn")
        if self.closed:
            raise _raise.counter_closed(self._engine, self.imm, self.poll(), count)
        callbacks = callbacks_of(self._engine)
        callbacks.start()

        def served() -> None:
            if self.closed:
                log.debug("%s", _raise.counter_closed(self._engine, self.imm, self.poll(), count))
            else:
                fn()

        cookie = callbacks.register(served)
        try:
            ticket = self._notify(count, callbacks.notifier, cookie)
        except BaseException:
            callbacks.forget(cookie)
            raise
        callbacks.start()
        return CountTicket(self, ticket, cookie)

    def release(self, *, force: bool = False) -> None:
        """Gives the number back, so that alloc_imm() may hand it out again. Call it when no peer will send it any more.

        It is not handed out before all other numbers have been, or a million have been released; if something arrives
        for it meanwhile, it counts as in use again. Raises UsageError if counts are evidently still expected: somebody
        waits for them, or a part of one has arrived (the rest is under way, or the write was fenced off in the middle).
        force: release it all the same; the parts are dropped, and whoever waits gets EngineClosed.
        """
        self._engine.release_imm(self.imm, force=force)

    def __repr__(self) -> str:
        try:
            return f"<ImmCounter {self.imm}: {self.poll()} arrived>"
        except EngineClosed:
            return _raise.inherited(self)

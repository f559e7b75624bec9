"""Counting arrivals: all synchronisation of the contract."""

from __future__ import annotations

from collections.abc import Callable

from crossrail import _core, _options, _raise
from crossrail._notify import LoopNotifier, arrival, callbacks_of, log
from crossrail.errors import EngineClosed


class CountTicket:
    """A callback that waits for counts, from ImmCounter.on_count."""

    __slots__ = ("_cookie", "_counter", "_ticket")

    def __init__(self, counter: ImmCounter, ticket: int, cookie: int) -> None:
        self._counter = counter
        self._ticket = ticket
        self._cookie = cookie

    def cancel(self) -> bool:
        """True: withdrawn, nothing was taken and fn is not called. False: too late, it is or was called."""
        if not self._counter._cancel_notify(self._ticket):
            return False
        callbacks_of(self._counter._engine).forget(self._cookie)
        return True

    def __repr__(self) -> str:
        return f"<CountTicket of {self._counter!r}>"


class ImmCounter(_core.ImmCounter):
    """Arrivals of one immediate number at this engine. Made by Engine.imm_counter and Engine.alloc_imm.

    Credit semantics: a wait of n takes n. Arrivals before anybody asks are kept. One operation counts once, however
    many rails carried it; paged writes count once a page. A count comes after its bytes are in place.
    wait, wait_async and on_count are served in the order in which they asked. Any thread.
    """

    __slots__ = ()

    async def wait_async(self, count: int = 1, timeout_s: float | None = None) -> None:
        """Like wait(), for a task of the running event loop; no polling.

        A task that is cancelled takes nothing: what was served to it at that moment is given back.
        Raises WaitTimeout having taken none, EngineClosed.
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
        """Takes count once they are there, then calls fn() once on the engine's callback thread.

        fn may submit, wait and close regions; if it raises, that is logged. When the engine closes first it is not
        called; EngineClosed when it is closed already, or the number was released.
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
        """Gives the number back. Call it when no peer will send it any more: it may then be handed out again.

        It rests until all others were handed out, or a million released; what arrives for it meanwhile puts it in use
        again. Raises UsageError where it can be seen that counts are expected: somebody waits for it, or a part of one
        has arrived (the rest is under way, or the write was fenced off in the middle). force: drops both; who waits
        gets EngineClosed.
        """
        self._engine.release_imm(self.imm, force=force)

    def __repr__(self) -> str:
        try:
            return f"<ImmCounter {self.imm}: {self.poll()} arrived>"
        except EngineClosed:
            return _raise.inherited(self)

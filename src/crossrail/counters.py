"""Counting arrivals: all synchronisation of the contract."""

from __future__ import annotations

from collections.abc import Callable

from crossrail import _core, _options, _raise
from crossrail._closing import Closing
from crossrail._notify import LoopNotifier, arrival, callbacks_of, log
from crossrail._torch import stream_of
from crossrail.errors import EngineClosed, UsageError


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

    def raise_flag(self) -> CountFlag:
        """Makes a flag, a word that GPU kernels wait for. From now on it gets all whole counts, present ones at once.

        Waits that were queued before are served first; the flag gets what they leave, and later waits get none of it.
        Closing the flag returns what no kernel has taken. Raises UsageError while the counter has another flag,
        EngineClosed once the engine is closed or the number released. Any thread.
        """
        return CountFlag(self)

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


class CountFlag(_core.CountFlag, Closing):
    """Counts that a GPU waits for without the CPU, also in CUDA graphs. ImmCounter.raise_flag makes it.

    The thread that counts arrivals writes their number to a word in host memory, where kernels see it. Counts are
    credits here too: a wait for n takes n, and each replay of a graph takes n again. Keep this object until its kernels
    have run, and as long as a graph that contains one may be replayed. It ends with close(), or with the engine; a
    kernel that is waiting then ends too. Only one stream may wait at a time. Any thread.
    """

    __slots__ = ()

    def wait_on(self, stream: object = None, count: int = 1, timeout_s: float = 60.0) -> None:
        """Makes this CUDA stream wait until there are `count` counts, and take them.

        Returns at once: it launches a kernel of one thread, which waits; during a capture it becomes part of the graph.
        Later work on the stream sees what was written before the counts. If timeout_s passes, or the flag is closed,
        the kernel ends without its counts: later work runs all the same, on whatever is in memory, and later waits end
        at once until check() has reported it. So call check() where you synchronize.
        While the kernel waits, CUDA calls that wait for kernels do not return: those that load one, or pin or free
        memory. Whatever makes the counts arrive must not need such a call (docs/gpu-memory.md).
        stream: as in Watcher.add_on. count: 1 or more. timeout_s: seconds, from when the kernel begins.
        Needs NVIDIA's driver and compute capability 7.0; the first call pins a page. Raises UsageError for anything but
        a stream of a GPU of this host, and on a simulated engine; TransportError with CUDA's error. Nothing was
        launched in these cases.
        """
        _options.check_timeout(timeout_s)
        handle, gpu = stream_of(stream)
        self._wait_on(handle, gpu, count, timeout_s)

    def check(self) -> None:
        """Raises if a kernel has ended without its counts since the last call: WaitTimeout, EngineClosed, or UsageError
        if the flag was closed meanwhile.

        Call it after waiting for the stream (torch.cuda.synchronize(), an event): it knows nothing of kernels that end
        later. From now on kernels wait again. Never blocks.
        """
        wanted, is_over = self._take_missed()
        if wanted == 0:
            return
        taken = self.taken  # read before `given`, so that it cannot be the larger one
        arrived = self.given - taken
        if not is_over:
            raise _raise.flag_timeout(self._engine, self.imm, arrived, wanted)
        if self._engine.closed:
            raise _raise.counter_closed(self._engine, self.imm, arrived, wanted)
        raise UsageError(
            f"immediate {self.imm}: its flag was closed, or the number released, while a kernel waited for {wanted} "
            "counts; it took none, and what followed it in its stream has run without"
        )

    def close(self) -> None:
        """Ends the flag: it gets no more counts, and those that no kernel has taken go back to the counter. Idempotent.

        Wait for the streams first: a kernel that still waits would end without its counts, and one that takes some at
        this very moment would take counts that the counter gets back as well.
        """
        self._lower()

    def __repr__(self) -> str:
        try:
            return f"<CountFlag of immediate {self.imm}: {self.given} given, {self.taken} taken>"
        except EngineClosed:
            return _raise.inherited(self)

"""From the engine's worker into Python: queues of cookies, and the loop or thread that drains each of them.

The worker never takes the GIL. It posts integers to a native Notifier, whose eventfd wakes either an event loop
(LoopNotifier: one per asyncio loop) or a thread (CallbackThread: one per engine, started when first needed). A cookie
names what to do; one that nobody knows any more is dropped.
"""

from __future__ import annotations

import itertools
import logging
import os
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

from crossrail import _core, _raise

if TYPE_CHECKING:
    import asyncio  # slow to import, and who runs a loop has done it

log = logging.getLogger("crossrail")


# Weak, both: a notifier holds what is awaited, which holds its loop.
_of_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, weakref.ref[LoopNotifier]] = weakref.WeakKeyDictionary()


class LoopNotifier:
    """The notifier of one event loop. Threads: that of the loop.

    The loop holds it through its reader, so both end together, also when the loop is closed without a word to us: what
    still awaits there can then be collected, and takes nothing.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.notifier = _core.Notifier()
        self._handlers: dict[int, Callable[[], object]] = {}
        self._cookies = itertools.count(1)
        self._loop = weakref.ref(loop)
        loop.add_reader(self.notifier, self._drain)

    @classmethod
    def running(cls, engine: _core.Engine) -> LoopNotifier:
        """The notifier of the running loop. UsageError if there is none, or its clock is not the engine's."""
        loop = _running_loop(engine)
        if getattr(loop, "world", None) is not cast(_HasWorld, engine)._world:
            raise _raise.another_clock(engine, loop)
        known = _of_loop.get(loop)
        found = None if known is None else known()
        if found is None:
            found = cls(loop)
            _of_loop[loop] = weakref.ref(found)
        return found

    @property
    def closed(self) -> bool:
        """Whether the loop is, or is gone: nobody wakes its tasks any more."""
        loop = self._loop()
        return loop is None or loop.is_closed()

    def register(self, call: Callable[[], object]) -> int:
        """A cookie at whose arrival `call` runs once. It must not raise."""
        cookie = next(self._cookies)
        self._handlers[cookie] = call
        return cookie

    def expect(self) -> tuple[int, asyncio.Future[bool]]:
        """A cookie, and a future that becomes True when it arrives. Whoever takes one gives it to forget()."""
        loop = self._loop()
        assert loop is not None  # it is running
        future = loop.create_future()
        return self.register(partial(resolve, future, True)), future

    def forget(self, cookie: int) -> None:
        self._handlers.pop(cookie, None)

    def _drain(self) -> None:
        for cookie in self.notifier.drain():
            call = self._handlers.pop(cookie, None)
            if call is not None:
                call()


def weakly(method: Callable[[], object]) -> Callable[[], None]:
    """Calls a bound method for as long as its object lives, without keeping that alive."""
    weak = weakref.WeakMethod(method)

    def call() -> None:
        bound = weak()
        if bound is not None:
            bound()

    return call


def loop_time(engine: _core.Engine) -> float:
    """Seconds, on the clock of the running loop."""
    return _running_loop(engine).time()


def _running_loop(engine: _core.Engine) -> asyncio.AbstractEventLoop:
    try:
        loop: asyncio.AbstractEventLoop = sys.modules["asyncio"].get_running_loop()
    except (KeyError, RuntimeError):  # in a program that never imported it, there is none either
        raise _raise.no_loop(engine) from None
    return loop


async def arrival(future: asyncio.Future[bool], timeout_s: float | None) -> bool:
    """Waits for a future of LoopNotifier.expect; False when timeout_s passed first."""
    if timeout_s is None:
        return await future
    timer = future.get_loop().call_later(timeout_s, resolve, future, False)
    try:
        return await future
    finally:
        timer.cancel()


def resolve(future: asyncio.Future[bool], result: bool) -> None:
    """Sets the result unless it came already, or nobody waits any more."""
    if not future.done():
        future.set_result(result)


def log_raised(engine_name: str, what: str) -> None:
    """Logs the exception that is being handled, which a function of the user's raised; the engine goes on.

    As text: a log handler that keeps the exception would keep its frames, and with them the engine.
    """
    log.error("engine %r: %s raised; the engine goes on\n%s", engine_name, what, traceback.format_exc())


class _Handler(NamedTuple):
    call: Callable[[], object]
    once: bool


class CallbackThread:
    """Runs an engine's callbacks on a thread of their own, one at a time, in the order in which they became due.

    Invariant: while a handler is registered and the engine is open, the thread runs. The thread itself holds only the
    notifier and a weak reference, so callbacks that refer to their engine keep neither alive.
    Threads: everything from any thread.
    """

    # Here, since a signal's handler may raise before __init__ has begun, and __del__ comes all the same.
    _thread: threading.Thread | None = None

    def __init__(self, engine_name: str) -> None:
        self._name = engine_name
        self._handlers: dict[int, _Handler] = {}
        self._cookies = itertools.count(1)  # 0 only wakes the thread
        # Guards _thread, _closing and _is_starting. Reentrant: a signal's handler may close the engine in between.
        self._lock = threading.RLock()
        self._closing = False
        self._is_starting = False  # the thread, in start()
        self._pid = os.getpid()
        self.notifier = _core.Notifier()  # last: it may fail, and __del__ looks at the rest

    def register(self, call: Callable[[], object], *, once: bool = True) -> int:
        """A cookie that makes the thread run `call` when posted. Then arm whatever posts it, then start().

        Where the thread may not run yet, start() comes first as well: if it cannot, nothing has been armed.
        """
        cookie = next(self._cookies)
        self._handlers[cookie] = _Handler(call, once)
        return cookie

    def forget(self, cookie: int) -> None:
        self._handlers.pop(cookie, None)

    def start(self) -> threading.Thread | None:
        """Sees to it that the thread runs; after close() until nothing is due. There is none in a forked child.

        Raises TransportError where the system gives no thread.
        """
        if self._thread is not None and not self._closing:
            return self._thread
        with self._lock:
            if self._thread is None and self._pid == os.getpid():
                name = f"crossrail-callbacks:{self._name}"
                self._is_starting = True
                self._thread = threading.Thread(
                    target=_run, args=(weakref.ref(self), self.notifier), name=name, daemon=True
                )
                try:
                    self._thread.start()
                except RuntimeError as error:
                    self._thread = None
                    raise _raise.no_thread(error) from None
                finally:
                    self._is_starting = False
            return self._thread

    def close(self, timeout_s: float) -> None:
        """Runs what is due and ends the thread. From the thread itself: it ends once the callback returns."""
        with self._lock:
            self._closing = True
            thread = self._thread
            is_starting = self._is_starting
        if thread is None:
            return
        self.notifier.post(0)
        # In the middle of start() we are in a signal's handler: the thread runs what is due, and ends, behind it.
        if is_starting or thread is threading.current_thread():
            return
        thread.join(timeout_s)
        if thread is self._thread and not thread.is_alive():
            # The garbage collector, which finalizes our engine, has cut the thread's weak reference first.
            self._thread = None
            thread = self.start() or thread
            thread.join(timeout_s)
        if thread.is_alive():
            log.error("engine %r: a callback has not returned within %g s of close()", self._name, timeout_s)

    def dispatch(self) -> bool:
        """Runs what is due, on the thread. False: the thread ends."""
        for cookie in self.notifier.drain():
            self._run_handler(cookie)
        while self._closing:
            with self._lock:
                # The last look and the end of the thread are one step: what is posted later starts another.
                due = self.notifier.drain()
                if not due:
                    self._thread = None
                    return False
            for cookie in due:
                self._run_handler(cookie)
        return True

    def _run_handler(self, cookie: int) -> None:
        handler = self._handlers.get(cookie)
        if handler is None:
            return
        if handler.once:
            del self._handlers[cookie]
        try:
            handler.call()
        except BaseException:
            log_raised(self._name, "a callback")

    def __del__(self) -> None:
        if self._thread is not None and self._pid == os.getpid():
            self.notifier.post(0)  # the thread sees that we are gone


def _run(owner: weakref.ref[CallbackThread], notifier: _core.Notifier) -> None:
    # Looks before it waits: started behind close(), for what another has run meanwhile, it would wait for ever.
    while (callbacks := owner()) is not None and callbacks.dispatch():
        del callbacks
        notifier.wait()


class Callbacks(Protocol):
    """Runs an engine's callbacks: CallbackThread, or whoever waits in a simulated world (crossrail._simulation)."""

    notifier: _core.Notifier

    def register(self, call: Callable[[], object], *, once: bool = True) -> int: ...
    def forget(self, cookie: int) -> None: ...
    def start(self) -> threading.Thread | None: ...
    def close(self, timeout_s: float) -> None: ...


class _HasWorld(Protocol):
    _world: object  # None outside of simulations


class _HasCallbacks(Protocol):
    _callbacks: Callbacks


def callbacks_of(engine: _core.Engine) -> Callbacks:
    return cast(_HasCallbacks, engine)._callbacks


def _forget_parent() -> None:
    # An inherited eventfd is the parent's too: whoever drains it here steals the parent's wake-ups.
    _of_loop.clear()


os.register_at_fork(after_in_child=_forget_parent)

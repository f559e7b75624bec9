"""From the engine's worker into Python: queues of cookies, each drained by an event loop or a thread.

The worker never takes the GIL. It posts integers to a native Notifier, whose eventfd wakes either an event loop
(LoopNotifier: one per asyncio loop) or a thread (CallbackThread: one per engine, started when first needed). A cookie
names what to do; a cookie that nobody knows any more is dropped.
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
    import asyncio  # slow to import; whoever runs a loop has imported it

log = logging.getLogger("crossrail")


# Weak on both sides: a notifier holds what its tasks await, which holds the loop.
_of_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, weakref.ref[LoopNotifier]] = weakref.WeakKeyDictionary()


class LoopNotifier:
    """The notifier of one event loop. Threads: that loop's.

    The loop holds it through its reader, so both end together, even if the loop is closed without telling us: whatever
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
        """Whether the loop is closed or gone, so that nobody wakes its tasks any more."""
        loop = self._loop()
        return loop is None or loop.is_closed()

    def register(self, call: Callable[[], object]) -> int:
        """A cookie; when it arrives, `call` runs once. It must not raise."""
        cookie = next(self._cookies)
        self._handlers[cookie] = call
        return cookie

    def expect(self) -> tuple[int, asyncio.Future[bool]]:
        """A cookie, and a future that becomes True when it arrives. The caller must pass the cookie to forget()
        afterwards.
        """
        loop = self._loop()
        assert loop is not None  # we run on it
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
    """A callable that calls a bound method while its object lives, without keeping the object alive."""
    weak = weakref.WeakMethod(method)

    def call() -> None:
        bound = weak()
        if bound is not None:
            bound()

    return call


def loop_time(engine: _core.Engine) -> float:
    """The time on the running loop's clock, in seconds."""
    return _running_loop(engine).time()


def _running_loop(engine: _core.Engine) -> asyncio.AbstractEventLoop:
    try:
        loop: asyncio.AbstractEventLoop = sys.modules["asyncio"].get_running_loop()
    except (KeyError, RuntimeError):  # no loop is running, or asyncio was never imported
        raise _raise.no_loop(engine) from None
    return loop


async def arrival(future: asyncio.Future[bool], timeout_s: float | None) -> bool:
    """Waits for a future of LoopNotifier.expect; False if timeout_s passes first."""
    if timeout_s is None:
        return await future
    timer = future.get_loop().call_later(timeout_s, resolve, future, False)
    try:
        return await future
    finally:
        timer.cancel()


def resolve(future: asyncio.Future[bool], result: bool) -> None:
    """Sets the result unless it is set already or nobody waits any more."""
    if not future.done():
        future.set_result(result)


def log_raised(engine_name: str, what: str) -> None:
    """Logs the current exception, which a user's function raised; the engine goes on.

    As text: a log handler that kept the exception would keep its frames alive, and with them the engine.
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

    # On the class: a signal handler may raise before __init__ has begun, and __del__ runs all the same.
    _thread: threading.Thread | None = None

    def __init__(self, engine_name: str) -> None:
        self._name = engine_name
        self._handlers: dict[int, _Handler] = {}
        self._cookies = itertools.count(1)  # 0 only wakes the thread
        # Guards _thread, _closing and _is_starting. Reentrant: a signal handler may close the engine while we hold it.
        self._lock = threading.RLock()
        self._closing = False
        self._is_starting = False  # start() is starting the thread
        self._pid = os.getpid()
        self.notifier = _core.Notifier()  # last: it may fail, and __del__ needs all the others

    def register(self, call: Callable[[], object], *, once: bool = True) -> int:
        """A cookie that makes the thread run `call` when posted. Then arm whatever posts it, then start().

        Where the thread may not be running yet, call start() first as well: if it fails, nothing has been armed.
        """
        cookie = next(self._cookies)
        self._handlers[cookie] = _Handler(call, once)
        return cookie

    def forget(self, cookie: int) -> None:
        self._handlers.pop(cookie, None)

    def start(self) -> threading.Thread | None:
        """Ensures that the thread runs; after close(), until nothing is due. A forked child has no thread.

        Raises TransportError if the system cannot start one, and what a signal handler raises meanwhile.
        """
        if self._thread is not None and not self._closing:
            return self._thread
        with self._lock:
            if self._thread is None and self._pid == os.getpid():
                name = f"crossrail-callbacks:{self._name}"
                try:
                    self._is_starting = True
                    self._thread = threading.Thread(
                        target=_run, args=(weakref.ref(self), self.notifier), name=name, daemon=True
                    )
                    self._thread.start()
                except BaseException as error:
                    # A signal handler may have raised. A thread that begins all the same finds that it is not ours.
                    self._thread = None
                    if isinstance(error, RuntimeError):
                        raise _raise.no_thread(error) from None
                    raise
                finally:
                    self._is_starting = False
            return self._thread

    def close(self, timeout_s: float) -> None:
        """Runs what is due and ends the thread. Called on the thread itself, it ends once the callback returns."""
        with self._lock:
            self._closing = True
            thread = self._thread
            is_starting = self._is_starting
        if thread is None:
            return
        self.notifier.post(0)
        # In the middle of start() we are a signal handler: the thread runs what is due and ends after we return.
        if is_starting or thread is threading.current_thread():
            return
        thread.join(timeout_s)
        if thread is self._thread and not thread.is_alive():
            # The garbage collector, which is finalizing our engine, cleared the thread's weak reference first.
            self._thread = None
            thread = self.start() or thread
            thread.join(timeout_s)
        if thread.is_alive():
            log.error("engine %r: a callback has not returned within %g s of close()", self._name, timeout_s)

    def dispatch(self) -> bool:
        """Runs what is due, on the thread. False: the thread ends."""
        with self._lock:  # which start() holds until it knows
            if self._thread is not threading.current_thread():
                return False
        for cookie in self.notifier.drain():
            self._run_handler(cookie)
        while self._closing:
            with self._lock:
                # The last look and the thread's end are one step: whatever is posted later starts another thread.
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
            self.notifier.post(0)  # wakes the thread, which sees that we are gone


def _run(owner: weakref.ref[CallbackThread], notifier: _core.Notifier) -> None:
    # Looks before it waits: a thread started after close(), for work that another has run meanwhile, would wait for
    # ever.
    while (callbacks := owner()) is not None and callbacks.dispatch():
        del callbacks
        notifier.wait()


class Callbacks(Protocol):
    """Runs an engine's callbacks: CallbackThread, or any thread that waits in a simulated world
    (crossrail._simulation).
    """

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
    # The parent shares an inherited eventfd: draining it here would steal the parent's wake-ups.
    _of_loop.clear()


os.register_at_fork(after_in_child=_forget_parent)

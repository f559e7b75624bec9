"""An asyncio event loop on the virtual clock: whole services run unchanged, as fast as they can be computed.

Between steps of tasks the loop lets the world go on until something concerns a task, or its next timer is due, and the
clock then stands at that moment. A sleep of an hour costs as much as one of a microsecond.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Protocol, TypeVar

import crossrail
from crossrail import _core
from crossrail._options import check_seconds
from crossrail._ordered import OrderedWeakSet
from crossrail.errors import SimulationIdle, UsageError, WaitTimeout
from crossrail.sim.collecting import collect, collecting_on_time

# So many turns of the loop without a wait take no time. Further ones take _SPIN_NS each: who polls with
# `await asyncio.sleep(0)` would else hold the clock for ever.
_SPINS_FREE = 1000
_SPIN_NS = 1000
# Turns of the loop between garbage collections; if the last one left many tasks, this many per task: a collection
# examines everything that a program keeps, and would otherwise take much of a large program's time.
_TURNS_PER_COLLECTION = 20_000
_TURNS_PER_TASK = 16
_TASKS_TOLD_MAX = 8
_END_PATIENCE_NS = 60 * 10**9  # virtual, for tasks that are cancelled at the end
_INNER = tuple(str(Path(module.__file__).parent) for module in (asyncio, crossrail) if module.__file__)

_T = TypeVar("_T")


class Drivable(Protocol):
    """What the loop needs from a world."""

    @property
    def now_ns(self) -> int:
        """Virtual nanoseconds since the world began."""
        ...

    def _advance(
        self, deadline_ns: int | None, limit_ns: int | None, notifier: _core.Notifier | None, *, goes_on: bool
    ) -> str:
        """Advances the world until the notifier has something ("news"); until a callback ran, some real time has
        passed, or the clock is at the limit, where it stops ("more"); or until the deadline, at which the clock then
        stands.

        "idle": there is no deadline, and no event is left. goes_on: the last result was "more", and nothing was done
        since.
        """
        ...


class _Task(asyncio.Task[Any]):
    """A task whose hash is the same in each run, instead of its address: TaskGroup cancels a set of tasks."""

    def __init__(self, loop: Any, coro: Any, **options: Any) -> None:
        self._number: int = next(loop._numbers)  # first: what follows puts it into sets
        super().__init__(coro, loop=loop, **options)

    def __hash__(self) -> int:
        return self._number


class SimEventLoop(asyncio.BaseEventLoop):
    """The loop of one world, from World.event_loop(). Tasks, timers, queues, locks and to_thread work as usual.

    time() is the virtual clock, in seconds. A loop in which all tasks wait for what can never happen raises
    SimulationIdle, with their names and places; one that reaches limit_s (virtual seconds of the world) WaitTimeout:
    the clock stops there.
    While it runs, Python's garbage collector runs at fixed turns of the loop, so every run collects alike.
    Functions given to run_in_executor run at once, in this thread, and take no virtual time. There are no sockets,
    pipes, subprocesses or signal handlers. Threads: the one that runs it.
    """

    def __init__(self, world: Drivable, *, limit_s: float | None = None) -> None:
        super().__init__()
        self.world = world
        self._clock_resolution = 1e-9
        self._selector: SimEventLoop | None = self  # BaseEventLoop asks it to select()
        self._notifier: _core.Notifier | None = None
        self._on_news: asyncio.Handle | None = None
        self._is_poked = False
        self._spins = 0
        self._turns = 0
        self._collects_at_turn = _TURNS_PER_COLLECTION  # the next time
        self._numbers = itertools.count()
        self._tasks: OrderedWeakSet[asyncio.Task[Any]] = OrderedWeakSet()
        self._asyncgens: OrderedWeakSet[Any] = OrderedWeakSet()  # BaseEventLoop's; in this order they are closed
        self.set_task_factory(_Task)
        try:
            check_limit(limit_s)
        except UsageError:
            self.close()
            raise
        self._limit_ns = None if limit_s is None else math.ceil(limit_s * 1e9)

    def time(self) -> float:
        """Virtual seconds since the world began."""
        return self.world.now_ns / 1e9

    def __repr__(self) -> str:
        state = "closed" if self.is_closed() else "running" if self.is_running() else "open"
        return f"<SimEventLoop at {self.time():.9f} s, {state}>"

    def run_forever(self) -> None:
        """As usual."""
        with collecting_on_time():
            super().run_forever()

    # ---- what BaseEventLoop asks of those who know how to wait

    def select(self, timeout: float | None) -> list[asyncio.Handle]:
        """Waits for at most so many virtual seconds, None: for ever. The callbacks that are due."""
        self._turns += 1
        if self._turns == self._collects_at_turn:
            collect()
            self._collects_at_turn += max(_TURNS_PER_COLLECTION, _TURNS_PER_TASK * len(self._tasks))
        now_ns = self.world.now_ns
        deadline_ns = None if timeout is None else now_ns + self._spun_ns(math.ceil(timeout * 1e9))
        if self._limit_ns is not None and now_ns >= self._limit_ns:
            raise WaitTimeout(f"the simulation is at its limit of {self._limit_ns / 1e9:g} s; {self._waiting()}")
        outcome = self.world._advance(deadline_ns, self._limit_ns, self._notifier, goes_on=False)
        # Some real time has passed, and signals' handlers have run. For the world it is the same wait: if the
        # deadline were computed again, the speed of this machine would decide where the clock ends up.
        while outcome == "more" and not self._is_poked and not self._is_at_limit():
            outcome = self.world._advance(deadline_ns, self._limit_ns, self._notifier, goes_on=True)
        is_poked, self._is_poked = self._is_poked, False  # by a signal handler, while the world went on
        if outcome == "idle" and not is_poked:
            raise SimulationIdle(
                f"the simulation is idle at {self.time():.9f} s: no event is left, so nothing will ever wake "
                f"{self._waiting()}"
            )
        return [self._on_news] if outcome == "news" and self._on_news is not None else []

    def _is_at_limit(self) -> bool:
        return self._limit_ns is not None and self.world.now_ns >= self._limit_ns

    def _spun_ns(self, wait_ns: int) -> int:
        self._spins = 0 if wait_ns > 0 else self._spins + 1
        return _SPIN_NS if self._spins > _SPINS_FREE else wait_ns

    def _process_events(self, event_list: list[asyncio.Handle]) -> None:
        for handle in event_list:
            self._add_callback(handle)  # type: ignore[attr-defined]  # BaseEventLoop's, for this use

    def _write_to_self(self) -> None:
        self._is_poked = True

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        """As usual."""
        task = super().create_task(coro, **options)
        self._tasks.add(task)
        return task

    def _unfinished(self) -> list[asyncio.Task[Any]]:
        """Tasks in the order in which they were made; those not made by create_task() come last."""
        ours = [task for task in self._tasks if not task.done()]
        return [*ours, *asyncio.all_tasks(self).difference(ours)]

    # ---- what engines tell

    def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:  # type: ignore[override]
        """Only for notifiers of engines: everything else with a descriptor lives in real time."""
        if not isinstance(fd, _core.Notifier):
            raise UsageError(f"add_reader({fd!r}): a simulated loop has no files and no sockets, only engines")
        self._notifier = fd
        self._on_news = asyncio.Handle(callback, args, self, None)

    def remove_reader(self, fd: Any) -> bool:
        """Only for notifiers of engines. True if it was there."""
        if self._notifier is None or fd is not self._notifier:
            return False
        self._notifier = self._on_news = None
        return True

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        """As usual, except for a Ctrl-C inside a task: run() has raised it already, so nothing is left to report."""
        if not isinstance(context.get("exception"), KeyboardInterrupt):
            super().default_exception_handler(context)

    def close(self) -> None:
        """As usual. The world stays as it is."""
        super().close()
        # Break cycles, so that whatever they hold is released at once.
        self._selector = self._notifier = self._on_news = None

    async def _refuse(self, *args: object, **options: object) -> Any:
        """Not available in a simulation: UsageError."""
        raise UsageError(
            "a simulated loop has no sockets, pipes, processes and signals. Next: let simulated parts talk by messages "
            "of their engines, or hand them a substitute"
        )

    create_connection = create_server = create_datagram_endpoint = _refuse
    create_unix_connection = create_unix_server = getaddrinfo = getnameinfo = _refuse
    connect_read_pipe = connect_write_pipe = subprocess_exec = subprocess_shell = _refuse

    def run_in_executor(self, executor: Any, func: Callable[..., _T], *args: Any) -> asyncio.Future[_T]:  # type: ignore[override]
        """Calls func(*args) at once: a thread would run in real time, and differ from run to run."""
        future: asyncio.Future[_T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def _waiting(self) -> str:
        """The tasks that wait, and where."""
        tasks = sorted(self._unfinished(), key=lambda task: task.get_name())
        told = [_where(task) for task in tasks[:_TASKS_TOLD_MAX]]
        more = [f"and {len(tasks) - len(told)} more"] if len(tasks) > len(told) else []
        return f"{len(tasks)} waiting {'task' if len(tasks) == 1 else 'tasks'}: {', '.join([*told, *more])}"


def _where(task: asyncio.Task[Any]) -> str:
    """The task's name, and its innermost line that is neither asyncio's nor ours."""
    step: Any = task.get_coro()
    name, place = getattr(step, "__qualname__", "?"), ""
    while (frame := getattr(step, "cr_frame", None) or getattr(step, "gi_frame", None)) is not None:
        file = frame.f_code.co_filename
        if not place or not file.startswith(_INNER):
            place = f" at {file}:{frame.f_lineno}"
        step = getattr(step, "cr_await", None) or getattr(step, "gi_yieldfrom", None)
    return f"{task.get_name()} in {name}{place}"


def check_limit(limit_s: float | None) -> None:
    """UsageError unless it is None, or a time that comes: seconds, 0 or more."""
    if limit_s is None:
        return
    check_seconds(limit_s=limit_s)
    if limit_s == math.inf:
        raise UsageError("limit_s is inf: leave it out for no limit")


def run_on(world: Drivable, main: Coroutine[Any, Any, _T], *, limit_s: float | None = None) -> _T:
    """Runs main to its end on a loop of this world, as asyncio.run() would, and cancels the tasks that it left.

    limit_s: as of SimEventLoop. Raises what main raises, SimulationIdle, WaitTimeout.
    """
    try:
        check_limit(limit_s)
    except UsageError:
        main.close()
        raise
    if asyncio._get_running_loop() is not None:
        main.close()
        raise UsageError("an event loop runs in this thread already: call crossrail.sim.run() from outside of it")
    with collecting_on_time():
        return _run_to_the_end(SimEventLoop(world, limit_s=limit_s), main)


def _run_to_the_end(loop: SimEventLoop, main: Coroutine[Any, Any, _T]) -> _T:
    hidden: tuple[type[Exception], ...] = ()
    try:
        return loop.run_until_complete(main)
    except KeyboardInterrupt:
        hidden = (SimulationIdle, WaitTimeout)  # what tasks that it cut off still wait for is no news
        raise
    finally:
        try:
            loop._limit_ns = loop.world.now_ns + _END_PATIENCE_NS
            loop._spins = 0  # the end takes no time unless a task wants some
            with contextlib.suppress(*hidden):
                _cancel_tasks(loop)
                loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()


def _cancel_tasks(loop: SimEventLoop) -> None:
    tasks = loop._unfinished()
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.wait(tasks))
        for task in tasks:
            if not task.cancelled() and (error := task.exception()) is not None:
                context = {"message": "a task raised while it was cancelled", "exception": error, "task": task}
                loop.call_exception_handler(context)

"""Where an engine with transport="sim" opens: in the current world (see crossrail.sim).

The engine knows worlds by this only; crossrail.sim is above it.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

from crossrail import _core
from crossrail._notify import log_raised
from crossrail.errors import UsageError


class Place(NamedTuple):
    """A host of a world, where an engine opens."""

    simulation: Simulation
    world: _core.SimWorld  # the simulation's native half
    host: int
    default_name: Callable[[], str]  # of an engine that was given none: the same in every run
    callbacks: Callable[[str], SimulatedCallbacks]  # of an engine by this name
    opened: Callable[[_core.Engine], None]


class Simulation(Protocol):
    def _place(self, rails: int | Sequence[str]) -> Place:
        """A host for an engine that asked for no particular one."""
        ...


_simulations: list[Simulation] = []  # that are current, the innermost last
_asked: list[Place] = []  # for the engine that is just being opened


def enter(simulation: Simulation) -> None:
    _simulations.append(simulation)


def leave(simulation: Simulation) -> None:
    _simulations.remove(simulation)


@contextmanager
def at(place: Place) -> Iterator[None]:
    """The next engine opens there."""
    _asked.append(place)
    try:
        yield
    finally:
        if place in _asked:
            _asked.remove(place)


def place(transport: str, rails: int | Sequence[str]) -> Place | None:
    """Where an engine with these options opens; None: in the real world."""
    if transport != "sim":
        return None
    if _asked:
        return _asked.pop()
    if not _simulations:
        raise UsageError(
            "transport is 'sim', and there is no world: open the engine inside `with crossrail.sim.World():`, or by "
            "world.host(...).engine(...)"
        )
    return _simulations[-1]._place(rails)


class CallbackHub:
    """Callbacks of all engines of a world: whoever waits there runs them, one at a time, in the order of the clock.

    Threads: any; with several, callbacks run on one of those that wait.
    """

    def __init__(self) -> None:
        self.notifier = _core.Notifier()
        self._handlers: dict[int, tuple[str, Callable[[], object], bool]] = {}
        self._cookies = itertools.count(1)
        self._turn = threading.Lock()

    def register(self, engine_name: str, call: Callable[[], object], once: bool) -> int:
        cookie = next(self._cookies)
        self._handlers[cookie] = (engine_name, call, once)
        return cookie

    def forget(self, cookie: int) -> None:
        self._handlers.pop(cookie, None)

    def run(self) -> None:
        """Runs what is due. A callback that waits in the world runs no others meanwhile."""
        if not self._turn.acquire(blocking=False):
            return
        try:
            for cookie in self.notifier.drain():
                self._run_handler(cookie)
        finally:
            self._turn.release()

    def _run_handler(self, cookie: int) -> None:
        handler = self._handlers.get(cookie)
        if handler is None:
            return
        engine_name, call, once = handler
        if once:
            del self._handlers[cookie]
        try:
            call()
        except BaseException:
            log_raised(engine_name, "a callback")


class SimulatedCallbacks:
    """One engine's share of the hub, as CallbackThread has it."""

    def __init__(self, hub: CallbackHub, engine_name: str) -> None:
        self._hub = hub
        self._name = engine_name
        self.notifier = hub.notifier

    def register(self, call: Callable[[], object], *, once: bool = True) -> int:
        return self._hub.register(self._name, call, once)

    def forget(self, cookie: int) -> None:
        self._hub.forget(cookie)

    def start(self) -> threading.Thread | None:
        return None  # whoever waits

    def close(self, timeout_s: float) -> None:  # noqa: ARG002 - as the real one's
        self._hub.run()


def connect_callbacks(world: _core.SimWorld, hub: CallbackHub) -> None:
    """Waits in this world run the hub's callbacks. The world keeps the hub weakly: its handlers refer to engines."""
    found = weakref.ref(hub)

    def run() -> None:
        alive = found()
        if alive is not None:
            alive.run()

    world.set_callbacks(hub.notifier, run)

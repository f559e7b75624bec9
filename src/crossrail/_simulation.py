"""Where an engine with transport="sim" opens: in the current world (see crossrail.sim).

This is all that the engine knows of worlds; crossrail.sim is the layer above it.
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
    """A host of a simulated world, on which an engine opens."""

    simulation: Simulation
    world: _core.SimWorld  # the native half of the simulation
    host: int
    default_name: Callable[[], str]  # for an engine without a name; the same in every run
    callbacks: Callable[[str], SimulatedCallbacks]  # for the engine of this name
    opened: Callable[[_core.Engine], None]


class Simulation(Protocol):
    def _place(self, rails: int | Sequence[str]) -> Place:
        """A host for an engine that did not ask for a particular one."""
        ...


_simulations: list[Simulation] = []  # the current simulations, innermost last
_asked: list[Place] = []  # places for the engine that is being opened right now


def enter(simulation: Simulation) -> None:
    _simulations.append(simulation)


def leave(simulation: Simulation) -> None:
    _simulations.remove(simulation)


@contextmanager
def at(place: Place) -> Iterator[None]:
    """The next engine opens at this place."""
    _asked.append(place)
    try:
        yield
    finally:
        if place in _asked:
            _asked.remove(place)


def place(transport: str, rails: int | Sequence[str]) -> Place | None:
    """The place where an engine with these options opens; None: in the real world."""
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
    """The callbacks of all engines of a world: any thread that waits in the world runs them, one at a time, in the
    order of the virtual clock.

    Threads: any; if several wait, callbacks run on one of them.
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
        """Runs the callbacks that are due. A callback that itself waits in the world runs no others meanwhile."""
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
    """One engine's share of the hub, with the interface of CallbackThread."""

    def __init__(self, hub: CallbackHub, engine_name: str) -> None:
        self._hub = hub
        self._name = engine_name
        self.notifier = hub.notifier

    def register(self, call: Callable[[], object], *, once: bool = True) -> int:
        return self._hub.register(self._name, call, once)

    def forget(self, cookie: int) -> None:
        self._hub.forget(cookie)

    def start(self) -> threading.Thread | None:
        return None  # callbacks run on any waiting thread

    def close(self, timeout_s: float) -> None:  # noqa: ARG002 - as the real one's
        self._hub.run()


def connect_callbacks(world: _core.SimWorld, hub: CallbackHub) -> None:
    """Makes waits in this world run the hub's callbacks. The world refers weakly to the hub, whose handlers refer to
    engines.
    """
    found = weakref.ref(hub)

    def run() -> None:
        alive = found()
        if alive is not None:
            alive.run()

    world.set_callbacks(hub.notifier, run)

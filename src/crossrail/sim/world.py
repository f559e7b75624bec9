"""Worlds, their hosts, and the faults that are injected there."""

from __future__ import annotations

import itertools
import math
import random
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import count, product
from types import TracebackType
from typing import Any, TypeVar

from crossrail import _core, _simulation
from crossrail._options import check_seconds
from crossrail.engine import Engine
from crossrail.errors import UsageError
from crossrail.sim import collecting, profiles
from crossrail.sim.loop import SimEventLoop
from crossrail.sim.profiles import LocalProfile, NicProfile

_T = TypeVar("_T")

_STEPS_PER_LOOK = 64
_CHANCES = 1_000_000
_ALL_LINES = (1 << 64) - 1
_SLOWNESS_MAX = 1e6
_CLOSE_PATIENCE_S = 0.5
_EVERY_FAULT = 0  # of a kind and place: a fault without an end begins as this, and calls that end faults end all

_current: list[World] = []
_twins: dict[int, set[int]] = {}  # by seed, the numbers of worlds that are not closed


def current() -> World:
    """The innermost world whose `with` block this is. Raises UsageError outside of any."""
    if not _current:
        raise UsageError("there is no current world: use `with sim.World(...) as world:`")
    return _current[-1]


class Host:
    """A machine of a world: rails that its engines share. Made by World.host()."""

    def __init__(self, world: World, index: int, name: str, rails: Sequence[NicProfile]) -> None:
        self.world = world
        self.name = name
        self.rails = tuple(rails)
        self._index = index

    def engine(self, name: str | None = None, *, rails: int | Sequence[str] | None = None, **options: Any) -> Engine:
        """An engine on this host: an ordinary crossrail.Engine, with its options.

        name: None: "engine1", "engine2" and so on, within the world. rails: a number of the host's rails, or their
        numbers as a list of text ("0", "2"); None: all.
        """
        with _simulation.at(self._place()):
            return Engine(name, transport="sim", rails=len(self.rails) if rails is None else rails, **options)

    @property
    def engines(self) -> list[Engine]:
        """The engines opened here and not closed or killed, in the order of opening."""
        return [engine for engine, host in self.world._engines.items() if host is self and not engine.closed]

    def _place(self) -> _simulation.Place:
        world = self.world
        return _simulation.Place(
            world, world._native, self._index, world._next_engine_name, world._callbacks_of, self._opened
        )

    def _opened(self, engine: _core.Engine) -> None:
        assert isinstance(engine, Engine)
        self.world._keep(engine, self)

    def __repr__(self) -> str:
        return f"<Host {self.name!r}, rails {', '.join(rail.name for rail in self.rails)}>"


class World:
    """A simulated world: one thread, a seed, and a clock of its own.

    Engines opened on its hosts move bytes between each other with the handshake, failover and liveness of the real
    transports; what the contract leaves open happens in an order drawn from the seed. The clock moves only while
    somebody waits: in a transfer, counter, message, connect() or close() of its engines, in run(), or in the
    event_loop(). Your callbacks run in the thread that waits. A wait without a deadline for what can never happen
    raises SimulationIdle.

    seed: determines all choices; `rng` is a generator with the same seed, for your own choices. The same seed, calls
        and build give the same log, byte for byte, on every machine.
    keep_log: keep the lines of `log`, or this many of the last ones; `log_digest` always covers all.
    Its engines belong to the world: you need not keep a reference to them.
    Lifecycle: 1. open; inside `with` it is the current world, where Engine(transport="sim") opens on a host of its own.
    2. close(): closes its engines. Threads: one. Several are safe, but runs then differ. Inside `with`, and while a
    loop of it runs, Python collects garbage at moments that are the same in every run (docs/simulator.md, Replay).
    Times (at_s, for_s) are virtual seconds since the world began; None: now, and forever.
    Faults of one kind may overlap: one that ends leaves the others as they are, and of slow() the one that began last
    counts. A call that ends faults - rail_up(), heal(), thaw(), slow() with factor 1 - ends all of that kind that have
    begun there by then, whatever their for_s.
    """

    def __init__(self, seed: int = 0, *, keep_log: bool | int = False) -> None:
        if not 0 <= seed < 1 << 64:
            raise UsageError(f"seed is {seed}, must be 0..2**64-1")
        self.seed = seed
        self.rng = random.Random(seed)
        log_lines_max = (_ALL_LINES if keep_log else 0) if isinstance(keep_log, bool) else keep_log
        if log_lines_max < 0:
            raise UsageError(f"keep_log is {keep_log}, must be True, False or a number of lines")
        self._native = _core.SimWorld(seed, log_lines_max, self._take_twin())
        self._hub = _simulation.CallbackHub()
        _simulation.connect_callbacks(self._native, self._hub)
        self._hosts: dict[str, Host] = {}
        self._engines: dict[Engine, Host] = {}
        self._own_hosts = 0
        self._unnamed = count(1)
        self._fault_numbers = count(1)

    # ---- hosts

    def host(self, name: str, nic: profiles.Rails = profiles.DEFAULT, local: LocalProfile | None = None) -> Host:
        """A new host.

        nic: its rails: a profile, its name, "2xefa200" for two of them, or a list of these. local: the way between
        engines of this host. Raises UsageError for a name that the world has already.
        """
        if not name or name in self._hosts or any(letter.isspace() or letter == "/" for letter in name):
            raise UsageError(f"a host by the name {name!r}: it must be new, not empty, without spaces and slashes")
        if len(f"sim-{name}".encode()) > 64:
            raise UsageError(f"host name {name!r} is longer than 60 bytes")
        rails = profiles.rails_of(nic)
        way = local or LocalProfile()
        index = self._native.add_host(name, [rail.as_tuple() for rail in rails], way.as_tuple())
        self._hosts[name] = Host(self, index, name, rails)
        return self._hosts[name]

    @property
    def hosts(self) -> list[Host]:
        """The world's hosts, in the order in which they were made."""
        return list(self._hosts.values())

    def _place(self, rails: int | Sequence[str]) -> _simulation.Place:
        """A separate host, for an engine that named none."""
        self._own_hosts += 1
        count = rails if isinstance(rails, int) else len(rails)
        profile = profiles.rails_of(profiles.DEFAULT)
        return self.host(f"host{self._own_hosts}", profile * max(1, min(count, 16)))._place()

    def _next_engine_name(self) -> str:
        """A name for an engine that was given none. Names are in the log, so they do not depend on the process."""
        return f"engine{next(self._unnamed)}"

    def _callbacks_of(self, engine_name: str) -> _simulation.SimulatedCallbacks:
        return _simulation.SimulatedCallbacks(self._hub, engine_name)

    def _take_twin(self) -> int:
        """A number by which addresses of open worlds of this seed differ; 0 where there is no other."""
        taken = _twins.setdefault(self.seed, set())
        twin = next(number for number in itertools.count() if number not in taken)
        taken.add(twin)
        self._give_twin_back = weakref.finalize(self, taken.discard, twin)
        return twin

    # ---- time

    @property
    def now_ns(self) -> int:
        """Virtual nanoseconds since the world began."""
        return self._native.now_ns

    @property
    def now_s(self) -> float:
        """Virtual seconds since the world began."""
        return self.now_ns / 1e9

    def run(self, for_s: float | None = None, *, until: Callable[[], object] | None = None) -> bool:
        """Lets the world run: for so long, until the condition is true, or until no event is left.

        True if the condition came true, or if there was none. It is asked after each step of the world, and only looks.
        Your callbacks run here. A transfer that waits for its peer, or a scheduled fault, is an event that is left.
        """
        deadline_ns = None if for_s is None else self.now_ns + _ns(for_s, "for_s")
        steps_max = 1 if until is not None else _STEPS_PER_LOOK
        goes_on = False
        while True:
            if until is not None and until():
                return True
            outcome = self._native.run_until(deadline_ns, None, steps_max, goes_on=goes_on)
            goes_on = outcome == "more"  # and a condition only looks
            if outcome == "callbacks":
                self._hub.run()
            elif outcome in ("deadline", "idle") or (deadline_ns is None and until is None and self._native.is_calm):
                return until is None or bool(until())

    def event_loop(self, *, limit_s: float | None = None) -> SimEventLoop:
        """A new asyncio loop on this world's clock; crossrail.sim.run() makes, runs and closes one.

        limit_s: virtual seconds since the world began, after which it raises WaitTimeout.
        """
        return SimEventLoop(self, limit_s=limit_s)

    def _advance(
        self, deadline_ns: int | None, limit_ns: int | None, notifier: _core.Notifier | None, *, goes_on: bool
    ) -> str:
        """For the event loop, which says what it wants. The clock stops at the limit."""
        outcome = self._native.run_until(deadline_ns, notifier, limit_ns=limit_ns, goes_on=goes_on)
        if outcome == "callbacks":
            self._hub.run()
        return outcome

    # ---- what goes wrong on purpose

    def rail_down(self, host: Host, rail: int, *, at_s: float | None = None, for_s: float | None = None) -> None:
        """Unplugs a rail: what is in flight there is retried for half a second, then its paths break."""
        self._check_rail(host, rail)
        self._twice(at_s, for_s, partial(self._native.set_rail_up, host._index, rail), False, True)

    def rail_up(self, host: Host, rail: int, *, at_s: float | None = None) -> None:
        """Plugs the rail in again."""
        self._check_rail(host, rail)
        self._native.set_rail_up(host._index, rail, True, self._at_ns(at_s), _EVERY_FAULT)

    def fill_queue(self, host: Host, rail: int, *, at_s: float | None = None, for_s: float | None = None) -> None:
        """The rail accepts no new work requests, like a NIC whose queues are full."""
        self._check_rail(host, rail)
        self._twice(at_s, for_s, partial(self._native.set_rail_full, host._index, rail), True, False)

    def slow(
        self, host: Host, rail: int, factor: float, *, at_s: float | None = None, for_s: float | None = None
    ) -> None:
        """Work requests that begin now take this many times as long on that rail's wire. 1: the normal speed."""
        self._check_rail(host, rail)
        if not 0.001 <= factor <= _SLOWNESS_MAX:
            raise UsageError(f"factor is {factor}, must be 0.001 to 1e6")
        change = partial(self._native.set_slowness, host._index, rail)
        permille = round(factor * 1000)
        self._twice(at_s, None if permille == 1000 else for_s, change, permille, 1000)

    def partition(
        self, these: Iterable[Host], those: Iterable[Host], *, at_s: float | None = None, for_s: float | None = None
    ) -> None:
        """Cuts these hosts off from those, in both directions."""
        for a, b in self._pairs(these, those):
            self._twice(at_s, for_s, partial(self._native.set_partition, a._index, b._index), True, False)

    def heal(self, these: Iterable[Host], those: Iterable[Host], *, at_s: float | None = None) -> None:
        """Ends a partition."""
        for a, b in self._pairs(these, those):
            self._native.set_partition(a._index, b._index, False, self._at_ns(at_s), _EVERY_FAULT)

    def silence(
        self, these: Iterable[Host], those: Iterable[Host], *, at_s: float | None = None, for_s: float | None = None
    ) -> None:
        """Drops what these hosts send to those. The other way all arrives, but these cannot acknowledge it."""
        for a, b in self._pairs(these, those):
            self._twice(at_s, for_s, partial(self._native.set_silence, a._index, b._index), True, False)

    def kill(self, what: Engine | Host, *, at_s: float | None = None) -> None:
        """The process of the engine, or everything on the host, dies: whatever it does next raises EngineClosed.

        What has left its NICs still arrives. Peers notice by its silence, or by their own NICs' errors.
        """
        if isinstance(what, Host):
            self._check_host(what)
            self._native.kill_host(what._index, self._at_ns(at_s))
        elif self._has(what):
            self._native.kill(what._seat, self._at_ns(at_s))

    def freeze(self, what: Engine | Host, *, at_s: float | None = None, for_s: float | None = None) -> None:
        """The process stops, as by SIGSTOP: its NICs keep placing bytes, but nobody looks at them."""
        freeze = self._freezing(what)
        if freeze is not None:
            self._twice(at_s, for_s, freeze, True, False)

    def thaw(self, what: Engine | Host, *, at_s: float | None = None) -> None:
        """The process continues."""
        freeze = self._freezing(what)
        if freeze is not None:
            freeze(False, self._at_ns(at_s), _EVERY_FAULT)

    # Of these, rail None means the host: a fault of its own, beside those of its rails, and ended by itself.

    def fail_works(
        self, host: Host, *, chance: float = 0.0, count: int = 0, rail: int | None = None, at_s: float | None = None
    ) -> None:
        """Work requests of this host end with an error: the next `count`, and each later one with this chance. Zeros
        end it.

        Half of them are carried out, and only the sender does not learn it. rail: only on this rail.
        """
        if not 0 <= chance <= 1:
            raise UsageError(f"chance is {chance}, must be 0 to 1")
        _check_count(count)
        self._check_rail(host, rail)
        self._native.set_failing(host._index, rail, round(chance * _CHANCES), count, self._at_ns(at_s))

    def withhold_completions(
        self, host: Host, *, rail: int | None = None, at_s: float | None = None, for_s: float | None = None
    ) -> None:
        """Completions of this host's works, or of one rail's, are not reported until then.

        Or until their path is flushed.
        """
        self._check_rail(host, rail)
        self._twice(at_s, for_s, partial(self._native.set_withholding, host._index, rail), True, False)

    def fail_registrations(self, host: Host, count: int, *, rail: int | None = None, at_s: float | None = None) -> None:
        """The next `count` registrations of memory raise TransportError. One is of one rail: any, or this one."""
        _check_count(count)
        self._check_rail(host, rail)
        self._native.set_registrations_to_fail(host._index, rail, count, self._at_ns(at_s))

    def lose_datagrams(self, chance: float, *, doubling: float = 0.0, at_s: float | None = None) -> None:
        """Datagrams of handshakes are lost with this chance, and arrive twice with the chance `doubling`."""
        for given in (chance, doubling):
            if not 0 <= given <= 1:
                raise UsageError(f"a chance is {given}, must be 0 to 1")
        self._native.set_datagram_faults(round(chance * _CHANCES), round(doubling * _CHANCES), self._at_ns(at_s))

    def _pairs(self, these: Iterable[Host], those: Iterable[Host]) -> list[tuple[Host, Host]]:
        pairs = list(product(these, those))
        for a, b in pairs:
            self._check_host(a)
            self._check_host(b)
            if a is b:
                raise UsageError(f"host {a.name!r} is on both sides")
        return pairs

    def _has(self, engine: Engine) -> bool:
        if engine._world is not self:
            raise UsageError(f"{engine!r} is not in this world")
        return not engine.closed

    def _freezing(self, what: Engine | Host) -> Callable[[bool, int | None, int], None] | None:
        """A function that freezes or thaws it. For a host: the engines that it has at that moment."""
        if isinstance(what, Host):
            self._check_host(what)
            return partial(self._native.freeze_host, what._index)
        return partial(self._native.freeze, what._seat) if self._has(what) else None

    def _twice(
        self, at_s: float | None, for_s: float | None, change: Callable[[_T, int | None, int], None], begin: _T, end: _T
    ) -> None:
        """Begins something, and ends it after for_s. A number identifies whose end it is."""
        at_ns = self._at_ns(at_s)
        if for_s is None:
            change(begin, at_ns, _EVERY_FAULT)
            return
        end_ns = (self.now_ns if at_ns is None else at_ns) + _ns(for_s, "for_s")
        number = next(self._fault_numbers)
        change(begin, at_ns, number)
        change(end, end_ns, number)

    def _at_ns(self, at_s: float | None) -> int | None:
        return None if at_s is None else _ns(at_s, "at_s")

    def _check_host(self, host: Host) -> None:
        if host.world is not self:
            raise UsageError(f"{host!r} is of another world")

    def _check_rail(self, host: Host, rail: int | None) -> None:
        self._check_host(host)
        if rail is not None and not 0 <= rail < len(host.rails):
            raise UsageError(f"rail is {rail}, and {host!r} has 0..{len(host.rails) - 1}")

    # ---- what happened

    @property
    def log(self) -> list[str]:
        """What happened, one line an event: "<ns> <host> <what> <name>=<value> ...". Empty without keep_log."""
        return self._native.log

    @property
    def log_digest(self) -> str:
        """The digest of everything that happened so far, kept or not: 32 hexadecimal digits, equal for equal runs."""
        return self._native.log_digest

    @property
    def stats(self) -> dict[str, int]:
        """Works carried out and their bytes, events of the world, turns of engines."""
        return dict(zip(("works", "bytes", "events", "turns"), self._native.totals, strict=True))

    # ---- its end

    def close(self) -> None:
        """Closes the world's engines, the youngest first. Idempotent."""
        for engine in reversed(self._engines):
            engine.close(_CLOSE_PATIENCE_S)
        self._engines.clear()
        self._give_twin_back()

    def _keep(self, engine: Engine, host: Host) -> None:
        """Engines belong to the world: their openers may drop them. Closed and killed ones are removed."""
        for ended in [engine for engine in self._engines if engine.closed]:
            ended.close(0.0)  # of a killed one, what is left
            del self._engines[ended]
        self._engines[engine] = host

    def __enter__(self) -> World:
        collecting.begin()
        _current.append(self)
        _simulation.enter(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            _current.remove(self)
            _simulation.leave(self)
            self.close()
        finally:
            collecting.end()

    def __repr__(self) -> str:
        return f"<World of seed {self.seed} at {self.now_s:.9f} s, {len(self._hosts)} hosts>"


def _check_count(count: int) -> None:
    if not 0 <= count < 1 << 64:
        raise UsageError(f"count is {count}, must be 0..2**64-1")


def _ns(seconds: float, argument: str) -> int:
    check_seconds(**{argument: seconds})
    if seconds == math.inf:
        raise UsageError(f"{argument} is inf: leave it out for a time without an end")
    return round(seconds * 1e9)

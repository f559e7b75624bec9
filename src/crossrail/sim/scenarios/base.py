"""What a scenario is, what one run of it is given, and what is checked after every run.

A scenario is a coroutine on the event loop of its own world: services, tasks and faults, written as a user would. What
it does is drawn from the seed, and so is the world's order of events: one number replays a run.
"""

from __future__ import annotations

import random
import time
import traceback
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

import crossrail as xr
from crossrail.sim.loop import run_on
from crossrail.sim.profiles import Rails
from crossrail.sim.world import Host, World

Bytes = npt.NDArray[np.uint8]

_SETTLE_S = 30.0  # virtual: longer than any timeout of an engine


class Checks:
    """Counts what was checked, and what of it was wrong. A run that checked nothing is wrong too."""

    def __init__(self) -> None:
        self.made = 0
        self.failures: list[str] = []

    def that(self, holds: bool, what: str) -> None:
        """what: the sentence that is true when it does not hold."""
        self.made += 1
        if not holds:
            self.failures.append(what)

    def equal(self, what: str, got: object, expected: object) -> None:
        self.that(got == expected, f"{what}: {got}, expected {expected}")

    def same_bytes(self, what: str, got: npt.NDArray[Any], expected: npt.NDArray[Any]) -> None:
        """Checks that both have the same shape and bytes; names the first byte that differs."""
        if got.shape != expected.shape:
            self.that(False, f"{what}: an array of shape {got.shape}, expected {expected.shape}")
            return
        wrong = np.flatnonzero(got != expected)
        first = int(wrong[0]) if len(wrong) else 0
        self.that(
            len(wrong) == 0,
            f"{what}: {len(wrong):,} of {len(got):,} bytes differ, the first at {first}"
            + (f": {got[first]}, expected {expected[first]}" if len(wrong) else ""),
        )


@dataclass
class Figure:
    """Something worth knowing of a run, in virtual units."""

    value: float
    unit: str


@dataclass
class _Tracked:
    transfer: xr.Transfer
    what: str
    completions: int = 0


class Run:
    """What a scenario is given: a world, random numbers of its own, and the checkers of the contract.

    Checked at the end of every run, once nothing is left to happen: each tracked transfer completed exactly once; no
    counter has more than was taken; no sealed memory was touched after its seal.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.rng = random.Random(f"scenario-{world.seed}")
        self._bytes = np.random.Generator(np.random.PCG64(world.seed))
        self.check = Checks()
        self.figures: dict[str, Figure] = {}
        self._tracked: list[_Tracked] = []
        self._counters: list[xr.ImmCounter] = []
        self._sealed: list[tuple[str, Bytes, Bytes]] = []

    # ---- making things

    def host(self, name: str, nic: Rails = "cx7") -> Host:
        return self.world.host(name, nic=nic)

    def random_bytes(self, nbytes: int) -> Bytes:
        """Random bytes, the same for the same seed."""
        return np.frombuffer(self._bytes.bytes(nbytes), np.uint8)

    def counter(self, engine: xr.Engine, imm: int | None = None) -> xr.ImmCounter:
        """A counter whose counts must all be taken by the end. imm: None for an unused number."""
        counter = engine.alloc_imm() if imm is None else engine.imm_counter(imm)
        self._counters.append(counter)
        return counter

    def track(self, transfer: xr.Transfer, what: str) -> xr.Transfer:
        """Watches that it completes exactly once."""
        tracked = _Tracked(transfer, what)
        self._tracked.append(tracked)

        def completed(_: xr.Transfer) -> None:
            tracked.completions += 1

        transfer.add_done_callback(completed)
        return transfer

    def seal(self, what: str, memory: Bytes) -> None:
        """Nothing may write there from now on. memory: an array over a region that stays open."""
        self._sealed.append((what, memory, memory.copy()))

    def figure(self, name: str, value: float, unit: str) -> None:
        self.figures[name] = Figure(value, unit)

    # ---- the end

    def finish(self) -> None:
        """The checks of every run. The world has come to rest."""
        for tracked in self._tracked:
            self.check.equal(f"completions of {tracked.what}", tracked.completions, 1)
        for counter in self._counters:
            if not counter.closed:
                self.check.equal(f"counts of immediate {counter.imm} that nobody sent", counter.poll(), 0)
        for what, memory, before in self._sealed:
            self.check.same_bytes(f"{what}, after its completion", memory, before)


@dataclass(frozen=True)
class Scenario:
    """limit_s: virtual seconds after which a run that has not ended is wrong."""

    name: str
    title: str
    play: Callable[[Run], Coroutine[Any, Any, None]]
    limit_s: float = 600.0


@dataclass
class Outcome:
    """One run. failures: empty when all checks held. digest: of the event log, the same for the same seed and build."""

    scenario: str
    seed: int
    failures: list[str]
    checks: int = 0
    figures: dict[str, Figure] = field(default_factory=dict)
    virtual_s: float = 0.0
    real_s: float = 0.0
    stats: dict[str, int] = field(default_factory=dict)
    digest: str = ""
    log: list[str] = field(default_factory=list)
    traceback: str = ""

    @property
    def ok(self) -> bool:
        return not self.failures

    def compare(self, again: Outcome) -> None:
        """Another run of the same scenario and seed has the same event log, or this one has failed."""
        self.checks += 1
        if self.digest != again.digest:
            self.failures.append(f"the same seed gave two event logs: {self.digest} and {again.digest}")


def play(scenario: Scenario, seed: int, *, keep_log: bool | int = False) -> Outcome:
    """Runs it once, in this thread. keep_log: as of World. Whatever is raised in there is a failure of the run."""
    began = time.perf_counter()
    told = ""
    with World(seed=seed, keep_log=keep_log) as world:
        run = Run(world)
        try:
            run_on(world, scenario.play(run), limit_s=scenario.limit_s)
            ended_s = world.now_s
            world.run(for_s=_SETTLE_S)
            run.finish()
            run.check.that(run.check.made > 0, "nothing was checked")
        except Exception as error:
            ended_s = world.now_s
            run.check.that(False, f"{type(error).__name__}: {error}")
            told = traceback.format_exc()
        return Outcome(
            scenario=scenario.name,
            seed=seed,
            failures=run.check.failures,
            checks=run.check.made,
            figures=run.figures,
            virtual_s=ended_s,
            real_s=time.perf_counter() - began,
            stats=world.stats,
            digest=world.log_digest,
            log=list(world.log),
            traceback=told,
        )

"""The outcome of a simulated update: how long it took, its lower bound, and who did what when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from crossrail.cli.weights.simulate.setting import Setting
from crossrail.cli.weights.simulate.works import PREPARE
from crossrail.sim.profiles import CX7
from crossrail.weights import Plan
from crossrail.weights.planning.speeds import moved_bytes, written_bytes

_GAP_S = 0.5e-3  # two spans that are closer are drawn as one


class Span(NamedTuple):
    """A lane of a trainer was busy: virtual seconds since the update began."""

    stage: str
    begin_s: float
    end_s: float


class Spans:
    """Spans of one trainer; spans of a stage that touch, or nearly do, are joined."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[float, float]] = {}
        self._closed: list[Span] = []

    def add(self, stage: str, begin_s: float, end_s: float) -> None:
        """For each stage in the order in which spans ended."""
        before = self._open.get(stage)
        if before is not None and begin_s <= before[1] + _GAP_S:
            self._open[stage] = min(before[0], begin_s), end_s
            return
        if before is not None:
            self._closed.append(Span(stage, *before))
        self._open[stage] = begin_s, end_s

    def all(self, began_s: float) -> list[Span]:
        """Relative to began_s."""
        every = [*self._closed, *(Span(stage, *times) for stage, times in self._open.items())]
        return [Span(stage, begin - began_s, end - began_s) for stage, begin, end in every]


class Outcome(NamedTuple):
    """Virtual seconds. total_s: until the last target had all its counts and the last barrier was over.

    stages: what the busiest trainer's lanes took, by name. bounds: what each resource needs at least, however well all
    overlaps; the largest is `bound`. waited_s: the average trainer's, after its own last write, for the others.
    busy_s: of each trainer, without what it waited for others. spans: of some trainers, by
    rank: trainer 0, the first and the last to be done.
    """

    total_s: float
    stages: dict[str, float]
    bounds: dict[str, float]
    waited_s: float
    writes: int
    nbytes: int
    read_bytes: int
    busy_s: dict[int, float]
    spans: dict[int, list[Span]]

    @property
    def bound(self) -> str:
        return max(self.bounds, key=lambda name: self.bounds[name])

    @property
    def over_bound(self) -> float:
        return self.total_s / self.bounds[self.bound]


def bounds_of(
    plan: Plan, lanes: Mapping[int, dict[str, float]], reads: Mapping[int, int], setting: Setting
) -> dict[str, float]:
    """The bound of each resource alone, at its busiest user. lanes: of each trainer; reads: bytes that it fetches."""
    rate = CX7.gbps / 8 * 1e9
    # A collective gathers by other ways than the rails that updates go by.
    moved = written_bytes(plan) if setting.collective else moved_bytes(plan)
    sent = {rank: nbytes / rate for rank, nbytes in moved.items()}
    first = min(sent)
    sent[first] /= setting.link_share
    received = np.bincount(plan.writes["target"], weights=plan.writes["nbytes"]) / rate
    slow = {rank: setting.straggler if rank == first else 1.0 for rank in lanes}

    def most(names: Sequence[str]) -> float:
        return max(slow[rank] * sum(lane.get(name, 0.0) for name in names) for rank, lane in lanes.items())

    return {
        "links of senders": max(sent.values()),
        "links of receivers": max(float(received.max()), max(reads.values(), default=0) / rate),
        "host to device": most(["h2d"]),
        "prepare": most(PREPARE),
        "submit": most(["submit"]),
        "barriers": setting.costs.barrier_ms / 1e3 * (2 if setting.collective else 1),
    }

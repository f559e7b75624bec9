"""What a measure is: a name, a figure, the machine's limit next to it, and the bar that it has to reach."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from crossrail.cli.bench.interval import Interval, of_median

if TYPE_CHECKING:
    from crossrail.cli.bench.pair import Pair

_RATE_UNITS = ("GB/s", "M/s", "Mpages/s", "k/s")


class Sample(NamedTuple):
    """One run: the figure, and the machine's limit in the same unit measured right beside it (None: has none)."""

    value: float
    limit: float | None


@dataclass(frozen=True)
class Bar:
    """The bar. of: the figure itself, its ratio to the limit, or its excess over the limit."""

    of: Literal["value", "ratio", "difference"]
    direction: Literal[">=", "<="]
    bound: float

    def __str__(self) -> str:
        sign = "+" if self.of == "difference" else ""
        return f"{self.direction} {sign}{self.bound:g}{'x' if self.of == 'ratio' else ''}"

    def met(self, result: Result) -> bool:
        """Whether the medians reach it."""
        figure = {"value": result.value, "ratio": result.ratio, "difference": result.difference}[self.of]
        if figure is None:
            return False
        return figure >= self.bound if self.direction == ">=" else figure <= self.bound


# Prepares, verifies untimed, then gives one sample after another for as long as it is asked; cleans up when closed.
SampleStream = Generator[Sample, None, None]


@dataclass(frozen=True)
class Point:
    """A measure's position on a curve: one operation's bytes, and how many are in flight. window 0: no writes."""

    kind: str  # "write", "read", "paged", "latency"
    nbytes: int
    window: int


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of the table."""

    name: str
    title: str
    unit: str
    limit: str
    bar: Bar | None = None
    point: Point | None = None


@dataclass(frozen=True, kw_only=True)
class Measure(Line):
    """A measure that two processes make."""

    samples: Callable[[Pair], SampleStream]


@dataclass
class Result:
    """A line and its samples.

    The ratio is the median of each run's own ratio, so that both sides of it were measured in the same speed regime.
    """

    measure: Line
    samples: list[Sample] = field(default_factory=list)
    error: str = ""
    note: str = ""  # what is good to know beside the figure
    path: str = ""  # how the bytes went, of a measure between two hosts
    ecdf: list[tuple[float, float]] = field(default_factory=list)  # (share of all, value): single operations, sorted

    @property
    def value(self) -> float | None:
        """Median figure; None if there is none."""
        return statistics.median(s.value for s in self.samples) if self.samples else None

    @property
    def limit(self) -> float | None:
        """Median limit; None when the measure has none."""
        limits = [s.limit for s in self.samples if s.limit is not None]
        return statistics.median(limits) if limits else None

    @property
    def ratios(self) -> list[float]:
        """value / limit of each run that has both."""
        return [s.value / s.limit for s in self.samples if s.limit]

    @property
    def ratio(self) -> float | None:
        """Median of value / limit."""
        return statistics.median(self.ratios) if self.ratios else None

    @property
    def difference(self) -> float | None:
        """Median of value - limit."""
        differences = [s.value - s.limit for s in self.samples if s.limit is not None]
        return statistics.median(differences) if differences else None

    @property
    def value_interval(self) -> Interval | None:
        """The interval of the median figure; None with too few runs."""
        return of_median([s.value for s in self.samples])

    @property
    def ratio_interval(self) -> Interval | None:
        """The interval of the median ratio; None with too few runs, and without a limit."""
        return of_median(self.ratios)

    @property
    def more_is_better(self) -> bool:
        """Whether more is better, by the figure's unit: rates are good when high, times and memory when low."""
        return self.measure.unit in _RATE_UNITS

    @property
    def verdict(self) -> str:
        """ "ok", "miss", "error", or nothing when there is no bar."""
        if self.error:
            return "error"
        if self.measure.bar is None:
            return ""
        return "ok" if self.measure.bar.met(self) else "miss"

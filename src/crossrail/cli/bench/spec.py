"""What a measure is: a name, a figure, the machine's limit beside it, and the bar it has to reach."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from crossrail.cli.bench.pair import Pair


class Sample(NamedTuple):
    """One run: the figure, and the machine's limit in the same unit measured right beside it (None: has none)."""

    value: float
    limit: float | None


@dataclass(frozen=True)
class Bar:
    """What has to be reached. of: the figure itself, or its ratio to the limit."""

    of: Literal["value", "ratio"]
    direction: Literal[">=", "<="]
    bound: float

    def __str__(self) -> str:
        return f"{self.direction} {self.bound:g}{'x' if self.of == 'ratio' else ''}"

    def met(self, result: Result) -> bool:
        """Whether the medians reach it."""
        figure = result.value if self.of == "value" else result.ratio
        if figure is None:
            return False
        return figure >= self.bound if self.direction == ">=" else figure <= self.bound


# Prepares, verifies untimed, then gives one sample after another for as long as it is asked; cleans up when closed.
SampleStream = Generator[Sample, None, None]


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of the table."""

    name: str
    title: str
    unit: str
    limit: str
    bar: Bar | None = None


@dataclass(frozen=True, kw_only=True)
class Measure(Line):
    """One that two processes measure."""

    samples: Callable[[Pair], SampleStream]


@dataclass
class Result:
    """A line and its samples.

    The ratio is the median of each run's own ratio, so that both sides of it were measured in the same speed regime.
    """

    measure: Line
    samples: list[Sample] = field(default_factory=list)
    error: str = ""
    note: str = ""  # what is good to know beside the figure, as the path that was used

    @property
    def value(self) -> float | None:
        """Median figure; None when there is none."""
        return statistics.median(s.value for s in self.samples) if self.samples else None

    @property
    def limit(self) -> float | None:
        """Median limit; None when the measure has none."""
        limits = [s.limit for s in self.samples if s.limit is not None]
        return statistics.median(limits) if limits else None

    @property
    def ratio(self) -> float | None:
        """Median of value / limit."""
        ratios = [s.value / s.limit for s in self.samples if s.limit]
        return statistics.median(ratios) if ratios else None

    @property
    def verdict(self) -> str:
        """ "ok", "miss", "error", or nothing when there is no bar."""
        if self.error:
            return "error"
        if self.measure.bar is None:
            return ""
        return "ok" if self.measure.bar.met(self) else "miss"

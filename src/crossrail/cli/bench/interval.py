"""How certain a figure from a few runs is: 95 % intervals of its median, and of the ratio of two such figures.

Runs are few, so nothing here relies on large numbers. From six runs on the interval comes from order statistics: the
true median lies between two of the sorted runs with a probability that depends only on their number. With fewer runs
even the smallest and the largest do not enclose it in 95 % of all cases, so something has to be assumed: that the
logarithms of the runs are normally distributed. Then Student's t gives the interval. For two to five runs it always
contains the median that we print, because it is wider than one standard deviation.

An interval holds for runs like these, on the same machine in the same minutes. It says nothing about another day.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95
_ORDER_RUNS_MIN = 6

# Student's t, two-sided 95 %, by degrees of freedom 1..30; tables of any textbook. Beyond, the last one: a little wide.
_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


@dataclass(frozen=True)
class Interval:
    """Both ends included. method: "order statistics", "student t of logarithms", or "welch t of logarithms"."""

    low: float
    high: float
    method: str

    def to_json(self) -> dict[str, float | str]:
        """The interval as JSON values, for the report."""
        return {"low": self.low, "high": self.high, "confidence": CONFIDENCE, "method": self.method}


def of_median(values: Sequence[float]) -> Interval | None:
    """The interval of the runs' median. None with fewer than two runs, or if one is not positive."""
    if len(values) < 2 or not all(0 < value < math.inf for value in values):
        return None
    if len(values) >= _ORDER_RUNS_MIN:
        outside = order_statistics_outside(len(values))
        ordered = sorted(values)
        return Interval(ordered[outside], ordered[-1 - outside], "order statistics")
    logs = [math.log(value) for value in values]
    middle, half = statistics.fmean(logs), _t(len(logs) - 1) * math.sqrt(_squared_error(logs))
    return Interval(_exp(middle - half), _exp(middle + half), "student t of logarithms")


def order_statistics_outside(count: int) -> int:
    """How many of `count` sorted runs can be left out at each end so that the rest still encloses the median in 95 %
    of all cases: each run is below it with chance 1/2, whatever its distribution.
    """
    outside, missed = 0, 2 / 2**count
    while (more := missed + 2 * math.comb(count, outside + 1) / 2**count) <= 1 - CONFIDENCE:
        outside, missed = outside + 1, more
    return outside


def of_quotient(new: Sequence[float], old: Sequence[float]) -> Interval | None:
    """The interval of new / old, for independent runs. None if either has too few runs.

    Welch's t of the logarithms: the two may spread differently.
    """
    if min(len(new), len(old)) < 2 or not all(0 < value < math.inf for value in (*new, *old)):
        return None
    new_logs, old_logs = [math.log(value) for value in new], [math.log(value) for value in old]
    new_error, old_error = _squared_error(new_logs), _squared_error(old_logs)
    middle = statistics.fmean(new_logs) - statistics.fmean(old_logs)
    half = 0.0
    if (error := new_error + old_error) > 0:
        freedom = error**2 / (new_error**2 / (len(new) - 1) + old_error**2 / (len(old) - 1))
        half = _t(int(freedom)) * math.sqrt(error)
    return Interval(_exp(middle - half), _exp(middle + half), "welch t of logarithms")


def _squared_error(logs: Sequence[float]) -> float:
    """The squared standard error of their mean."""
    return statistics.variance(logs) / len(logs)


def _t(freedom: int) -> float:
    return _T[min(max(freedom, 1), len(_T)) - 1]


def _exp(value: float) -> float:
    """Two wild runs can have an end that no float holds."""
    return math.exp(min(value, 709.0))

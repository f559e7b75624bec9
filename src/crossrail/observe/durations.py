"""A histogram of durations, for things that happen at most some thousand times a second."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class Durations:
    """Counts by upper bounds in seconds, ascending; one more for what is longer. sum_s: of all.

    Threads: one adds; any reads, and may see a sum without its count for a moment.
    """

    def __init__(self, bounds_s: Sequence[float]) -> None:
        self.bounds_s = tuple(bounds_s)
        self.counts = [0] * (len(self.bounds_s) + 1)
        self.sum_s = 0.0

    def add(self, seconds: float) -> None:
        """Counts one."""
        self.sum_s += seconds
        self.counts[bisect_left(self.bounds_s, seconds)] += 1

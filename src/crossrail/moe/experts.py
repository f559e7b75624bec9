"""Which rank has which experts: the only place in Python that computes it. In native code, it is moe::Layout."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from crossrail import _core

Ints = npt.NDArray[Any]


@dataclass(frozen=True)
class ExpertSplit:
    """Experts are numbered rank by rank. counts: of each rank, 0 for one that has none. Immutable; any thread."""

    counts: tuple[int, ...]

    @classmethod
    def even(cls, experts: int, world: int) -> ExpertSplit:
        """ceil(experts / world) on each rank, as far as there are so many: the last ranks may have fewer, or none."""
        return cls(tuple(_core.moe.split_evenly(experts, world)))

    @property
    def most(self) -> int:
        """Experts of the rank that has most."""
        return max(self.counts)

    @property
    def is_even(self) -> bool:
        """Whether it equals even()."""
        return self == ExpertSplit.even(sum(self.counts), len(self.counts))

    def of(self, rank: int) -> range:
        """The experts of that rank."""
        return range(int(self._ends[rank]) - self.counts[rank], int(self._ends[rank]))

    def ranks_of(self, experts: Ints) -> Ints:
        """The rank of each expert; of numbers that are no expert's, below 0 or too large, any number."""
        return np.searchsorted(self._ends, experts, side="right")

    @cached_property
    def _ends(self) -> Ints:
        return np.cumsum(self.counts)

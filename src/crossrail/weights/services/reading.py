"""The weights of one version, as an inference rank reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import crossrail as xr
from crossrail.weights.inventory.memory import WeightMemory


@dataclass(frozen=True)
class Reading:
    """Weights of one version. regions: where they are, corresponding to those of the memory's inventory."""

    version: int
    regions: Sequence[xr.Region]
    _memory: WeightMemory

    def like(self, array: Any) -> Any:
        """The weights that are read where this array of the memory is: itself, or its place in the spare memory.

        A numpy array; on a GPU what was added, or a torch tensor. See WeightMemory.like.
        """
        return self._memory.like(array, self.regions)

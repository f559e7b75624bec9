"""Spare memory of an inference rank that closes: what is in it is first brought back."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import crossrail as xr
from crossrail.errors import CrossrailError, WaitTimeout
from crossrail.weights.inventory.memory import WeightMemory

log = logging.getLogger("crossrail.weights")

_CLOSE_S = 5.0


class ClosingSpare:
    """What remains to be done with spare memory.

    version: the version in it that has to be copied into the memory; None: the memory stays as it is. Threads: any.

    Invariant: no region is closed before the copy, which may read it, has ended.
    """

    def __init__(self, memory: WeightMemory, regions: Sequence[xr.Region], version: int | None) -> None:
        self._memory = memory
        self._regions = list(regions)
        self._version = version
        self._working = threading.Lock()

    def free(self) -> None:
        """Blocks. Raises what the first region did that could not be closed; the others are. May be called again, also
        while another call of it runs: waits for that.
        """
        with self._working:
            self._bring_back()
            self._close_regions()

    def _bring_back(self) -> None:
        version, self._version = self._version, None
        if version is None or self._memory.closed:
            return
        try:
            self._memory.copy_from(self._regions)
        except Exception as error:
            left = "is torn" if self._memory.is_torn else "is older"
            why = f"{type(error).__name__}: {error}"
            log.warning(
                "inference rank %d: version %d is lost with its spare memory, and what is left %s: %s",
                self._memory.rank, version, left, why,
            )  # fmt: skip

    def _close_regions(self) -> None:
        left: list[xr.Region] = []
        first: CrossrailError | None = None
        for region in self._regions:
            try:
                region.close(0.0 if isinstance(first, WaitTimeout) else _CLOSE_S)
            except CrossrailError as error:
                left.append(region)
                first = first or error
        self._regions = left
        if first is not None:
            raise first

"""Makes ranks begin together: a shared page with a word for each rank."""

from __future__ import annotations

import mmap
import os
import time

import numpy as np

from crossrail.errors import WaitTimeout

GATE_BYTES = 4096
_WORD_STRIDE = 8  # words of 8 bytes: a cache line for each rank
_PATIENCE_S = 120.0


class Gate:
    """Threads: one. Each word is written by its rank alone; nothing is read behind it, so no order is needed."""

    def __init__(self, fd: int, rank: int, ranks: int) -> None:
        """fd: of GATE_BYTES that all ranks map; the caller keeps it."""
        words = np.frombuffer(mmap.mmap(fd, GATE_BYTES), np.uint64)[::_WORD_STRIDE]
        self._words = words[:ranks]
        self._rank = rank
        self._passed = 0

    def pass_together(self) -> int:
        """Returns when all ranks are here: when this one came, in ns of CLOCK_MONOTONIC. WaitTimeout names the late."""
        self._passed += 1
        came_ns = time.monotonic_ns()
        self._words[self._rank] = self._passed
        while int(self._words.min()) < self._passed:
            os.sched_yield()
            if time.monotonic_ns() - came_ns > _PATIENCE_S * 1e9:
                late = [rank for rank, word in enumerate(self._words) if word < self._passed]
                raise WaitTimeout(f"ranks {late} did not come within {_PATIENCE_S:g} s")
        return came_ns

"""Makes ranks begin together: a shared page on which they count themselves."""

from __future__ import annotations

import mmap
import time

import numpy as np

from crossrail import _core
from crossrail.errors import TransportError, WaitTimeout

GATE_BYTES = 8192
_WORD_STRIDE = 8  # words of 8 bytes: a cache line for each rank
_PATIENCE_S = 120.0


class Gate:
    """Threads: one. Behind the line that all ranks count on, each has a line that says how often it came."""

    def __init__(self, fd: int, rank: int, ranks: int, *, sleeps: bool) -> None:
        """fd: of GATE_BYTES that all ranks map; the caller keeps it. sleeps: for ranks that share cores.

        If they spun or yielded, one that is done would keep the core from one that is not. Linux gives a core back to
        who yields, even if others want it, until it has had its share: up to 3 ms, counted as the other rank's.
        """
        page = np.frombuffer(mmap.mmap(fd, GATE_BYTES), np.uint8)
        self._counted = page[:4]
        self._came = page.view(np.uint64)[_WORD_STRIDE::_WORD_STRIDE][:ranks]
        self._rank = rank
        self._passed = 0
        self._sleeps = sleeps

    def pass_together(self) -> int:
        """Returns when all ranks are here: when this one came, in ns of CLOCK_MONOTONIC. WaitTimeout names the late."""
        self._passed += 1
        self._came[self._rank] = self._passed
        came_ns = time.monotonic_ns()
        due = (self._passed * len(self._came)) % (1 << 32)
        try:
            _core.bench.pass_gate(self._counted, due, sleeps=self._sleeps, timeout_s=_PATIENCE_S)
        except TransportError:
            late = [rank for rank, passed in enumerate(self._came) if passed < self._passed]
            raise WaitTimeout(f"ranks {late} did not come within {_PATIENCE_S:g} s") from None
        return came_ns

"""Barriers among all trainers: between the groups of a step, and between a step and the next change of weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import crossrail as xr


class Barrier(Protocol):
    """A barrier of the trainers of one plan. Threads: the event loop's."""

    async def wait(self, timeout_s: float) -> None:
        """Returns when all have called it as often as we have. Raises WaitTimeout, or what keeps it from working.

        timeout_s: 0 or more.
        """

    def close(self) -> None:
        """Nobody may enter it any more. Idempotent."""


# Arguments: this engine, the addresses of the other trainers, and a number that only this attempt uses.
MakeBarrier = Callable[[xr.Engine, Sequence[xr.Address], int], Barrier]


class EngineBarrier:
    """One immediate to each of the others, and a count of theirs. Made for one attempt, with a number of its own.

    A count of the next barrier may arrive before the last one of this barrier, and be taken for it. That does no harm:
    its sender has passed this barrier, so all have arrived.
    """

    def __init__(self, engine: xr.Engine, others: Sequence[xr.Address], imm: int) -> None:
        self._engine = engine
        self._others = len(others)
        self._group = engine.add_peer_group(others) if others else None
        self._counter = engine.imm_counter(imm)

    async def wait(self, timeout_s: float) -> None:
        if self._group is None:
            return
        told = self._engine.submit_barrier(self._group, self._counter.imm)
        try:
            await self._counter.wait_async(self._others, timeout_s)
            await told
        finally:
            told.cancel()

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            self._engine.remove_peer_group(group)
            self._counter.release(force=True)  # what a failed attempt left must not be counted by another

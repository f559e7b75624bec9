"""Whether a round fits what the ranks have room for. All ranks see the same counts, and come to the same end."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from crossrail import _core
from crossrail.moe.config import Config
from crossrail.moe.errors import CapacityExceeded


def find_overflow(
    config: Config, number: int, placement: _core.moe.Placement, counts: npt.NDArray[Any]
) -> CapacityExceeded | None:
    """What to raise when some rank has too little room. counts: int32 [groups, experts], of round `number`."""
    masked = config.layout == "masked"
    there = config.rows_per_expert if masked else config.rows_max
    for rank in range(config.world):
        needed = placement.fullest_expert(rank) if masked else placement.rows_needed(rank)
        if needed > there:
            return _exceeded(number, rank, needed, there, "an expert of it" if masked else "it")
    # More than a group can send to a rank, unless a token names an expert twice: send buffers are no longer.
    most = config.max_tokens * min(config.top_k, config.experts_per_rank)
    firsts = np.minimum(np.arange(config.world + 1) * config.experts_per_rank, config.experts)
    sums = np.concatenate([np.zeros((len(counts), 1), np.int64), np.cumsum(counts, axis=1)], axis=1)
    sent = np.diff(sums[:, firsts], axis=1).max(axis=0)
    if sent.max() > most:
        return _exceeded(number, int(sent.argmax()), int(sent.max()), most, "it of one group")
    return None


def _exceeded(number: int, rank: int, needed: int, there: int, whose: str) -> CapacityExceeded:
    return CapacityExceeded(
        f"round {number}: rank {rank} has room for {there} rows, {needed} are for {whose}. Next: a larger "
        "capacity_factor, or fewer tokens",
        rank=rank,
        needed=needed,
        there=there,
    )

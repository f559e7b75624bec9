"""Whether a round fits the ranks' memory. All ranks see the same counts, and so reach the same conclusion."""

from __future__ import annotations

from collections.abc import Sequence

from crossrail import _core
from crossrail.moe.config import Config
from crossrail.moe.errors import CapacityExceeded


def find_overflow(
    config: Config, number: int, placement: _core.moe.Placement, silent: Sequence[int] = ()
) -> CapacityExceeded | None:
    """What to raise when some rank has too little room in round `number`.

    silent: as in Round: they take no rows, and of routes to them not all ranks see the same counts.
    """
    masked = config.layout == "masked"
    # A group can send no more to a rank, unless a token names an expert twice: send buffers are no longer.
    rank = placement.first_over(config.rows_limits, config.routes_limits, silent)
    if rank is None:
        return None
    there, most = config.rows_limits[rank], config.routes_limits[rank]
    needed = placement.fullest_expert(rank) if masked else placement.rows_needed(rank)
    if needed > there:
        is_twice = config.capacity_factor is None  # there is room for any routing then
        return _exceeded(number, rank, needed, there, "an expert of it" if masked else "it", is_twice)
    return _exceeded(number, rank, placement.most_routes(rank), most, "it of one group", True)


def _exceeded(number: int, rank: int, needed: int, there: int, whose: str, is_twice: bool) -> CapacityExceeded:
    remedy = "a larger capacity_factor, or fewer tokens"
    if is_twice:
        remedy = "different experts for each token: some token names one twice"
    return CapacityExceeded(
        f"round {number}: rank {rank} has room for {there} rows, {needed} are for {whose}. Next: {remedy}",
        rank=rank,
        needed=needed,
        there=there,
    )

"""What ended the rounds of a GraphAllToAll, as the error to raise."""

from __future__ import annotations

from crossrail import _core
from crossrail.errors import CrossrailError, UsageError, WaitTimeout
from crossrail.moe.board import PARITIES
from crossrail.moe.capacity import find_overflow
from crossrail.moe.config import Config
from crossrail.moe.peers import Peers

_HALVES = {
    "routes": "dispatch of round {}",
    "rows": "rows of dispatch of round {}",
    "results": "combine of round {}",
    "sent": "part of round {}",
}


def found_failure(
    proxy: _core.moe.StreamProxy, peers: Peers, layout: _core.moe.Layout, config: Config, rank: int, timeout_s: float
) -> CrossrailError | None:
    """None while they go on."""
    try:
        found = proxy.failure()
    except CrossrailError as error:  # as an index that is none of an expert's
        return error
    if found is None:
        return None
    result, about, detail, step, number, counts = found
    if result == "overflow":
        placement = _core.moe.Placement(layout, counts.reshape(config.groups, config.experts))
        return find_overflow(config, number, placement)
    if result == "late" and about == rank:
        return UsageError(
            f"round {number + PARITIES} was begun, and round {number} is not ended after {timeout_s:g} s: "
            "each dispatch_send takes a combine_recv, also in graphs that are replayed. The rounds of this "
            "GraphAllToAll have ended"
        )
    trouble = peers.trouble((result, about, detail), _HALVES[step].format(number), timeout_s)
    if result != "late":
        return trouble
    return WaitTimeout(
        f"{str(trouble).partition('. Nothing is lost')[0]}. The rounds of this GraphAllToAll have ended. Next: see "
        "whether that rank makes the same calls as this one, and make a new one, on all ranks"
    )

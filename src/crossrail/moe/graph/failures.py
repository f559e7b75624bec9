"""Turns what ended the rounds of a GraphAllToAll, or keeps them, into the error to raise."""

from __future__ import annotations

import numpy as np

from crossrail import _core
from crossrail.errors import CrossrailError, UsageError, WaitTimeout
from crossrail.moe.capacity import find_overflow
from crossrail.moe.config import Config
from crossrail.moe.links.board import PARITIES
from crossrail.moe.outcome import Outcome
from crossrail.moe.peers import Peers

_HALVES = {
    "routes": "dispatch of round {}",
    "rows": "rows of dispatch of round {}",
    "results": "combine of round {}",
    "sent": "part of round {}",
}


def check_peers(proxy: _core.moe.StreamProxy, peers: Peers) -> None:
    """PeerFailed if a call has failed on a rank that the thread waits for; once for each such call."""
    halves = {rank: _HALVES[step].format(number) for step, number, ranks in proxy.waits() for rank in ranks}
    if halves:
        peers.parting.check_notes(halves.__contains__, halves.__getitem__)


def found_failure(
    proxy: _core.moe.StreamProxy, peers: Peers, config: Config, rank: int, timeout_s: float
) -> CrossrailError | None:
    """What ended the rounds; None while they continue."""
    try:
        found = proxy.failure()
    except CrossrailError as error:  # for example an index that is no expert's
        return error
    if found is None:
        return None
    number = found.round
    if found.result == "overflow":
        counts = np.asarray(found.counts).reshape(config.groups, config.experts)
        return find_overflow(config, number, _core.moe.Placement(peers.layout, counts))
    outcome = Outcome.of_native(found.result, found.rank, found.detail)
    if outcome.result == "late" and outcome.rank == rank and found.step == "routes":
        return UsageError(
            f"round {number + 1} was begun, and round {number} has not told its routes after {timeout_s:g} s: its "
            "dispatch_send failed half way while it was captured. The rounds of this GraphAllToAll have ended"
        )
    if outcome.result == "late" and outcome.rank == rank:
        return UsageError(
            f"round {number + PARITIES} was begun, and round {number} is not ended after {timeout_s:g} s: "
            "each dispatch_send takes a combine_recv, also in graphs that are replayed. The rounds of this "
            "GraphAllToAll have ended"
        )
    raised = peers.parting.error_of(outcome, _HALVES[found.step].format(number), timeout_s)
    if outcome.result != "late":
        return raised
    return WaitTimeout(
        f"{str(raised).partition('. Nothing is lost')[0]}. The rounds of this GraphAllToAll have ended. Next: see "
        "whether that rank makes the same calls as this one, and make a new one, on all ranks"
    )

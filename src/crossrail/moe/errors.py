"""Errors of dispatch and combine, in addition to those of the engine."""

from __future__ import annotations

from crossrail.errors import CrossrailError, PeerLost


class CapacityExceeded(CrossrailError):
    """A round has more rows for a rank than capacity_factor left room for.

    Raised on every rank alike, before any row of the round is written; the next round is not affected.
    rank: one that has too little room; needed, there: rows of its output (layout "masked": of one expert).
    """

    def __init__(self, message: str, *, rank: int, needed: int, there: int) -> None:
        super().__init__(message)
        self.rank = rank
        self.needed = needed
        self.there = there


class MaskedOut(PeerLost):
    """With on_lost="mask": the other ranks lost contact with this one, and continue without it.

    The only way back is a new AllToAll on all ranks.
    """


class NoMajority(PeerLost):
    """With on_lost="mask", where not all ranks share memory: this rank reaches too few others to continue.

    The others may continue without them. docs/moe-failures.md has the rule.
    """


def masked_out() -> MaskedOut:
    """The error for a rank that the others have masked."""
    text = "the other ranks lost sight of this one and go on without it. Next: make a new AllToAll"
    return MaskedOut(text, op="moe", status="peer-lost")

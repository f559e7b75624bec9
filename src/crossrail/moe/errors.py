"""Errors of dispatch and combine, in addition to those of the engine."""

from __future__ import annotations

from crossrail.errors import CrossrailError, PeerLost, UsageError, WaitTimeout


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


class PeerFailed(UsageError):
    """What we wait for does not come, since a call has failed on another rank, or that rank has closed its AllToAll.

    rank: which. has_left: it has closed; no round ends any more. Otherwise nothing is lost: that rank may make its call
    again, and so may we.
    """

    def __init__(self, message: str, *, rank: int, has_left: bool) -> None:
        super().__init__(message)
        self.rank = rank
        self.has_left = has_left


class MaskedOut(PeerLost):
    """With on_lost="mask": the other ranks lost contact with this one, and continue without it.

    The only way back is a new AllToAll on all ranks.
    """


class NoMajority(PeerLost):
    """With on_lost="mask", where not all ranks share memory: this rank reaches too few others to continue.

    The others may continue without them. docs/moe-failures.md has the rule.
    """


def to_go_on_with(error: WaitTimeout | PeerFailed, how: str) -> WaitTimeout | PeerFailed:
    """The error of a wait, for a call of which a part is done. how: what to call instead of it."""
    if isinstance(error, WaitTimeout):
        return WaitTimeout(f"{error}. {how}")
    return error if error.has_left else PeerFailed(f"{error}. {how}", rank=error.rank, has_left=False)


def masked_out() -> MaskedOut:
    """The error for a rank that the others have masked."""
    text = "the other ranks lost sight of this one and go on without it. Next: make a new AllToAll"
    return MaskedOut(text, op="moe", status="peer-lost")

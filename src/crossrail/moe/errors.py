"""What dispatch and combine raise beside the errors of the engine."""

from __future__ import annotations

from crossrail.errors import CrossrailError


class CapacityExceeded(CrossrailError):
    """A round has more rows for a rank than capacity_factor left room for. Raised on every rank alike, before any row
    of the round is written; the next round is as good as ever.

    rank: one that has too little room; needed, there: rows of its output (layout "masked": of one expert).
    """

    def __init__(self, message: str, *, rank: int, needed: int, there: int) -> None:
        super().__init__(message)
        self.rank = rank
        self.needed = needed
        self.there = there

"""What crossrail.kv raises beside what the engine does."""

from __future__ import annotations

from crossrail.errors import CrossrailError, UsageError


class LayoutMismatch(UsageError):
    """Two instances whose KV cannot be exchanged: they do not run the same model, or keep it in other numbers."""


class DuplicateRequest(UsageError):
    """A request of this name is under way already."""


class PagesInUse(UsageError):
    """The pages may still be written or read by somebody: what was asked would let two requests share them."""


class NoPages(CrossrailError):
    """Too few pages are free now. wanted, available: pages."""

    def __init__(self, message: str, wanted: int, available: int) -> None:
        super().__init__(message)
        self.wanted = wanted
        self.available = available


class TransferStopped(CrossrailError):
    """The transfer of a request was cancelled before it was complete."""


class SurplusCount(CrossrailError):
    """More counts came than a request's plan makes: two wrote it, or one with another plan."""

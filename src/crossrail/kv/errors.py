"""What crossrail.kv raises beside what the engine does."""

from __future__ import annotations

from crossrail.errors import CrossrailError, UsageError


class LayoutMismatch(UsageError):
    """Two instances cannot exchange KV: they run different models, or store KV in different number formats."""


class DuplicateRequest(UsageError):
    """A request of this name is already in progress."""


class PagesInUse(UsageError):
    """Somebody may still write or read the pages: the call would let two requests share them."""


class NoPages(CrossrailError):
    """Too few pages are free. why: without the request's name. wanted, available: numbers of pages."""

    def __init__(self, request: str, why: str, wanted: int, available: int) -> None:
        super().__init__(f"request {request!r}: {why}")
        self.why = why
        self.wanted = wanted
        self.available = available


class TransferStopped(CrossrailError):
    """The transfer of a request was cancelled before it was complete."""


class SurplusCount(CrossrailError):
    """More counts arrived than the request's plan makes: two prefillers wrote it, or one with another plan."""

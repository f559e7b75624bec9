"""Errors that users of crossrail.kv may see, in addition to those of the engine.

Errors that one of its parts raises for another one, and nobody else sees, stand with these parts.
"""

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
    """The transfer of a request was cancelled before it was complete, or its writer was shut out."""


class SurplusCount(CrossrailError):
    """More counts arrived than the request's plan makes: two prefillers wrote it, or one with another plan."""


class RouterNotFound(CrossrailError):
    """Nobody answers at its URL, or not as a router does."""


class NodeRefused(CrossrailError):
    """A router does not take this node, and will not: the words say why."""


class Superseded(CrossrailError):
    """Another process has its record in etcd under our name."""


class Overloaded(CrossrailError):
    """No room now: ask again later. HTTP 429."""


class Unavailable(CrossrailError):
    """There is no node that could do it. HTTP 503."""


class UnknownModel(CrossrailError):
    """No node has this model, nor had it lately. HTTP 404."""


class RequestFailed(CrossrailError):
    """The request ended unfinished; the message says why. HTTP 502."""

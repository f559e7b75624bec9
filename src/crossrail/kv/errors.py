"""Errors that users of crossrail.kv may see, in addition to the engine's.

Errors that are raised and handled within the package are defined next to the code that raises them.
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
    """Not enough pages are free. why: the message without the request's name. wanted, available: numbers of pages."""

    def __init__(self, request: str, why: str, wanted: int, available: int) -> None:
        super().__init__(f"request {request!r}: {why}")
        self.why = why
        self.wanted = wanted
        self.available = available


class TransferStopped(CrossrailError):
    """The transfer of a request was cancelled before it was complete, or its writer was shut out."""


class SurplusCount(CrossrailError):
    """More counts arrived than the request's plan makes: two prefillers wrote it, or one followed another plan."""


class RouterNotFound(CrossrailError):
    """Nobody answers at the router's URL, or what answers is not a router."""


class NodeRefused(CrossrailError):
    """The router refuses this node for good; the message says why."""


class Superseded(CrossrailError):
    """Another process has registered its record in etcd under our name."""


class Overloaded(CrossrailError):
    """There is no room at present: ask again later. HTTP 429."""


class Unavailable(CrossrailError):
    """There is no node that could serve the request. HTTP 503."""


class UnknownModel(CrossrailError):
    """No node has this model, nor had it recently. HTTP 404."""


class RequestFailed(CrossrailError):
    """The request ended unfinished; the message says why. HTTP 502."""

"""One request at a decoder: its state, and how it is told to stop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from crossrail.control.deadlines import first_of
from crossrail.errors import CrossrailError
from crossrail.kv import messages as m
from crossrail.kv.model import Tokens
from crossrail.kv.nodes.router_link import RouterLink
from crossrail.kv.timeline import Timeline
from crossrail.kv.transfer.prefix import NO_NAMES, PageNames
from crossrail.kv.transfer.reception import Reception

_T = TypeVar("_T")


class Stopped(CrossrailError):
    """The request is not wanted any more, or its time is up."""

    def __init__(self, reason: m.EndReason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class PrefillerGone(CrossrailError):
    """This attempt has failed, and its pages are quiet or quarantined. Another one may follow.

    busy: as in DispatchRefused.
    """

    def __init__(self, why: str, busy: bool = False) -> None:
        super().__init__(why)
        self.busy = busy


@dataclass
class Serving:
    """A request that this decoder runs.

    Invariant: `tokens` only grows, until `end` is set, once; its router has acknowledged the first `taken` of them.

    context: the client's prompt and what earlier decoders have generated; the latter are the first of `tokens` too.
    names: of the context's pages that a prefiller fills, until it has ended. router: address that placed it here; link:
    where its tokens go, which is the next router at that URL if this one is gone. is_unwanted: its router has cancelled
    it, or said so in reply to tokens: that router knows how it ends, and a later one need not. placement: as in Start.
    reception: of the current attempt; None: it has no pages now, because they were released while it waits for another
    prefiller, or are quarantined. lacks_pages: it waits for pages again. is_decoding: the model runs it. handed_over:
    it has ended here, but the model still uses its pages. goes_elsewhere: another decoder may continue it.
    """

    request: str
    link: RouterLink
    router: bytes
    placement: int
    context: Tokens
    sampling: m.Sampling
    timeline: Timeline
    reception: Reception | None
    names: PageNames
    traceparent: str = ""  # of its span at this node
    tokens: list[int] = field(default_factory=list)
    end: m.End | None = None
    taken: int = 0
    end_taken: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    stop_wanted: asyncio.Event = field(default_factory=asyncio.Event)
    is_unwanted: bool = False
    lacks_pages: bool = False
    is_decoding: bool = False
    handed_over: asyncio.Event = field(default_factory=asyncio.Event)
    goes_elsewhere: bool = False
    _stop: Stopped | None = None

    @property
    def left(self) -> int:
        """Tokens that may still be generated."""
        return self.sampling.max_tokens - len(self.tokens)

    @property
    def is_told(self) -> bool:
        """Its router has acknowledged all of it, and wanted it. Requests that are not wanted end without that."""
        return self.end_taken and self.taken == len(self.tokens) and self._stop is None

    @property
    def has_news(self) -> bool:
        """Its router has yet to acknowledge tokens, or its end if it has one."""
        return not self.end_taken and (self.taken < len(self.tokens) or self.end is not None)

    def stop(self, reason: m.EndReason, detail: str) -> None:
        """Ends the request as soon as possible. Only the first reason counts."""
        if self._stop is None:
            self._stop = Stopped(reason, detail)
        self.stop_wanted.set()

    def hand_over(self, why: str) -> bool:
        """Ends it here without waiting for the hung model. Returns whether another decoder should continue: not if it
        was about to end anyway.
        """
        if self.handed_over.is_set():
            return False
        self.handed_over.set()
        return self.go_elsewhere(why)

    def go_elsewhere(self, why: str) -> bool:
        """Ends it here as soon as possible. Returns whether another decoder should continue: not if it was about to end
        anyway.
        """
        if self._stop is not None:
            return False
        self.goes_elsewhere = True
        self.stop("error", why)
        return True

    @contextmanager
    def decoding(self) -> Iterator[None]:
        self.is_decoding = True
        try:
            yield
        finally:
            self.is_decoding = False

    def raise_if_stopped(self) -> None:
        if self._stop is not None:
            raise self._stop

    async def unless_stopped(self, work: Awaitable[_T]) -> _T:
        """The result of this work; Stopped, and the work cancelled, if the request is stopped first."""
        working = asyncio.ensure_future(work)
        stopping = asyncio.ensure_future(self.stop_wanted.wait())
        await first_of([working, stopping])
        self.raise_if_stopped()
        return working.result()

    def add(self, token: int) -> None:
        """Adds one more token."""
        self.tokens.append(token)
        self.changed.set()

    def finish(self, end: m.End) -> None:
        """The request has ended, and its pages are released."""
        self.end = end
        self.names = NO_NAMES
        self.changed.set()

    def offer_again(self) -> None:
        """Its router was restarted, and knows nothing of the request: reports everything again."""
        self.taken = 0
        self.end_taken = False
        self.changed.set()

"""What a router knows of each request, and how requests end."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from dataclasses import dataclass, field

import numpy as np

from crossrail.errors import CrossrailError
from crossrail.kv import messages as m
from crossrail.kv.membership import Member
from crossrail.kv.model import Tokens

_ADOPTIONS_KEPT = 4096
_ENDS_KEPT = 16384
_TIMELINES_KEPT = 256


class Overloaded(CrossrailError):
    """No room now: ask again later. HTTP 429."""


class Unavailable(CrossrailError):
    """There is no node that could do it. HTTP 503."""


class UnknownModel(CrossrailError):
    """No node has this model, nor had it lately. HTTP 404."""


class RequestFailed(CrossrailError):
    """It ended without being finished; the words say why. HTTP 502."""


@dataclass(frozen=True)
class Chunk:
    """Tokens that came together, and the end, if this is the last. model: that of the decoder that sent them."""

    tokens: list[int]
    end: m.End | None = None
    model: str = ""


@dataclass
class Running:
    """A request that a client waits for.

    Invariant: `tokens` were put into `chunks`, each once and in order; only the last chunk has an end.
    model: that of whoever has generated tokens; before, the one that was asked for, if one was.
    placement: number of the first attempt at a prefiller since its decoder has it; only that decoder's words about that
    placement count.
    """

    request: str
    prompt: Tokens
    sampling: m.Sampling
    names: list[bytes]  # of its full pages, for matching prefixes
    deadline_s: float  # on the event loop's clock
    model: str | None = None
    decoder: Member | None = None
    prefiller: Member | None = None
    attempt: int = 1
    placement: int = 1
    restarts: int = 0  # decoders that died
    failed: set[int] = field(default_factory=set)  # attempts since it was placed, but for those that found no room
    # Of the latest, if no other has come between: since when (later by what was no wait for room), and when each
    # prefiller said so last, by its address.
    no_room_s: float | None = None
    full: dict[bytes, float] = field(default_factory=dict)
    reassigned_s: float | None = None  # since when its decoder may ask another, and waits for pages, maybe, before
    traceparent: str = ""
    tokens: list[int] = field(default_factory=list)
    is_charged: bool = False  # counted among what its decoder has to do
    ended: bool = False
    end: m.End | None = None  # as the client was told
    chunks: asyncio.Queue[Chunk] = field(default_factory=asyncio.Queue)

    @property
    def context(self) -> Tokens:
        """The prompt and all that follows it by now."""
        return np.concatenate([self.prompt, np.array(self.tokens, np.int32)])

    def is_placed(self, decoder: bytes, placement: int) -> bool:
        """Whether this is the decoder that has it now, and speaks of that and no earlier time."""
        return self.decoder is not None and (self.decoder.address, self.placement) == (decoder, placement)

    def waits_at(self, decoder: bytes, placement: int) -> bool:
        """The same, while somebody waits for its tokens."""
        return not self.ended and self.is_placed(decoder, placement)

    def note_room(self) -> None:
        """An attempt did not fail for want of room: what did before it says nothing any more."""
        self.no_room_s = self.reassigned_s = None
        self.full.clear()

    def note_full(self, prefiller: bytes, now_s: float) -> float:
        """This one had no room. Returns how long the request has waited for one that has, which is the time that the
        router took to name another each time, and not the time until that one was asked.
        """
        if self.no_room_s is None:
            self.no_room_s = now_s
        elif self.reassigned_s is not None:
            self.no_room_s += now_s - self.reassigned_s
        self.reassigned_s = None
        self.full[prefiller] = now_s
        return now_s - self.no_room_s

    def take(self, first: int, tokens: list[int], end: m.End | None) -> None:
        """What a decoder sent. What is here already is passed over; a gap cannot be, since decoders send in order."""
        if self.ended:
            return
        if first > len(self.tokens):
            self.finish("error", f"tokens {len(self.tokens)}..{first - 1} never came")
            return
        fresh = tokens[len(self.tokens) - first :]
        self.tokens += fresh
        self.ended = end is not None
        if fresh or end is not None:
            model = self.decoder.record.model if self.decoder is not None else ""
            self.chunks.put_nowait(Chunk(fresh, end, model))

    def finish(self, reason: m.EndReason, detail: str) -> None:
        """Ends it from this side."""
        if not self.ended:
            self.ended = True
            self.chunks.put_nowait(Chunk([], m.End(reason, m.clipped(detail))))


@dataclass
class Adopted:
    """A request that a decoder still runs for a router that is no more. Kept for whoever asks by its name.

    running: since its decoder has asked for a prefiller; it says which had no room, and since when.
    """

    decoder: bytes
    tokens: list[int] = field(default_factory=list)
    end: m.End | None = None
    running: Running | None = None

    def take(self, first: int, tokens: list[int], end: m.End | None) -> None:
        if first <= len(self.tokens):  # what is here already may come again, and late: then it is no more than is here
            self.tokens += tokens[len(self.tokens) - first :]
        self.end = end or self.end


class Adoptions:
    """Adopted requests, the oldest given up first, whether ended or not."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, Adopted] = OrderedDict()

    def get(self, request: str) -> Adopted | None:
        return self._requests.get(request)

    def add(self, request: str, decoder: bytes) -> None:
        self._requests[request] = Adopted(decoder)
        while len(self._requests) > _ADOPTIONS_KEPT:
            self._requests.popitem(last=False)


class Ends:
    """How requests ended, the oldest forgotten first; the latest few hundred with their timelines."""

    def __init__(self) -> None:
        self._ends: OrderedDict[str, m.End] = OrderedDict()
        self._with_timeline: deque[str] = deque()

    def get(self, request: str) -> m.End | None:
        return self._ends.get(request)

    def keep(self, request: str, end: m.End) -> None:
        self._ends[request] = end
        self._with_timeline.append(request)
        if len(self._with_timeline) > _TIMELINES_KEPT:
            stripped = self._with_timeline.popleft()
            self._ends[stripped] = m.End(self._ends[stripped].reason, self._ends[stripped].detail)
        while len(self._ends) > _ENDS_KEPT:
            self._ends.popitem(last=False)

"""What a router knows of each request, and how requests end."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from crossrail._latest import Latest
from crossrail.kv import messages as m
from crossrail.kv.model import Tokens
from crossrail.kv.router.membership import Member

_ENDS_KEPT = 16384
_TIMELINES_KEPT = 256


@dataclass(frozen=True)
class Chunk:
    """Tokens that arrived together, and the end if this is the last chunk. model: of the decoder that sent them."""

    tokens: list[int]
    end: m.End | None = None
    model: str = ""


class Chunks:
    """Tokens that have arrived and the client has not taken yet, merged into one Chunk, so that a slow client costs
    nothing but the tokens. Threads: the event loop's; one waits at a time.
    """

    def __init__(self) -> None:
        self._waiting: Chunk | None = None
        self._news: asyncio.Future[None] | None = None
        self._is_over = False

    def put(self, chunk: Chunk) -> None:
        """Takes ownership of the chunk's list of tokens."""
        if (before := self._waiting) is not None:
            before.tokens.extend(chunk.tokens)
            chunk = Chunk(before.tokens, chunk.end, chunk.model or before.model)
        self._waiting = chunk
        self._wake()

    def time_is_up(self) -> None:
        """Stops waiting for what has not arrived yet."""
        self._is_over = True
        self._wake()

    async def take(self) -> Chunk | None:
        """Everything that has arrived, as soon as there is something. None: after time_is_up()."""
        while self._waiting is None:
            if self._is_over:
                return None
            self._news = asyncio.get_running_loop().create_future()
            await self._news
        chunk, self._waiting = self._waiting, None
        return chunk

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)


@dataclass
class Running:
    """A request that a client waits for.

    Invariant: `tokens` were put into `chunks`, each once and in order; only the last chunk has an end. model: that of
    the decoder that has generated tokens; before, the one that was asked for, if any. placement: number of the first
    attempt at a prefiller under its present decoder; only that decoder's messages about that placement count. came_s,
    waits_s: when it arrived, and since when it waits for a decoder, on the event loop's clock.
    """

    request: str
    prompt: Tokens
    sampling: m.Sampling
    names: list[bytes]  # of its full blocks, for matching prefixes
    deadline_at_s: float  # on the event loop's clock
    model: str | None = None
    number: int = 0  # in order of arrival
    came_s: float = 0.0
    waits_s: float = 0.0
    decoder: Member | None = None
    prefiller: Member | None = None
    attempt: int = 1
    placement: int = 1
    restarts: int = 0  # decoders that died
    # Attempts since it was placed, except those that found no room: their prefillers' addresses; and by prefiller's
    # address, when it failed last.
    failed: dict[int, bytes] = field(default_factory=dict)
    failed_s: dict[bytes, float] = field(default_factory=dict)
    # About the latest attempts, if they all found no room: since when (excluding time not spent waiting for room), and
    # by prefiller's address, when it said so last.
    no_room_s: float | None = None
    full: dict[bytes, float] = field(default_factory=dict)
    # Since when its decoder may ask another prefiller, possibly after waiting for pages.
    reassigned_s: float | None = None
    traceparent: str = ""
    tokens: list[int] = field(default_factory=list)
    is_charged: bool = False  # counted in its decoder's load
    # Set if the decoder has handed the request back before its acceptance arrived: the reason.
    given_up: str | None = None
    ended: bool = False
    end: m.End | None = None  # as told to the client
    chunks: Chunks = field(default_factory=Chunks)

    @property
    def context(self) -> Tokens:
        """The prompt and all tokens generated so far."""
        return np.concatenate([self.prompt, np.array(self.tokens, np.int32)])

    @property
    def prefill_tokens(self) -> int:
        """Tokens for a prefiller to run: all of the context but the last, which the decoder runs."""
        return max(len(self.prompt) + len(self.tokens) - 1, 0)

    def is_placed(self, decoder: bytes, placement: int) -> bool:
        """Whether this decoder has the request now, under this placement."""
        return self.decoder is not None and (self.decoder.address, self.placement) == (decoder, placement)

    def waits_at(self, decoder: bytes, placement: int) -> bool:
        """is_placed(), and somebody still waits for its tokens."""
        return not self.ended and self.is_placed(decoder, placement)

    def offer_to(self, decoder: Member) -> None:
        """Begins a placement."""
        self.decoder, self.placement = decoder, self.attempt
        self.failed.clear()
        self.failed_s.clear()
        self.given_up = None
        self.note_room()

    def note_room(self) -> None:
        """An attempt got room: earlier refusals for lack of room no longer matter."""
        self.no_room_s = self.reassigned_s = None
        self.full.clear()

    def note_failed(self, attempt: int, prefiller: bytes, now_s: float) -> None:
        """This attempt's prefiller was lost or failed."""
        self.note_room()
        self.failed[attempt] = prefiller
        self.failed_s[prefiller] = now_s

    def note_full(self, prefiller: bytes, now_s: float) -> float:
        """This prefiller had no room. Returns how long the request has waited for one that has, counting only the time
        that the router took to name another prefiller, not the time until the decoder asked that one.
        """
        if self.no_room_s is None:
            self.no_room_s = now_s
        elif self.reassigned_s is not None:
            self.no_room_s += now_s - self.reassigned_s
        self.reassigned_s = None
        self.full[prefiller] = now_s
        return now_s - self.no_room_s

    def take(self, first: int, tokens: list[int], end: m.End | None) -> None:
        """Adds what a decoder sent. Known tokens are skipped; there can be no gap, since decoders send in order."""
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
            self.chunks.put(Chunk(fresh, end, model))

    def finish(self, reason: m.EndReason, detail: str) -> None:
        """Ends the request from the router's side."""
        if not self.ended:
            self.ended = True
            self.chunks.put(Chunk([], m.End(reason, m.clipped(detail))))


class Ends:
    """How requests ended, oldest forgotten first; the latest few hundred keep their timelines."""

    def __init__(self) -> None:
        self._ends: Latest[str, m.End] = Latest(_ENDS_KEPT)
        self._with_timeline: deque[str] = deque()

    def get(self, request: str) -> m.End | None:
        return self._ends.get(request)

    def keep(self, request: str, end: m.End) -> None:
        self._ends[request] = end
        self._with_timeline.append(request)
        if len(self._with_timeline) > _TIMELINES_KEPT:
            stripped = self._with_timeline.popleft()
            self._ends[stripped] = m.End(self._ends[stripped].reason, self._ends[stripped].detail)

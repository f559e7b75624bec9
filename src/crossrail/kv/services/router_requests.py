"""What a router knows of each request, and how requests end."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from crossrail._latest import Latest
from crossrail.kv import messages as m
from crossrail.kv.model import Tokens
from crossrail.kv.services.membership import Member

# Of those that have ended, for each decoder: what it keeps, which is 4096 whose end a router has taken and 4096 others.
_ADOPTIONS_KEPT = 8192
_GONE = b""  # no decoder's address
_ENDS_KEPT = 16384
_TIMELINES_KEPT = 256


@dataclass(frozen=True)
class Chunk:
    """Tokens that came together, and the end, if this is the last. model: that of the decoder that sent them."""

    tokens: list[int]
    end: m.End | None = None
    model: str = ""


class Chunks:
    """What has come of a request and its client has not taken yet, as one Chunk: however slow he is, it does not grow
    but by its tokens. Threads: the event loop's; one waits at a time.
    """

    def __init__(self) -> None:
        self._waiting: Chunk | None = None
        self._news: asyncio.Future[None] | None = None
        self._is_over = False

    def put(self, chunk: Chunk) -> None:
        """Owner of its list of tokens: this."""
        if (before := self._waiting) is not None:
            before.tokens.extend(chunk.tokens)
            chunk = Chunk(before.tokens, chunk.end, chunk.model or before.model)
        self._waiting = chunk
        self._wake()

    def time_is_up(self) -> None:
        """Nobody waits any longer for what is not here yet."""
        self._is_over = True
        self._wake()

    async def take(self) -> Chunk | None:
        """All that is here, as soon as something is. None: time_is_up()."""
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

    Invariant: `tokens` were put into `chunks`, each once and in order; only the last chunk has an end.
    model: that of whoever has generated tokens; before, the one that was asked for, if one was.
    placement: number of the first attempt at a prefiller since its decoder has it; only that decoder's words about that
    placement count.
    came_s, waits_s: when it came, and since when it waits for a decoder, on the event loop's clock.
    """

    request: str
    prompt: Tokens
    sampling: m.Sampling
    names: list[bytes]  # of its full pages, for matching prefixes
    deadline_at_s: float  # on the event loop's clock
    model: str | None = None
    number: int = 0  # in the order in which requests came
    came_s: float = 0.0
    waits_s: float = 0.0
    decoder: Member | None = None
    prefiller: Member | None = None
    attempt: int = 1
    placement: int = 1
    restarts: int = 0  # decoders that died
    # Attempts since it was placed, but for those that found no room: the addresses of their prefillers, and when each
    # prefiller failed last, by its address.
    failed: dict[int, bytes] = field(default_factory=dict)
    failed_s: dict[bytes, float] = field(default_factory=dict)
    # Of the latest, if no other has come between: since when (later by what was no wait for room), and when each
    # prefiller said so last, by its address.
    no_room_s: float | None = None
    full: dict[bytes, float] = field(default_factory=dict)
    reassigned_s: float | None = None  # since when its decoder may ask another, and waits for pages, maybe, before
    traceparent: str = ""
    tokens: list[int] = field(default_factory=list)
    is_charged: bool = False  # counted among what its decoder has to do
    given_up: str | None = None  # why its decoder, whose answer has not come yet, wants another one to go on
    ended: bool = False
    end: m.End | None = None  # as the client was told
    chunks: Chunks = field(default_factory=Chunks)

    @property
    def context(self) -> Tokens:
        """The prompt and all that follows it by now."""
        return np.concatenate([self.prompt, np.array(self.tokens, np.int32)])

    @property
    def prefill_tokens(self) -> int:
        """That a prefiller is to run: the last one of the context is its decoder's."""
        return max(len(self.prompt) + len(self.tokens) - 1, 0)

    def is_placed(self, decoder: bytes, placement: int) -> bool:
        """Whether this is the decoder that has it now, and speaks of that and no earlier time."""
        return self.decoder is not None and (self.decoder.address, self.placement) == (decoder, placement)

    def waits_at(self, decoder: bytes, placement: int) -> bool:
        """The same, while somebody waits for its tokens."""
        return not self.ended and self.is_placed(decoder, placement)

    def offer_to(self, decoder: Member) -> None:
        """A placement begins."""
        self.decoder, self.placement = decoder, self.attempt
        self.failed.clear()
        self.failed_s.clear()
        self.given_up = None
        self.note_room()

    def note_room(self) -> None:
        """An attempt did not fail for want of room: what did before it says nothing any more."""
        self.no_room_s = self.reassigned_s = None
        self.full.clear()

    def note_failed(self, attempt: int, prefiller: bytes, now_s: float) -> None:
        """This one was lost, or failed."""
        self.note_room()
        self.failed[attempt] = prefiller
        self.failed_s[prefiller] = now_s

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
            self.chunks.put(Chunk(fresh, end, model))

    def finish(self, reason: m.EndReason, detail: str) -> None:
        """Ends it from this side."""
        if not self.ended:
            self.ended = True
            self.chunks.put(Chunk([], m.End(reason, m.clipped(detail))))


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
    """Adopted requests. Of what has ended those are given up that ended first, of each decoder by itself; what runs is
    not, or its decoder would hear that nobody wants it. Decoders that are gone count as one, and theirs as ended.

    Invariant: each name in _ended is in _requests; it is in one of them once.
    """

    def __init__(self) -> None:
        self._requests: dict[str, Adopted] = {}
        self._ended: dict[bytes, dict[str, None]] = {}  # by decoder, for each that has joined with some

    def get(self, request: str) -> Adopted | None:
        return self._requests.get(request)

    def add(self, request: str, decoder: bytes, has_ended: bool) -> None:
        """A decoder that joins has it, maybe again. Of two that have one name the first stays."""
        adopted = self._requests.setdefault(request, Adopted(decoder))
        if adopted.decoder != decoder:
            return
        ended = self._ended.setdefault(decoder, {})
        self._ended.get(_GONE, {}).pop(request, None)
        if has_ended:
            self._end(request, ended)
        else:
            ended.pop(request, None)

    def take(self, request: str, decoder: bytes, first: int, tokens: list[int], end: m.End | None) -> bool:
        """As Adopted.take(). False: it is not known, or not of this decoder."""
        adopted = self._requests.get(request)
        if adopted is None or adopted.decoder != decoder:
            return False
        adopted.take(first, tokens, end)
        if end is not None and decoder in self._ended:
            self._ended.get(_GONE, {}).pop(request, None)
            self._end(request, self._ended[decoder])
        return True

    def as_running(self, lost: m.PrefillerLost, decoder: Member) -> Running | None:
        """As far as choosing another prefiller goes: nothing is known of its prompt. None: this decoder has no such."""
        adopted = self._requests.get(lost.request)
        if adopted is None or adopted.decoder != decoder.address:
            return None
        if adopted.running is None or adopted.running.placement != lost.placement:
            nothing = np.zeros(0, np.int32)
            adopted.running = Running(lost.request, nothing, m.Sampling(), [], math.inf, placement=lost.placement)
        adopted.running.decoder = decoder
        return adopted.running

    def on_gone(self, decoder: bytes) -> None:
        """Nobody says how its requests end, unless it joins again."""
        ended = self._ended.pop(decoder, None)
        if ended is None:
            return
        running = [name for name, adopted in self._requests.items() if adopted.decoder == decoder and name not in ended]
        for request in (*ended, *running):
            self._end(request, self._ended.setdefault(_GONE, {}))

    def _end(self, request: str, ended: dict[str, None]) -> None:
        ended.setdefault(request)
        if len(ended) > _ADOPTIONS_KEPT:
            first = next(iter(ended))
            del ended[first], self._requests[first]


class Ends:
    """How requests ended, the oldest forgotten first; the latest few hundred with their timelines."""

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

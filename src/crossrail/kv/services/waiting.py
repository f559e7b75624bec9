"""Requests that wait for a decoder, in order of arrival, and which of them is offered to which decoder next.

Life of one here:
1. it comes: behind all that came before it. One that comes again, since its decoder died, has its old place.
2. its turn: it is the first in this order for which a decoder may have room, and is offered to that one; to the best if
   there are several. So no request that needs as much room comes before it; a smaller one does, where there is too
   little room for this one.
3. refused: it keeps its place. What it was refused for is believed until that decoder has news: nothing that needs as
   much room is offered there meanwhile, but one now and then, to see: after a while, and at a heartbeat without news.
4. for half of its time smaller ones pass it. Then a decoder is kept for it (Placement.keep).
5. it goes: it was taken, or its time is up.

What happens costs what it changes, however many wait: a decoder that has news is looked at for all who wait, and who
comes, or was refused, is looked at for all decoders. Those that nothing happened to are not looked at again.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from bisect import insort
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import attrgetter

from crossrail.control.deadlines import loop_time_s, set_in_time
from crossrail.kv.messages import Load
from crossrail.kv.services.membership import Member, Membership
from crossrail.kv.services.placement import Placement, weight
from crossrail.kv.services.router_requests import Running

_LOOK_S = 0.2  # what nobody tells is seen by then: a time that is up
_LAST_LOOK_S = 0.01  # of one whose time is up, and that was not offered yet to all that may have room
# How long a refusal is believed if the decoder says nothing else, and that again each time, up to the longest: less
# than what a decoder keeps room for without a word (_KEPT_S there).
_REFUSED_S, _REFUSED_S_MAX = 0.2, 0.6
# To one decoder at a time. Once it has refused one: one, and one more for each that it takes behind another, since who
# is offered to one that is full misses his turn at another one meanwhile.
_OFFERS, _OFFERS_MAX = 8, 64

_TRIES = 3  # of one, then of all
# Decoders that refused the last that they were offered: which is the best matters little, if one has room.
_COMPARED = 8
_TRIED_AT_ONCE = 16  # decoders, after a while, beside those that are kept: these are to hear of it

_number_of = attrgetter("number")
_Kind = tuple[str, int]


@dataclass(frozen=True)
class Refusal:
    """By a decoder, or instead of it. for_s: how long that is believed if it says nothing else; None: as usual."""

    why: str
    for_s: float | None = None


@dataclass
class KnownRoom:
    """What a decoder has room for, as far as it has said so.

    refused_tokens: the least that it had no room for since it had news. is_tried: one is offered all the same, to see.
    until_s: when that is to be, on the event loop's clock. offers: on their way to it, and how many may be.
    """

    refused_tokens: float = math.inf
    said: str = ""
    is_tried: bool = False
    until_s: float = math.inf
    offers: int = 0
    offers_max: int = _OFFERS
    _pause_s: float = _REFUSED_S
    _taken_in_a_row: int = 0
    _tries: int = 0  # since the last news

    def may_take(self, tokens: int) -> bool:
        """It has not refused one that needs no more room, or is to be tried."""
        return tokens < self.refused_tokens or self.is_tried

    def offered(self) -> None:
        """One is on its way."""
        self.offers += 1
        self.is_tried = False

    def refused(self, tokens: int, refusal: Refusal, now_s: float) -> None:
        """The decoder has no room for so many."""
        self.refused_tokens = min(self.refused_tokens, tokens)
        self.said = refusal.why
        self.until_s = now_s + (self._pause_s if refusal.for_s is None else refusal.for_s)
        self._pause_s = min(2 * self._pause_s, _REFUSED_S_MAX)
        self.offers_max, self._taken_in_a_row = 1, 0

    def taken(self, tokens: int) -> None:
        """The decoder had room for so many."""
        if tokens >= self.refused_tokens:
            self.news()
        self._pause_s = _REFUSED_S
        self._taken_in_a_row += 1
        self.offers_max = min(max(self.offers_max, self._taken_in_a_row), _OFFERS_MAX)

    def news(self) -> None:
        """The decoder may have more room than before."""
        self.refused_tokens = self.until_s = math.inf
        self._tries = 0

    def try_one(self) -> None:
        """The decoder may have more room, though nothing says so."""
        self.is_tried = self.refused_tokens < math.inf

    def try_again(self) -> None:
        """The same, once a refusal was believed for long; now and then for all, since the one may be the largest."""
        self._tries += 1
        if self._tries == _TRIES:
            self.news()
        self.try_one()
        self.until_s = math.inf


@dataclass(eq=False)
class Waiter:
    """A request that waits. decoder: that it is offered to now. keep_at_s: from when on one is kept for it, on the
    event loop's clock. room_tokens: that it needed room for when it was offered, before its own were known to be there.
    why: what it was refused for last.
    """

    running: Running
    keep_at_s: float
    decoder: Member | None = None
    room: KnownRoom | None = None  # there, while it is offered to it
    room_tokens: int = 0
    why: str = ""
    has_turn: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.number = self.running.number
        self.tokens = weight(self.running)
        self.prefill_tokens = self.running.prefill_tokens
        self.first_name = self.running.names[0] if self.running.names else None


class Waiting:
    """Threads: the event loop's.

    Invariant: a decoder that may take one of `_idle`, and has no offer too many on its way, is in `_open`.
    Invariant: those that wait are in `_by_name`, and those of them that are offered to no decoder now in `_idle`.
    """

    def __init__(self, membership: Membership, placement: Placement) -> None:
        self._membership = membership
        self._placement = placement
        self._by_name: dict[str, Waiter] = {}
        self._idle: list[Waiter] = []  # by number
        self._seen: list[Member] = []  # decoders that the following are of
        self._there: dict[bytes, Member] = {}
        self._decode_tokens: dict[str | None, int] = {}  # by model, None: any: the most that one has pages for
        self._rooms: dict[bytes, KnownRoom] = {}
        self._open: dict[bytes, Member] = {}  # to be looked at
        self._prefill_tokens: dict[str, int] = {}  # by model: the longest prompt that a prefiller has pages for
        self._changed = asyncio.Event()

    @contextmanager
    def queued(self, running: Running, keep_at_s: float) -> Iterator[Waiter]:
        """The request waits for as long as the context lasts."""
        waiter = Waiter(running, keep_at_s)
        self._by_name[running.request] = waiter
        insort(self._idle, waiter, key=_number_of)
        self.prefillers_changed()
        self._look_for(waiter)
        try:
            yield waiter
        finally:
            self._withdraw(waiter)
            self._idle.remove(waiter)
            del self._by_name[running.request]

    async def turn(self, waiter: Waiter, give_up_s: float, grace_s: float) -> Member | None:
        """The decoder that it is to be offered to; None: it has ended, or it is give_up_s, and no decoder is left that
        may have room, or grace_s later. Followed by answered().
        """
        while not waiter.running.ended:
            if waiter.decoder is not None:
                return waiter.decoder
            left_s = give_up_s - loop_time_s()
            if left_s <= 0 and (left_s < -grace_s or not self._may_start(waiter)):
                return None
            waiter.has_turn.clear()
            await set_in_time(waiter.has_turn, left_s if left_s > 0 else _LAST_LOOK_S)
        return None

    def answered(self, waiter: Waiter, refusal: Refusal | None) -> None:
        """None: its decoder has taken it."""
        assert waiter.decoder is not None
        assert waiter.room is not None
        if refusal is None:
            waiter.room.taken(waiter.room_tokens)
            return  # and goes
        waiter.why = refusal.why
        waiter.room.refused(waiter.room_tokens, refusal, loop_time_s())
        self._withdraw(waiter)
        self._look_for(waiter)

    def end(self) -> None:
        """All that wait have ended, and see it at once: nothing else tells them when look() is no more."""
        for waiter in self._by_name.values():
            waiter.has_turn.set()

    def news(self, address: bytes) -> None:
        """This node may have more room than before. Of one that is no decoder nothing is known here."""
        self._decoders()
        if (member := self._there.get(address)) is not None:
            self._rooms[address].news()
            self._look_at(member)

    def heard(self, member: Member, before: Load) -> None:
        """The same, of a heartbeat, and what its load was before that: if it is the same, one may try."""
        now, address = member.load, member.address
        if member.record.role == "prefiller" and before.takes_requests != now.takes_requests:
            self.prefillers_changed()
        self._decoders()
        if address not in self._there:
            return
        if (before.requests, before.pages_free, before.takes_requests) == (
            now.requests,
            now.pages_free,
            now.takes_requests,
        ):
            self._rooms[address].try_one()
        else:
            self._rooms[address].news()
        self._look_at(member)

    def prefillers_changed(self) -> None:
        """One came, went, or is not what it was."""
        before, self._prefill_tokens = self._prefill_tokens, self._placement.prefill_tokens()
        if self._prefill_tokens != before:
            for member in self._decoders():
                self._look_at(member)

    def why_not(self, waiter: Waiter) -> str:
        """What is in its way, in words, if it was offered to no decoder."""
        running = waiter.running
        suiting = [member for member in self._decoders() if self._suits(waiter, member)]
        if not suiting:
            return self._why_none_suits(waiter)
        for member in suiting:
            if self._placement.is_kept(member, running):
                return f"node {member.name!r} is kept for a request that has waited longer"
            if not self._rooms[member.address].may_take(self._placement.room_at(member, running)):
                return self._rooms[member.address].said
        if any(other.number < waiter.number for other in self._by_name.values()):
            return "requests that came before have their turn first"
        return f"node {suiting[0].name!r} has not answered yet what it was offered"

    def _why_none_suits(self, waiter: Waiter) -> str:
        """Though there are decoders for its model that take requests: a larger one may come back, or drains."""
        taking = [m for m in self._decoders() if m.load.takes_requests and _has_model(waiter.running, m)]
        largest = max(taking, key=lambda member: member.tokens_max, default=None)
        if largest is None:
            return "no decoder takes requests"
        if waiter.tokens > largest.tokens_max:
            return (
                f"{waiter.tokens} tokens take {largest.layout.pages_of(waiter.tokens)} pages, and node "
                f"{largest.name!r}, the largest decoder that takes requests, has {largest.layout.pages}"
            )
        return (
            f"no decoder with pages for {waiter.tokens} tokens has a prefiller with pages for {waiter.prefill_tokens}"
        )

    def lacks_prefiller(self, waiter: Waiter) -> str:
        """The model for which there is none that has pages for its prompt, though there is a decoder; or empty."""
        models = [member.record.model for member in self._decoders() if _has_model(waiter.running, member)]
        has_one = any(self._prefill_tokens.get(model, 0) >= waiter.prefill_tokens for model in models)
        return models[0] if waiter.prefill_tokens and models and not has_one else ""

    async def run(self) -> None:
        """Gives turns, until cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            while (found := self._next()) is not None:
                waiter, member = found
                waiter.decoder, waiter.room = member, self._rooms[member.address]
                waiter.room_tokens = self._placement.room_at(member, waiter.running)
                waiter.room.offered()
                self._placement.offer(member, waiter.tokens)
                self._idle.remove(waiter)
                waiter.has_turn.set()
                await asyncio.sleep(0)  # others have theirs: a thousand may have come at once

    async def look(self) -> None:
        """Sees to what nobody tells, until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            self.prefillers_changed()
            now_s = loop_time_s()
            self._try_again(now_s)
            for waiter in self._idle:
                if waiter.running.ended:
                    waiter.has_turn.set()
            self._keep(now_s)

    def _try_again(self, now_s: float) -> None:
        """Decoders whose refusals were believed for long, those for the longest first."""
        over = [member for member in self._decoders() if self._rooms[member.address].until_s <= now_s]
        over.sort(key=lambda member: self._rooms[member.address].until_s)
        kept = [member for member in over if self._placement.kept_for(member) is not None]
        others = [member for member in over if self._placement.kept_for(member) is None]
        for member in [*kept, *others[:_TRIED_AT_ONCE]]:
            self._rooms[member.address].try_again()
            self._look_at(member)

    # --- whose turn it is ---

    def _next(self) -> tuple[Waiter, Member] | None:
        """The first that waits for whom there may be room, and where. What nobody can have is closed.

        Of decoders that were full some are compared; the others stay open, and have their own first later.
        """
        found: Waiter | None = None
        where: list[Member] = []
        full = 0
        first_suiting: dict[_Kind, int] = {}
        self._decoders()
        for member in list(self._open.values()):
            was_full = self._rooms[member.address].offers_max == 1
            if was_full and full == _COMPARED:
                continue
            waiter = self._first_at(member, first_suiting)
            if waiter is None:
                del self._open[member.address]
                continue
            full += was_full
            if found is None or waiter.number < found.number:
                found, where = waiter, [member]
            elif waiter is found:
                where.append(member)
        return None if found is None else (found, self._placement.best(where, found.running))

    def _first_at(self, member: Member, first_suiting: dict[_Kind, int]) -> Waiter | None:
        """first_suiting: in `_idle`, as far as it has been looked for: decoders of one kind pass over all before it."""
        room = self._rooms[member.address]
        if not member.load.takes_requests or room.offers >= room.offers_max:
            return None
        if (request := self._placement.kept_for(member)) is not None:
            only = self._by_name.get(request)
            if only is None or only.decoder is not None or not self._may_have(only, member, room):
                return None
            return only
        kind = _kind_of(member)
        if (first := first_suiting.get(kind)) is None:
            indices = (index for index, waiter in enumerate(self._idle) if self._suits(waiter, member))
            first = first_suiting[kind] = next(indices, len(self._idle))
        # Most are passed over here: they need as much room as one that was refused, and nothing of theirs is there.
        refused_tokens, names = math.inf if room.is_tried else room.refused_tokens, self._placement.names_at(member)
        for waiter in itertools.islice(self._idle, first, None):
            is_possible = waiter.tokens < refused_tokens or waiter.first_name in names
            if is_possible and self._may_have(waiter, member, room):
                return waiter
        return None

    def _may_have(self, waiter: Waiter, member: Member, room: KnownRoom) -> bool:
        return (
            not waiter.running.ended
            and self._suits(waiter, member)
            and (room.may_take(waiter.tokens) or room.may_take(self._placement.room_at(member, waiter.running)))
        )

    def _suits(self, waiter: Waiter, member: Member) -> bool:
        """However much room it has now. A decoder that has too few pages is asked if all have: it says so in words."""
        running = waiter.running
        return (
            member.load.takes_requests
            and _has_model(running, member)
            and (waiter.tokens <= member.tokens_max or waiter.tokens > self._decode_tokens.get(running.model, 0))
            and waiter.prefill_tokens <= self._prefill_tokens.get(member.record.model, 0)
        )

    def _may_start(self, waiter: Waiter) -> bool:
        """Some decoder may take it, once what is on its way there is answered."""
        return any(
            self._may_have(waiter, member, self._rooms[member.address])
            and not self._placement.is_kept(member, waiter.running)
            for member in self._decoders()
        )

    # --- what is to be looked at ---

    def _look_for(self, waiter: Waiter) -> None:
        """At all that may have room for it. Not at others, where all that wait would be looked at in vain."""
        for member in self._decoders():
            may_take = self._rooms[member.address].may_take(waiter.tokens)
            may_have = may_take or waiter.first_name in self._placement.names_at(member)
            if may_have and self._suits(waiter, member):
                self._look_at(member)

    def _look_at(self, member: Member) -> None:
        if self._idle:
            self._open[member.address] = member
            self._changed.set()

    def _withdraw(self, waiter: Waiter) -> None:
        """The request is not offered to its decoder any more, and another may be."""
        decoder, room = waiter.decoder, waiter.room
        if decoder is None or room is None:
            return
        waiter.decoder = waiter.room = None
        insort(self._idle, waiter, key=_number_of)
        room.offers -= 1
        self._placement.answered(decoder, waiter.tokens)
        if self._rooms.get(decoder.address) is room:  # else it is gone
            self._look_at(self._there[decoder.address])

    def _decoders(self) -> list[Member]:
        there = self._membership.members("decoder")
        if there is not self._seen:
            self._seen = there
            self._there = {member.address: member for member in there}
            before, self._rooms, self._open, self._decode_tokens = self._rooms, {}, {}, {}
            for member in there:
                self._rooms[member.address] = before.get(member.address) or KnownRoom()
                self._look_at(member)
                for model in (None, member.record.model):
                    self._decode_tokens[model] = max(self._decode_tokens.get(model, 0), member.tokens_max)
        return there

    def _keep(self, now_s: float) -> None:
        """A decoder for each that has waited long, in their order, as far as there are any."""
        there = [member for member in self._decoders() if member.load.takes_requests]
        having = {self._placement.kept_for(member) for member in there}
        free: dict[_Kind, list[Member]] = {}
        for member in there:
            if self._placement.kept_for(member) is None:
                free.setdefault(_kind_of(member), []).append(member)
        for waiter in self._idle:
            if not free:
                return
            running = waiter.running
            if now_s < waiter.keep_at_s or running.request in having or running.ended:
                continue
            suiting = [kind for kind, alike in free.items() if self._suits(waiter, alike[0])]
            if suiting:
                best = self._placement.best([member for kind in suiting for member in free[kind]], running)
                self._placement.keep(running, best)
                free[_kind_of(best)].remove(best)
                free = {kind: alike for kind, alike in free.items() if alike}
                self.news(best.address)  # it is to hear that it is kept


def _kind_of(decoder: Member) -> _Kind:
    """Those of one kind that take requests suit the same requests."""
    return decoder.record.model, decoder.tokens_max


def _has_model(running: Running, member: Member) -> bool:
    return running.model is None or running.model == member.record.model

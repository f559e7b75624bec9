"""Requests that wait for a decoder, in order of arrival, and which of them is offered to which decoder next.

Life of a waiting request:
1. it comes: queued behind all that came before it. One that returns because its decoder died gets its old place.
2. its turn: it is the first in this order for which some decoder may have room, and is offered to the best of
   these. So no later request that needs as much room overtakes it; a smaller one may, if there is too little room.
3. refused: it keeps its place. The refusal is believed until that decoder has news: nothing that needs as much room is
   offered there meanwhile, except for one probe now and then: after a while, and at a heartbeat without news.
4. for half of its time smaller ones overtake it. Then a decoder is kept for it (Placement.keep).
5. it goes: it was accepted, or its time is up.

The cost of an event depends on what it changes, not on how many wait: a decoder with news is checked against all
waiters, and a waiter that comes or was refused is checked against all decoders. Nothing else is checked again.
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
from crossrail.kv.router.known_room import KnownRoom, Refusal
from crossrail.kv.router.membership import Member, Membership
from crossrail.kv.router.placement import Placement, weight
from crossrail.kv.router.requests import Running

_LOOK_S = 0.2  # for noticing what no event announces: that time is up
_LAST_LOOK_S = 0.01  # for a request whose time is up, and that was not yet offered to all decoders that may have room
# Decoders to compare that refused their last offer: which one is best matters little if one of them has room.
_COMPARED = 8
_TRIED_AT_ONCE = 16  # decoders probed at once after a while, besides those that are kept, which have to learn that

_number_of = attrgetter("number")
_Kind = tuple[str, int]


@dataclass(eq=False)
class Waiter:
    """A waiting request. decoder: on offer there now. keep_at_s: from when on a decoder is kept for it, on the event
    loop's clock. room_tokens: room that it needed when it was offered, before its own pages were known to be cached
    there. why: the last refusal's reason.
    """

    running: Running
    keep_at_s: float
    decoder: Member | None = None
    room: KnownRoom | None = None  # of that decoder, while on offer there
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

    Invariant: a decoder that may accept one of `_idle`, and is not at its limit of offers, is in `_open`.

    Invariant: all waiters are in `_by_name`, and those that are not on offer to any decoder also in `_idle`.
    """

    def __init__(self, membership: Membership, placement: Placement) -> None:
        self._membership = membership
        self._placement = placement
        self._by_name: dict[str, Waiter] = {}
        self._idle: list[Waiter] = []  # by number
        self._seen: list[Member] = []  # the decoders for which the following fields were computed
        self._there: dict[bytes, Member] = {}
        # By model, None: any: tokens that the largest decoder has pages for.
        self._decode_tokens: dict[str | None, int] = {}
        self._rooms: dict[bytes, KnownRoom] = {}
        self._open: dict[bytes, Member] = {}  # still to be checked
        self._prefill_tokens: dict[str, int] = {}  # by model: the longest prompt that some prefiller has pages for
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
        """The decoder to offer it to; None: it has ended, or give_up_s has passed and either no decoder that may have
        room is left, or another grace_s. Must be followed by answered().
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
        """refusal None: its decoder has accepted the request."""
        assert waiter.decoder is not None
        assert waiter.room is not None
        if refusal is None:
            waiter.room.taken(waiter.room_tokens)
            return  # it goes
        waiter.why = refusal.why
        waiter.room.refused(waiter.room_tokens, refusal, loop_time_s())
        self._withdraw(waiter)
        self._look_for(waiter)

    def end(self) -> None:
        """Ends all waits at once: after look() has stopped nothing else would."""
        for waiter in self._by_name.values():
            waiter.has_turn.set()

    def news(self, address: bytes) -> None:
        """This node may have more room than before. Nodes that are not decoders are ignored."""
        self._decoders()
        if (member := self._there.get(address)) is not None:
            self._rooms[address].news()
            self._look_at(member)

    def heard(self, member: Member, before: Load) -> None:
        """A heartbeat; before: the previous load. News if the load has changed, otherwise one request may probe."""
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
        """A prefiller joined, left, or changed."""
        before, self._prefill_tokens = self._prefill_tokens, self._placement.prefill_tokens()
        if self._prefill_tokens != before:
            for member in self._decoders():
                self._look_at(member)

    def why_not(self, waiter: Waiter) -> str:
        """What prevents the request from being offered, in words, if it was offered to no decoder."""
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
        """For the case that decoders for its model accept requests: a larger one may come back, or is draining."""
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
        """The model for which no prefiller has enough pages for its prompt, though there is a decoder; or empty."""
        models = [member.record.model for member in self._decoders() if _has_model(waiter.running, member)]
        has_one = any(self._prefill_tokens.get(model, 0) >= waiter.prefill_tokens for model in models)
        return models[0] if waiter.prefill_tokens and models and not has_one else ""

    async def run(self) -> None:
        """Hands out turns, until cancelled."""
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
                await asyncio.sleep(0)  # let other tasks run: a thousand requests may have come at once

    async def look(self) -> None:
        """Notices what no event announces, until cancelled."""
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
        """Probes decoders whose refusals are old, the oldest first."""
        over = [member for member in self._decoders() if self._rooms[member.address].until_s <= now_s]
        over.sort(key=lambda member: self._rooms[member.address].until_s)
        kept = [member for member in over if self._placement.kept_for(member) is not None]
        others = [member for member in over if self._placement.kept_for(member) is None]
        for member in [*kept, *others[:_TRIED_AT_ONCE]]:
            self._rooms[member.address].try_again()
            self._look_at(member)

    # --- whose turn it is ---

    def _next(self) -> tuple[Waiter, Member] | None:
        """The first waiter for whom there may be room, and where. Closes decoders that nobody can use.

        Of the decoders that were full only some are compared; the others stay open for later turns.
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
        """first_suiting: per kind of decoder, the index in `_idle` of the first waiter that suits it, as far as it is
        known.
        """
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
        # Most are skipped here: they need as much room as one that was refused, and none of their pages are cached
        # there.
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
        """Regardless of its present room. If all decoders have too few pages, one is asked anyway: its refusal explains
        it.
        """
        running = waiter.running
        return (
            member.load.takes_requests
            and _has_model(running, member)
            and (waiter.tokens <= member.tokens_max or waiter.tokens > self._decode_tokens.get(running.model, 0))
            and waiter.prefill_tokens <= self._prefill_tokens.get(member.record.model, 0)
        )

    def _may_start(self, waiter: Waiter) -> bool:
        """Whether some decoder may accept it once the offers in flight there are answered."""
        return any(
            self._may_have(waiter, member, self._rooms[member.address])
            and not self._placement.is_kept(member, waiter.running)
            for member in self._decoders()
        )

    # --- what is to be looked at ---

    def _look_for(self, waiter: Waiter) -> None:
        """Marks all decoders that may have room for it. Not others, where all waiters would be checked in vain."""
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
        """The request is no longer on offer to its decoder, so another may be."""
        decoder, room = waiter.decoder, waiter.room
        if decoder is None or room is None:
            return
        waiter.decoder = waiter.room = None
        insort(self._idle, waiter, key=_number_of)
        room.offers -= 1
        self._placement.answered(decoder, waiter.tokens)
        if self._rooms.get(decoder.address) is room:  # otherwise the decoder is gone
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
        """Keeps a decoder for each request that has waited long, in order, as long as there are any."""
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
                self.news(best.address)  # so that an offer tells it that it is kept


def _kind_of(decoder: Member) -> _Kind:
    """Decoders of one kind that accept requests suit the same requests."""
    return decoder.record.model, decoder.tokens_max


def _has_model(running: Running, member: Member) -> bool:
    return running.model is None or running.model == member.record.model

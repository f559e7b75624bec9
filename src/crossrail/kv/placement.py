"""Which nodes a router gives a request to, and what it has given to whom."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import get_args

from crossrail.kv.membership import Member, Membership
from crossrail.kv.messages import Role
from crossrail.kv.model import Tokens
from crossrail.kv.prefix import page_hashes
from crossrail.kv.router_requests import Running
from crossrail.kv.selection import Candidate, PrefixMemory, rank

_REFUSED_S = 0.2  # how long a refusal is believed, if the decoder says nothing else
_OFFERS = 8  # to one decoder at a time, of what was refused before
_PREFIX_TOKENS = 64  # of a block in the router's own memory of prefixes; nodes have pages of their own sizes


def prefix_names(prompt: Tokens) -> list[bytes]:
    """Of a prompt's blocks, as Placement knows them."""
    return page_hashes(prompt, _PREFIX_TOKENS)


class ModelsSeen:
    """Models that nodes have, or had in the last keep_s: they may come back, and requests wait for them.

    Nothing is unknown until keep_s after start(): nodes are still to join then. Times: the event loop's clock.
    """

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._started_s = math.inf
        self._seen_s: dict[str, float] = {}

    def start(self, now_s: float) -> None:
        """From now on nodes may join."""
        self._started_s = now_s

    def look(self, now_s: float, keep_s: float) -> None:
        """To be called regularly."""
        for role in get_args(Role):
            self._seen_s |= {member.record.model: now_s for member in self._membership.members(role)}
        self._seen_s = {model: seen_s for model, seen_s in self._seen_s.items() if now_s - seen_s <= keep_s}

    def is_unknown(self, model: str, now_s: float, keep_s: float) -> bool:
        self.look(now_s, keep_s)
        return model not in self._seen_s and now_s - self._started_s > keep_s

    def names(self) -> list[str]:
        return sorted(self._seen_s)


class Placement:
    """Threads: the event loop's.

    Invariant: what is counted as under way at a node is the prompts of requests whose `prefiller` it is, and the
    weights of those that are charged to it as their `decoder`.
    Invariant: a decoder is kept for one request at most, and a request has one kept at most.
    """

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._prefixes = PrefixMemory()
        self._sent: Counter[bytes] = Counter()  # tokens under way, by address
        self._kept: dict[str, bytes] = {}  # by request that waits for room, who had waited too long first: a decoder

    def ranked(self, role: Role, running: Running, model: str | None) -> list[Member]:
        """Those with this model that may take the request, the best first. None: any model.

        Those whose pages it can never fit are among them only if that is so of all: one of them says it in words.
        """
        members = [
            member
            for member in self._membership.members(role)
            if not member.load.draining and model in (None, member.record.model)
        ]
        tokens = weight(running) if role == "decoder" else len(running.prompt) + len(running.tokens)
        fitting = [member for member in members if member.layout.pages_of(tokens) <= member.layout.pages]
        candidates = rank((self._candidate(member, running) for member in fitting or members), len(running.prompt))
        return [candidate.member for candidate in candidates]

    def keep(self, running: Running, decoders: Sequence[Member]) -> None:
        """From now on one of these takes no younger request, so that what runs there leaves room for this one.

        Else one that is as large as a decoder's memory would wait for ever behind small ones, which always fit. None is
        kept while all are for others: the next call may find one.
        """
        if self._kept.get(running.request) not in [member.address for member in decoders]:
            self._kept.pop(running.request, None)
            free = [member.address for member in decoders if member.address not in self._kept.values()]
            if free:
                self._kept[running.request] = free[0]

    def room_at(self, decoder: Member, running: Running) -> int:
        """Tokens for which this decoder needs room, as far as is known here."""
        return max(weight(running) - self._candidate(decoder, running).cached_tokens, 0)

    def release(self, running: Running) -> bytes | None:
        """It waits no more. Returns the address of the decoder that was kept for it, if one was."""
        return self._kept.pop(running.request, None)

    def is_kept_for(self, decoder: Member, running: Running) -> bool:
        return self._kept.get(running.request) == decoder.address

    def is_kept(self, decoder: Member, running: Running) -> bool:
        """For another request."""
        return any(address == decoder.address for request, address in self._kept.items() if request != running.request)

    def give(self, running: Running, decoder: Member, prefiller: Member | None) -> None:
        """The decoder has taken it, and asks this prefiller. Of who is gone by now nothing is counted."""
        running.decoder, running.model, running.is_charged = decoder, decoder.record.model, self._is_member(decoder)
        if running.is_charged:
            self._sent[decoder.address] += weight(running)
            self._prefixes.note(decoder.address, running.names)
        self.assign(running, prefiller)

    def assign(self, running: Running, prefiller: Member | None) -> None:
        """Counts the prompt as work of its prefiller, from now on until it has another or ends."""
        if running.prefiller is not None:
            self._discharge(running.prefiller, len(running.prompt))
        if prefiller is not None and not self._is_member(prefiller):
            prefiller = None
        running.prefiller = prefiller
        if prefiller is not None:
            self._sent[prefiller.address] += len(running.prompt)
            self._prefixes.note(prefiller.address, running.names)

    def take_back(self, running: Running) -> None:
        """Neither of its nodes has anything to do for it any more."""
        if running.decoder is not None and running.is_charged:
            self._discharge(running.decoder, weight(running))
        running.is_charged = False
        self.assign(running, None)

    def forget(self, member: Member) -> None:
        """It is gone."""
        self._prefixes.forget(member.address)
        self._sent.pop(member.address, None)

    def _candidate(self, member: Member, running: Running) -> Candidate:
        waiting = max(member.load.queued_tokens, self._sent[member.address])
        return Candidate(member, waiting, self._prefixes.match(member.address, running.names) * _PREFIX_TOKENS)

    def _is_member(self, node: Member) -> bool:
        return any(member is node for member in self._membership.members(node.record.role))

    def _discharge(self, member: Member, tokens: int) -> None:
        if member.address in self._sent:  # else it is gone, and forgotten
            self._sent[member.address] -= tokens


@dataclass
class _Refused:
    """tokens: the least that it had no room for. until_s: on the event loop's clock."""

    tokens: int = 0
    why: str = ""
    until_s: float = 0.0
    turn: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_OFFERS))


class Refusals:
    """What decoders had no room for, until they have news: so that of a thousand requests that wait not each asks each
    decoder after each change. Threads: the event loop's.
    """

    def __init__(self) -> None:
        self._decoders: dict[bytes, _Refused] = {}

    def turn(self, decoder: bytes) -> asyncio.Semaphore:
        """To be held by an offer of what has been refused before."""
        return self._decoders.setdefault(decoder, _Refused()).turn

    def of(self, decoder: bytes, tokens: int, now_s: float) -> str:
        """Why it would refuse a request that needs so much room; empty: it may take it."""
        known = self._decoders.get(decoder)
        return known.why if known is not None and now_s < known.until_s and tokens >= known.tokens else ""

    def note(self, decoder: bytes, tokens: int, why: str, now_s: float) -> None:
        """It has refused this."""
        known = self._decoders.setdefault(decoder, _Refused())
        known.tokens = min(tokens, known.tokens) if now_s < known.until_s else tokens
        known.why, known.until_s = why, now_s + _REFUSED_S

    def news(self, decoder: bytes) -> None:
        """It may have more room than before."""
        if (known := self._decoders.get(decoder)) is not None:
            known.until_s = 0.0

    def keep(self, decoders: Set[bytes]) -> None:
        """Forgets all others: they are gone."""
        for decoder in self._decoders.keys() - decoders:
            del self._decoders[decoder]


def weight(running: Running) -> int:
    """Tokens that a decoder keeps for it, at most."""
    return len(running.prompt) + running.sampling.max_tokens

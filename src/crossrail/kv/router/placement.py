"""Which nodes a router gives a request to, and which requests each node has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from crossrail.errors import UsageError
from crossrail.kv.model import Tokens
from crossrail.kv.router.membership import Member, Membership
from crossrail.kv.router.requests import Running
from crossrail.kv.router.selection import PrefixMemory, cost
from crossrail.kv.transfer.prefix import page_hashes

_PREFIX_TOKENS = 64  # tokens of a block in the router's own memory of prefixes; nodes have page sizes of their own


def prefix_names(prompt: Tokens) -> list[bytes]:
    """The names of a prompt's blocks, as Placement uses them."""
    return [name.tobytes() for name in page_hashes(prompt, _PREFIX_TOKENS)]


class Placement:
    """Threads: the event loop's.

    Invariant: the load counted at a node is the prompts of requests whose `prefiller` it is, the weights of requests
    that are charged to it as their `decoder`, and both for requests that are on offer and would use it.

    Invariant: a decoder is kept for at most one request, and a request has at most one decoder kept.
    """

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._prefixes = PrefixMemory()
        self._sent: Counter[bytes] = Counter()  # tokens in progress, by address
        self._kept: dict[str, bytes] = {}  # by request that has waited too long for room: the decoder kept for it
        self._kept_for: dict[bytes, str] = {}  # the inverse

    def best(self, members: Sequence[Member], running: Running) -> Member:
        """The member expected to take the request soonest, as far as is known here."""
        tokens = len(running.prompt)

        def cost_at(member: Member) -> tuple[int, int, str]:
            waiting = max(member.load.queued_tokens, self._sent.get(member.address, 0))
            return cost(waiting, self._cached_tokens(member, running), tokens, member.name)

        return min(members, key=cost_at)

    def prefillers(self, running: Running, model: str) -> list[Member]:
        """Prefillers with this model that accept requests and have enough pages for it."""
        return [
            member
            for member in self._membership.members("prefiller")
            if member.load.takes_requests
            and member.record.model == model
            and running.prefill_tokens <= member.tokens_max
        ]

    def prefill_tokens(self) -> dict[str, int]:
        """By model: the longest prompt that a prefiller which accepts requests can take."""
        longest: dict[str, int] = {}
        for member in self._membership.members("prefiller"):
            if member.load.takes_requests:
                longest[member.record.model] = max(longest.get(member.record.model, 0), member.tokens_max)
        return longest

    def check_length(self, prompt_tokens: int, model: str | None) -> None:
        """UsageError if there are prefillers, even draining ones, and none of them has enough pages for the prompt."""
        there = [member for member in self._membership.members("prefiller") if model in (None, member.record.model)]
        largest = max(there, key=lambda member: member.tokens_max, default=None)
        if largest is not None and prompt_tokens - 1 > largest.tokens_max:
            pages, there_are = largest.layout.pages_of(prompt_tokens - 1), largest.layout.pages
            raise UsageError(
                f"the {prompt_tokens} tokens of the prompt take {pages} pages at prefiller {largest.name!r}, which has "
                f"{there_are}, and no other has room for more tokens"
            )

    def keep(self, running: Running, decoder: Member) -> None:
        """From now on this decoder accepts no younger request, so that room becomes free for this one.

        Otherwise a request as large as a decoder's memory would wait for ever behind small ones, which always fit.
        """
        self.release(running)
        self._kept[running.request], self._kept_for[decoder.address] = decoder.address, running.request

    def room_at(self, decoder: Member, running: Running) -> int:
        """Tokens for which this decoder needs room, as far as is known here."""
        return max(weight(running) - self._cached_tokens(decoder, running), 0)

    def names_at(self, node: Member) -> Mapping[bytes, None]:
        """The names of prompts' blocks that are cached there, as far as is known here."""
        return self._prefixes.names_at(node.address)

    def release(self, running: Running) -> bytes | None:
        """The request waits no more. Returns the address of the decoder that was kept for it, if any."""
        decoder = self._kept.pop(running.request, None)
        if decoder is not None:
            del self._kept_for[decoder]
        return decoder

    def kept_for(self, decoder: Member) -> str | None:
        """The request that the decoder is kept for."""
        return self._kept_for.get(decoder.address)

    def is_kept_for(self, decoder: Member, running: Running) -> bool:
        return self.kept_for(decoder) == running.request

    def is_kept(self, decoder: Member, running: Running) -> bool:
        """Whether the decoder is kept for another request."""
        return self.kept_for(decoder) not in (None, running.request)

    def offer(self, node: Member, tokens: int) -> None:
        """The node is to get a request with so much work if a decoder accepts it. Counted until answered(): otherwise
        all requests that come before the first answer would go to the node that was best for the first.
        """
        if self._is_member(node):
            self._sent[node.address] += tokens

    def answered(self, node: Member, tokens: int) -> None:
        """The decoder has accepted the request, so give() counts it now; or has refused it."""
        if self._is_member(node):  # otherwise it is forgotten
            self._sent[node.address] -= tokens

    @contextmanager
    def offered(self, node: Member | None, tokens: int) -> Iterator[None]:
        """offer() and answered(), around a context. None: no node."""
        if node is None:
            yield
            return
        self.offer(node, tokens)
        try:
            yield
        finally:
            self.answered(node, tokens)

    def give(self, running: Running, decoder: Member, prefiller: Member | None) -> None:
        """The decoder has accepted the request, and asks this prefiller, or one named to it since. Nothing is counted
        for nodes that are gone by now.
        """
        if running.attempt > running.placement:
            prefiller = running.prefiller
        running.decoder, running.model, running.is_charged = decoder, decoder.record.model, self._is_member(decoder)
        if running.is_charged:
            self._sent[decoder.address] += weight(running)
            self._prefixes.note(decoder.address, running.names)
        self.assign(running, prefiller)

    def assign(self, running: Running, prefiller: Member | None) -> None:
        """Counts the prompt as work of its prefiller, until it has another one or ends."""
        if running.prefiller is not None:
            self._discharge(running.prefiller, len(running.prompt))
        if prefiller is not None and not self._is_member(prefiller):
            prefiller = None
        running.prefiller = prefiller
        if prefiller is not None:
            self._sent[prefiller.address] += len(running.prompt)
            self._prefixes.note(prefiller.address, running.names)

    def take_back(self, running: Running) -> None:
        """Neither of its nodes has any work for the request any more."""
        if running.decoder is not None and running.is_charged:
            self._discharge(running.decoder, weight(running))
        running.is_charged = False
        self.assign(running, None)

    def forget(self, member: Member) -> None:
        """The node is gone."""
        # It is still there under another name, with all its requests.
        if self._membership.at(member.address) is not None:
            return
        self._prefixes.forget(member.address)
        self._sent.pop(member.address, None)
        if (request := self._kept_for.pop(member.address, None)) is not None:
            del self._kept[request]

    def _cached_tokens(self, member: Member, running: Running) -> int:
        return self._prefixes.match(member.address, running.names) * _PREFIX_TOKENS

    def _is_member(self, node: Member) -> bool:
        return any(member is node for member in self._membership.members(node.record.role))

    def _discharge(self, member: Member, tokens: int) -> None:
        if member.address in self._sent:  # otherwise it is gone and forgotten
            self._sent[member.address] -= tokens


def weight(running: Running) -> int:
    """The most tokens that a decoder keeps for the request."""
    return len(running.prompt) + running.sampling.max_tokens

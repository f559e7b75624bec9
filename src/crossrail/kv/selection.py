"""Which node takes a request: the one where it waits least, counting what is cached there as done. Pure functions."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from crossrail.kv.membership import Member

_NAMES_MAX = 200_000  # per node


class PrefixMemory:
    """What a router believes nodes to have cached: the pages of what it sent there, oldest forgotten first.

    A guess that costs nodes nothing: one that is wrong makes a worse choice, never a wrong token, since nodes look
    themselves.
    """

    def __init__(self, names_max: int = _NAMES_MAX) -> None:
        self._names_max = names_max
        self._nodes: dict[bytes, OrderedDict[bytes, None]] = {}

    def note(self, address: bytes, names: Iterable[bytes]) -> None:
        """A request with pages of these names went there."""
        held = self._nodes.setdefault(address, OrderedDict())
        for name in names:
            held[name] = None
            held.move_to_end(name)
        while len(held) > self._names_max:
            held.popitem(last=False)

    def match(self, address: bytes, names: Sequence[bytes]) -> int:
        """How many of these names, from the first on, are there."""
        held = self._nodes.get(address)
        if held is None:
            return 0
        return next((index for index, name in enumerate(names) if name not in held), len(names))

    def forget(self, address: bytes) -> None:
        """The node is gone."""
        self._nodes.pop(address, None)


@dataclass(frozen=True)
class Candidate:
    """A node that may take a request.

    waiting_tokens: what it has to do before, by its own word and by what was sent to it since.
    cached_tokens: of this request, there already.
    """

    member: Member
    waiting_tokens: int
    cached_tokens: int


def rank(candidates: Iterable[Candidate], tokens: int) -> list[Candidate]:
    """The best first: where waiting for others and then running what is not cached is least; ties by name."""
    return sorted(
        candidates, key=lambda c: (c.waiting_tokens + max(tokens - c.cached_tokens, 0), c.waiting_tokens, c.member.name)
    )

"""Chooses the node where a request would wait least, counting what is cached there as done. Pure functions."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

_NAMES_MAX = 200_000  # per node, of some 200 bytes
_NAMES_OF_ALL_MAX = 4_000_000
_NONE: Mapping[bytes, None] = {}


class PrefixMemory:
    """What a router believes nodes to have cached: the pages of what it sent there, oldest forgotten first. Where there
    are many nodes, each has its share of what is kept of all.

    A guess that costs nodes nothing: one that is wrong makes a worse choice, never a wrong token, since nodes look
    themselves.
    """

    def __init__(self, names_max: int = _NAMES_MAX, of_all_max: int = _NAMES_OF_ALL_MAX) -> None:
        self._names_max = names_max
        self._of_all_max = of_all_max
        self._nodes: dict[bytes, OrderedDict[bytes, None]] = {}

    def note(self, address: bytes, names: Iterable[bytes]) -> None:
        """A request with pages of these names went there."""
        held = self._nodes.setdefault(address, OrderedDict())
        for name in names:
            held[name] = None
            held.move_to_end(name)
        most = min(self._names_max, max(self._of_all_max // len(self._nodes), 1))
        while len(held) > most:
            held.popitem(last=False)

    def names_at(self, address: bytes) -> Mapping[bytes, None]:
        """Of all pages that are there."""
        return self._nodes.get(address, _NONE)

    def match(self, address: bytes, names: Sequence[bytes]) -> int:
        """How many of these names, from the first on, are there."""
        held = self._nodes.get(address)
        if held is None:
            return 0
        return next((index for index, name in enumerate(names) if name not in held), len(names))

    def forget(self, address: bytes) -> None:
        """The node is gone."""
        self._nodes.pop(address, None)


def cost(waiting_tokens: int, cached_tokens: int, tokens: int, name: str) -> tuple[int, int, str]:
    """Of giving a request of so many tokens to a node: the least is the best. What it waits for there and what is not
    cached there and has to be run, together; ties by the former, and by name.

    waiting_tokens: what the node has to do before, by its own word and by what was sent to it since. cached_tokens: of
    this request, there already.
    """
    return waiting_tokens + max(tokens - cached_tokens, 0), waiting_tokens, name

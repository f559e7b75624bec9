"""Chooses the node where a request would wait least, counting cached tokens as done. Pure functions."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

_NAMES_MAX = 200_000  # per node; each takes some 200 bytes
_NAMES_OF_ALL_MAX = 4_000_000
_NONE: Mapping[bytes, None] = {}


class PrefixMemory:
    """What a router assumes nodes to have cached: the pages of what it sent there, oldest forgotten first. With many
    nodes, each gets a share of the total.

    A guess that costs nodes nothing: a wrong one leads to a worse choice, never to a wrong token, since nodes check
    their own caches.
    """

    def __init__(self, names_max: int = _NAMES_MAX, of_all_max: int = _NAMES_OF_ALL_MAX) -> None:
        self._names_max = names_max
        self._of_all_max = of_all_max
        self._nodes: dict[bytes, OrderedDict[bytes, None]] = {}

    def note(self, address: bytes, names: Iterable[bytes]) -> None:
        """A request with pages of these names was sent there."""
        held = self._nodes.setdefault(address, OrderedDict())
        for name in names:
            held[name] = None
            held.move_to_end(name)
        most = min(self._names_max, max(self._of_all_max // len(self._nodes), 1))
        while len(held) > most:
            held.popitem(last=False)

    def names_at(self, address: bytes) -> Mapping[bytes, None]:
        """The names of all pages believed to be there."""
        return self._nodes.get(address, _NONE)

    def match(self, address: bytes, names: Sequence[bytes]) -> int:
        """How many of these names, from the first one on, are there."""
        held = self._nodes.get(address)
        if held is None:
            return 0
        return next((index for index, name in enumerate(names) if name not in held), len(names))

    def forget(self, address: bytes) -> None:
        """The node is gone."""
        self._nodes.pop(address, None)


def cost(waiting_tokens: int, cached_tokens: int, tokens: int, name: str) -> tuple[int, int, str]:
    """The cost of giving a request of so many tokens to a node; the least is best. It is the work that the request
    waits for there plus its own tokens that are not cached there; ties are broken by the former, then by name.

    waiting_tokens: the node's earlier work, as it reported it plus what was sent to it since. cached_tokens: the
    request's tokens that are cached there.
    """
    return waiting_tokens + max(tokens - cached_tokens, 0), waiting_tokens, name

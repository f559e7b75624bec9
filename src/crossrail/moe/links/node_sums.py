"""Partial sums: the ranks of a node add up their experts' outputs for a token of another node and send one row back.

See native/moe/node_sums.h for who adds up what, and where it goes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from crossrail import _core
from crossrail.moe.arrays import Array
from crossrail.moe.links.board import PARITIES, Half
from crossrail.moe.rows.interface import RowMemory


class SumsOut(Protocol):
    """Makes room for sums and sends them: Far."""

    def sums_out(self, number: int, first_row: int, rows: int) -> Array: ...

    def take_sums(self, number: int) -> None: ...

    def send_sums(self, number: int, origin: int, first_row: int, rows: int) -> None: ...


def tags_of(routes: Array, weights: Array) -> Array:
    """Routes and weights as they travel: uint8 [routes, 8], for each route its number and weight, int32 and float32."""
    tags = np.empty((len(routes), 2), np.int32)
    tags[:, 0] = routes
    tags[:, 1] = weights.reshape(-1)[routes].view(np.int32)
    return tags.view(np.uint8)


class NodeSums:
    """The sums that one rank makes. Threads: one at a time.

    boards: by rank of the node, ascending, those of both parities. far: sends the sums.
    """

    def __init__(
        self,
        layout: _core.moe.Layout,
        rank: int,
        boards: Sequence[Sequence[Half]],
        far: SumsOut,
        memory: RowMemory,
        max_tokens: int,
    ) -> None:
        self._rank = rank
        self._boards = boards
        self._far = far
        self._memory = memory
        self._max_tokens = max_tokens
        self._origins = _core.moe.origins(layout, rank)
        self.begun: int | None = None  # the round of which somebody was sent something

    def send(self, number: int, placement: _core.moe.Placement) -> None:
        """Once all of the node have returned: one rank's sums leave while the next one's are made."""
        self._far.take_sums(number)
        halves = [boards[number % PARITIES] for boards in self._boards]
        outputs, tags = [half.y for half in halves], [half.tags for half in halves]
        for i, origin in enumerate(self._origins):
            where, weights = _core.moe.terms_to_send(placement, self._rank, origin, tags)
            first, rows = i * self._max_tokens, len(where)
            if rows > 0:
                self._memory.reduce(self._far.sums_out(number, first, rows), outputs, where, weights)
            self.begun = number
            self._far.send_sums(number, origin, first, rows)

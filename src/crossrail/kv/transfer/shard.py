"""Which source rank sends what to which target rank when two instances split the heads differently, and in which
pieces. Pure functions.

Every (part, head, token) of a page is one row of head_dim elements, in the same order on both sides. So a transfer is
three nested loops over rows, each with its own step in bytes on either side; loops that are contiguous on both sides
merge into one longer piece. Equal layouts merge into one piece per page; loops that do not merge need more indices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from crossrail.errors import UsageError
from crossrail.kv.transfer.layout import KvLayout

INDEX_MAX = (1 << 32) - 1  # the engine's indices of pages


class Lane(NamedTuple):
    """Some heads of the model go from this rank of the prefiller to that rank of the decoder."""

    source: int
    target: int
    heads: range


def lanes(src: KvLayout, dst: KvLayout, spread: int) -> Iterator[Lane]:
    """Every head of every target rank exactly once, from one of the source ranks that hold it.

    spread: selects the source if several hold it. Neighbouring targets take different ones, as do different numbers.
    """
    for target in range(dst.tp):
        wanted = dst.heads_of(target)
        head = wanted.start
        while head < wanted.stop:
            group = head // src.rank_heads  # source ranks with the same heads
            stop = min((group + 1) * src.rank_heads, wanted.stop)
            replica = (spread + target + group) % src.replicas
            yield Lane(group * src.replicas + replica, target, range(head, stop))
            head = stop


@dataclass(frozen=True, eq=False)
class Side:
    """Where the pieces of a lane are in a layer of one rank: at offset + stride * index, in bytes.

    The index of piece j of unit u of page p is p * page_step + u * unit_step + pieces[j].
    """

    offset: int
    stride: int
    page_step: int
    unit_step: int
    page_units: int
    pieces: npt.NDArray[np.int64]

    def indices(self, pages: npt.NDArray[np.integer], units: range) -> npt.NDArray[np.uint32]:
        """The indices of all pieces of these units, counted from the request's first token; pages: the request's, in
        order.

        Piece by piece, and for each piece unit by unit: so neighbouring pages stay neighbours and are merged into one
        write.
        """
        unit = np.arange(units.start, units.stop)
        base = pages[unit // self.page_units].astype(np.int64) * self.page_step
        if self.page_units > 1:
            base += unit % self.page_units * self.unit_step
        if len(self.pieces) > 1:
            base = (self.pieces[:, np.newaxis] + base).reshape(-1)
        return base.astype(np.uint32)


@dataclass(frozen=True, eq=False)
class Route:
    """A lane as paged writes: per layer and unit, len(src.pieces) pieces of piece_bytes."""

    lane: Lane
    piece_bytes: int
    src: Side
    dst: Side

    @property
    def pieces(self) -> int:
        """Pieces of one unit: what a unit counts at the target, a layer."""
        return len(self.src.pieces)


def route(src: KvLayout, dst: KvLayout, lane: Lane, unit_tokens: int) -> Route:
    """The lane's loops over parts, heads and the tokens of a unit, melted as far as both sides allow."""
    loops = [
        (src.parts, src.part_stride, dst.part_stride),
        (len(lane.heads), src.head_stride, dst.head_stride),
        (unit_tokens, src.token_stride, dst.token_stride),
    ]
    loops = [loop for loop in loops if loop[0] > 1]
    piece_bytes = src.row_bytes
    while melts := next((loop for loop in loops if loop[1] == loop[2] == piece_bytes), None):
        loops.remove(melts)
        piece_bytes *= melts[0]
    counts = [count for count, _, _ in loops]
    return Route(
        lane,
        piece_bytes,
        _side(src, lane.source, lane.heads, unit_tokens, counts, [step for _, step, _ in loops]),
        _side(dst, lane.target, lane.heads, unit_tokens, counts, [step for _, _, step in loops]),
    )


def _side(layout: KvLayout, rank: int, heads: range, unit_tokens: int, counts: list[int], steps: list[int]) -> Side:
    page_units = layout.page_tokens // unit_tokens
    unit_stride = unit_tokens * layout.token_stride
    # One stride for all indices of a call: the longest that every step is a multiple of.
    stride = gcd(layout.page_stride, *([unit_stride] if page_units > 1 else []), *steps)
    pieces = np.zeros(1, np.int64)
    for count, step in zip(counts, steps, strict=True):
        pieces = (pieces[:, np.newaxis] + np.arange(count) * (step // stride)).reshape(-1)
    pieces.flags.writeable = False
    side = Side(
        offset=(heads.start - layout.heads_of(rank).start) * layout.head_stride,
        stride=stride,
        page_step=layout.page_stride // stride,
        unit_step=unit_stride // stride,
        page_units=page_units,
        pieces=pieces,
    )
    last = (layout.pages - 1) * side.page_step + (page_units - 1) * side.unit_step + int(pieces[-1])
    if last > INDEX_MAX:
        raise UsageError(
            f"pieces of {stride} bytes in a layer of {layout.layer_bytes} take indices up to {last}, at most "
            f"{INDEX_MAX} are possible: use the same order, page size and head split on both sides, or fewer pages"
        )
    return side

"""Memory that a rank shows to those it shares memory with: what it sends, what its experts returned, and its progress.

A board has two of everything but the farewell, for rounds of even and of odd number. Only its owner writes it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

import crossrail as xr
from crossrail import _core
from crossrail.moe.arrays import Array, host_array
from crossrail.moe.config import NUMPY_TYPES, Config
from crossrail.moe.rows.interface import Block

PARITIES = 2
# Words, by index: the farewell, which is 2, or 4 + 2 * n of who says why by a number n (farewell.py); then two of each;
# then twice the number of the view (masking/views.py).
FAREWELL, SENT, RETURNED, VIEW = 0, 1, 3, 5
WORDS = VIEW + 1
_BEFORE_ODD = 0xFFFFFFFF  # two before the first round, 1
_PAGE = 4096
_REASON_AT = WORDS * _core.moe.WORD_BYTES
_NOTE_AT = _REASON_AT + _core.moe.FAREWELL_WORDS


@dataclass(frozen=True)
class Half:
    """A board's arrays for one parity.

    counts: int32 [experts], routes to each. order: int32 [max_tokens * top_k], tokens * top_k + k by expert. rows:
    uint8 [max_tokens, stride], x and scales of each token. y: [output_rows, hidden], outputs of the owner's experts.
    tags: int32 [tag_rows, 2], with node_sums: route and bits of the weight of each row from far.
    """

    counts: Array
    order: Array
    rows: Any
    y: Any
    tags: Array


class BoardLayout:
    """The layout of a rank's board, which others derive from its number of experts. Offsets are multiples of a page.

    holds_rows: rows are part of it, in host memory. Otherwise they are in a block of their own, of rows_bytes, where
    only the owner reads them.
    """

    def __init__(self, config: Config, rank: int, holds_rows: bool = True) -> None:
        self.holds_rows = holds_rows
        self._words_bytes = _pages(_NOTE_AT + _core.moe.FAREWELL_BYTES)
        on_board: dict[str, tuple[str, tuple[int, ...]]] = {
            "counts": ("int32", (config.experts,)),
            "order": ("int32", (config.max_tokens * config.top_k,)),
        }
        elsewhere: dict[str, tuple[str, tuple[int, ...]]] = {}
        of_rows = on_board if holds_rows else elsewhere
        of_rows["rows"] = ("uint8", (config.max_tokens, config.stride_bytes))
        of_rows["y"] = (config.out_dtype, (config.output_rows[rank], config.hidden))
        on_board["tags"] = ("int32", (config.tag_rows(rank), 2))
        self._on_board, self._elsewhere = on_board, elsewhere
        self.nbytes = self._words_bytes + PARITIES * _bytes_of(on_board)
        self.rows_bytes = PARITIES * _bytes_of(elsewhere)

    def begin(self, board: memoryview) -> None:
        """Sets our words to "nothing yet" (native/moe/words.h), in new memory, before anybody waits for them."""
        words = np.frombuffer(board, np.uint32, WORDS * _core.moe.WORD_BYTES // 4).reshape(WORDS, -1)
        for word in (SENT, RETURNED):
            words[word + 1, 0] = _BEFORE_ODD

    def reason(self, board: memoryview) -> Array:
        """uint8 [FAREWELL_WORDS]: why its owner left, as text; it ends at the first 0."""
        return np.frombuffer(board, np.uint8, _core.moe.FAREWELL_WORDS, _REASON_AT)

    def note(self, board: memoryview) -> Array:
        """uint8 [FAREWELL_BYTES]: its owner's note (notes.py)."""
        return np.frombuffer(board, np.uint8, _core.moe.FAREWELL_BYTES, _NOTE_AT)

    def half(self, board: memoryview, parity: int, rows: Block | None = None) -> Half:
        """Views of the board; they keep it alive. rows: of a board that holds none, where they are, if anywhere."""
        arrays: dict[str, Any] = {}
        offset = self._words_bytes + parity * _bytes_of(self._on_board)
        for name, (dtype, shape) in self._on_board.items():
            arrays[name] = host_array(board, dtype, shape, offset)
            offset += _part_bytes(dtype, shape)
        offset = parity * _bytes_of(self._elsewhere)
        for name, (dtype, shape) in self._elsewhere.items():
            arrays[name] = None if rows is None else rows.array(dtype, shape, offset)
            offset += _part_bytes(dtype, shape)
        return Half(**arrays)


class Board:
    """Our own, in new memory. region: of it. rows: where ours are, of a board that holds none; None: nowhere."""

    def __init__(self, engine: xr.Engine, layout: BoardLayout, rows: Block | None) -> None:
        self._engine = engine
        self.layout = layout
        self.rows = rows
        self._is_closed = False
        self.region = engine._alloc_for_mapping(layout.nbytes)
        layout.begin(self.region.view())

    def close(self, timeout_s: float) -> None:
        """Idempotent. WaitTimeout while a peer is in the middle of a write to it. Its memory is released, once nobody
        else holds it.
        """
        if self._is_closed:
            return
        if not self._engine.closed:
            self.region.close(timeout_s)
        if self.rows is not None:
            self.rows.close(timeout_s)
        self._is_closed = True
        del self.region


def output_bytes(config: Config, rank: int) -> int:
    """Bytes of the memory that output_arrays divides; not 0, even if the rank has no experts."""
    rows = config.output_rows[rank]
    return PARITIES * max(_pages(rows * config.x_bytes) + _pages(rows * 4 * config.blocks), _PAGE)


def output_arrays(config: Config, rank: int, memory: Block, parity: int) -> tuple[Any, Any | None]:
    """Where dispatch puts rows: x [output_rows, hidden], scales [output_rows, blocks] or None. memory: for both
    parities.
    """
    rows, begin = config.output_rows[rank], parity * output_bytes(config, rank) // PARITIES
    x = memory.array(config.dtype, (rows, config.hidden), begin)
    if config.blocks == 0:
        return x, None
    return x, memory.array("float32", (rows, config.blocks), begin + _pages(rows * config.x_bytes))


def _bytes_of(parts: Mapping[str, tuple[str, tuple[int, ...]]]) -> int:
    return sum(_part_bytes(dtype, shape) for dtype, shape in parts.values())


def _part_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    return _pages(np.dtype(NUMPY_TYPES.get(dtype, dtype)).itemsize * math.prod(shape))


def _pages(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE

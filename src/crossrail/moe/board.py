"""Memory that a rank shows to those who share memory with it: what it sends, what its experts gave, and how far it is.

A board has two of everything but the farewell, for rounds of even and of odd number. Only its owner writes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from crossrail import _core
from crossrail.moe.config import NUMPY_TYPES, Config

PARITIES = 2
# Words, by index: the farewell, then two of each, then twice the number of the view (moe/views.py).
FAREWELL, SENT, RETURNED, VIEW = 0, 1, 3, 5
WORDS = VIEW + 1
_BEFORE_ODD = 0xFFFFFFFF  # two before the first round, 1
_PAGE = 4096

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Half:
    """What a board has for one parity, as arrays.

    counts: int32 [experts], routes to each. order: int32 [max_tokens * top_k], tokens * top_k + k by expert. rows:
    uint8 [max_tokens, stride], x and scales of each token. y: [rows_max, hidden], outputs of the owner's experts.
    tags: int32 [tag_rows, 2], with node_sums: route and bits of the weight of each row from far.
    """

    counts: Array
    order: Array
    rows: Array
    y: Array
    tags: Array


class BoardLayout:
    """Where things are in a board, the same on all ranks. Offsets are multiples of a page."""

    def __init__(self, config: Config) -> None:
        self._parts: list[tuple[str, int, tuple[int, ...]]] = [
            ("int32", 4, (config.experts,)),
            ("int32", 4, (config.max_tokens * config.top_k,)),
            ("uint8", 1, (config.max_tokens, config.stride_bytes)),
            (NUMPY_TYPES[config.out_dtype], config.y_bytes // config.hidden, (config.rows_max, config.hidden)),
            ("int32", 4, (config.tag_rows, 2)),
        ]
        self._words_bytes = _pages(WORDS * _core.moe.WORD_BYTES)
        self._half_bytes = sum(_pages(item * int(np.prod(shape))) for _, item, shape in self._parts)
        self.nbytes = self._words_bytes + PARITIES * self._half_bytes

    def begin(self, board: memoryview) -> None:
        """Sets our words to "nothing yet" (native/moe/words.h), in new memory, before anybody waits for them."""
        words = np.frombuffer(board, np.uint32, WORDS * _core.moe.WORD_BYTES // 4).reshape(WORDS, -1)
        for word in (SENT, RETURNED):
            words[word + 1, 0] = _BEFORE_ODD

    def half(self, board: memoryview, parity: int) -> Half:
        """Views of the board; they keep it alive."""
        offset = self._words_bytes + parity * self._half_bytes
        arrays = []
        for dtype, item, shape in self._parts:
            count = int(np.prod(shape))
            arrays.append(np.frombuffer(board, dtype, count, offset).reshape(shape))
            offset += _pages(item * count)
        return Half(*arrays)


def output_bytes(config: Config) -> int:
    """Of the memory that output_arrays divides."""
    return PARITIES * (_pages(config.rows_max * config.x_bytes) + _pages(config.rows_max * 4 * config.blocks))


def output_arrays(config: Config, memory: memoryview, parity: int) -> tuple[Array, Array | None]:
    """Where dispatch puts rows: x [rows_max, hidden], scales [rows_max, blocks] or None. memory: for both parities."""
    rows, begin = config.rows_max, parity * output_bytes(config) // PARITIES
    x = np.frombuffer(memory, NUMPY_TYPES[config.dtype], rows * config.hidden, begin).reshape(rows, config.hidden)
    if config.blocks == 0:
        return x, None
    begin += _pages(rows * config.x_bytes)
    return x, np.frombuffer(memory, np.float32, rows * config.blocks, begin).reshape(rows, config.blocks)


def _pages(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE

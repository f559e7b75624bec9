"""The dispatched data: the paper's two shapes, routes drawn uniformly, each rank's data derived from its number."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

SCALE_BLOCK = 128
_VALUES = 8  # of experts' outputs, so that bfloat16 has them exactly


@dataclass(frozen=True)
class MoeShape:
    """tokens: of each rank, each with rows of float8_e4m3fn with float32 scales out, and of bfloat16 back."""

    name: str
    tokens: int
    hidden: int = 7168
    experts: int = 256
    top_k: int = 8

    @property
    def row_bytes(self) -> int:
        """Bytes of a row that is dispatched, with its scales."""
        return self.hidden + self.blocks * 4

    @property
    def back_bytes(self) -> int:
        """Bytes of a row that comes back."""
        return 2 * self.hidden

    @property
    def blocks(self) -> int:
        """Scales of a row."""
        return -(-self.hidden // SCALE_BLOCK)

    def to_json(self) -> dict[str, Any]:
        """As JSON values, for a rank's process."""
        return asdict(self)


SHAPES = {shape.name: shape for shape in (MoeShape("decode", 128), MoeShape("prefill", 4096))}


def memory_bytes(shape: MoeShape, ranks: int, gloo: bool) -> int:
    """Approximate memory of a measurement with so many ranks: rows that each receives, copies, and returns."""
    received = 2 * shape.row_bytes + 2 * shape.back_bytes  # for rounds of even and odd number
    copied = max(2 * shape.row_bytes, shape.back_bytes)
    exchanged = 3 * shape.back_bytes if gloo else 0
    return ranks * shape.tokens * shape.top_k * (received + copied + exchanged)


class RankWork:
    """One rank's data. x: [tokens, hidden], uint8; scales: [tokens, blocks], float32; indices: [tokens,
    top_k], int32.
    """

    def __init__(self, shape: MoeShape, rank: int) -> None:
        rng = np.random.default_rng([shape.tokens, rank])
        self.x = rng.integers(0, 256, (shape.tokens, shape.hidden), dtype=np.uint8)
        self.scales = rng.random((shape.tokens, shape.blocks), dtype=np.float32)
        self.indices = routes(shape, rank)
        # A power of two: the sum over all experts of a token, which return equal values, is exactly that value again.
        self.weights = np.full((shape.tokens, shape.top_k), 1.0 / shape.top_k, np.float32)


def routes(shape: MoeShape, rank: int) -> npt.NDArray[np.int32]:
    """top_k different experts for each token of a rank: [tokens, top_k]."""
    keys = np.random.default_rng([shape.tokens, rank, 1]).random((shape.tokens, shape.experts), dtype=np.float32)
    return np.argpartition(keys, shape.top_k, axis=1)[:, : shape.top_k].astype(np.int32)


def rows_between(shape: MoeShape, ranks: int) -> npt.NDArray[np.int64]:
    """[ranks, ranks]: how many rows each rank sends to each."""
    per_rank = -(-shape.experts // ranks)
    return np.stack([np.bincount((routes(shape, r) // per_rank).ravel(), minlength=ranks) for r in range(ranks)])


def expert_output(x: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint16]:
    """The output of every expert: whole numbers that follow from x, as bits of bfloat16."""
    values = (np.arange(256) % _VALUES).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)[x]

"""What ranks dispatch in tests: routes of every temper, and integer-valued data, so that results are exact.

Everything of a rank follows from the seed, so each process makes what it needs, and the oracle all of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
Array = npt.NDArray[Any]
_Draw = Callable[[np.random.Generator, "Workload", int], Indices]


@dataclass(frozen=True)
class Workload:
    """One round of all ranks. routing: of ROUTINGS. tokens: of each rank; None: all have max_tokens.

    Rows are whole numbers; those of float8_e4m3fn any bits, which nobody computes with before the experts.
    """

    ranks: int
    experts: int
    hidden: int
    top_k: int
    max_tokens: int
    routing: str
    seed: int
    dtype: str = "float8_e4m3fn"
    out_dtype: str = "bfloat16"
    scale_block: int | None = 128
    tokens: tuple[int, ...] | None = None

    @property
    def experts_per_rank(self) -> int:
        """The last ranks may have fewer, or none."""
        return -(-self.experts // self.ranks)

    def experts_of(self, rank: int) -> range:
        """That rank's own."""
        first = min(rank * self.experts_per_rank, self.experts)
        return range(first, min(first + self.experts_per_rank, self.experts))

    def count(self, rank: int) -> int:
        """Tokens of that rank."""
        return self.max_tokens if self.tokens is None else self.tokens[rank]

    def rng(self, rank: int, what: int) -> np.random.Generator:
        """Of a rank, for one kind of data."""
        return np.random.default_rng([self.seed, rank, what])

    def x(self, rank: int) -> Array:
        """[tokens, hidden]: 0 to 255."""
        return encoded(self.rng(rank, 0).integers(0, 256, (self.count(rank), self.hidden)), self.dtype)

    def scales(self, rank: int) -> npt.NDArray[np.float32] | None:
        """[tokens, ceil(hidden / scale_block)], whole numbers of 0 to 3."""
        if self.scale_block is None:
            return None
        shape = (self.count(rank), -(-self.hidden // self.scale_block))
        return self.rng(rank, 1).integers(0, 4, shape).astype(np.float32)

    def indices(self, rank: int) -> Indices:
        """[tokens, top_k]; -1: masked."""
        return ROUTINGS[self.routing](self.rng(rank, 2), self, self.count(rank))

    def weights(self, rank: int) -> npt.NDArray[np.float32]:
        """[tokens, top_k]: 0, 1 or 2, so that sums are exact in bfloat16."""
        return self.rng(rank, 3).integers(0, 3, (self.count(rank), self.top_k)).astype(np.float32)

    def after(self) -> Workload:
        """Another one like it."""
        return replace(self, seed=self.seed + 1)

    def to_json(self) -> dict[str, Any]:
        """For a rank's process."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Workload:
        """The inverse."""
        tokens = fields["tokens"]
        return cls(**fields | {"tokens": None if tokens is None else tuple(tokens)})


def encoded(values: Array, dtype: str) -> Array:
    """Whole numbers as a rank passes them: bfloat16 as its bits, float8_e4m3fn as bits that mean nothing."""
    if dtype == "float8_e4m3fn":
        return values.astype(np.uint8)
    if dtype == "bfloat16":
        bits = values.astype(np.float32).view(np.uint32)
        assert not np.any(bits & 0xFFFF), "not exact in bfloat16"
        return (bits >> 16).astype(np.uint16)
    return values.astype(dtype)


def decoded(array: Array, dtype: str) -> npt.NDArray[np.int64]:
    """The inverse."""
    if dtype == "bfloat16":
        return (array.astype(np.uint32) << 16).view(np.float32).astype(np.int64)
    return array.astype(np.int64)


def _distinct(rng: np.random.Generator, shares: Array, tokens: int, top_k: int) -> Indices:
    """top_k different experts for each token, the likelier the greater their share (Gumbel's trick)."""
    keys = np.log(shares) + rng.gumbel(size=(tokens, len(shares)))
    return np.argsort(-keys, axis=1, kind="stable")[:, :top_k].astype(np.int64)


def _uniform(rng: np.random.Generator, work: Workload, tokens: int) -> Indices:
    return _distinct(rng, np.ones(work.experts), tokens, work.top_k)


def _skewed(rng: np.random.Generator, work: Workload, tokens: int) -> Indices:
    return _distinct(rng, 1.0 / np.arange(1, work.experts + 1) ** 2, tokens, work.top_k)


def _one_expert(rng: np.random.Generator, work: Workload, tokens: int) -> Indices:
    """The last one, of all tokens of all ranks; what else a token could have is masked."""
    indices = np.full((tokens, work.top_k), -1, np.int64)
    indices[:, 0] = work.experts - 1
    return indices


def _one_rank(rng: np.random.Generator, work: Workload, tokens: int) -> Indices:
    """All of a token's experts are of rank 0, as far as it has so many; the rest is masked."""
    there = min(work.experts_per_rank, work.top_k)
    indices = np.full((tokens, work.top_k), -1, np.int64)
    for row in indices:
        row[:there] = rng.permutation(work.experts_per_rank)[:there]
    return indices


def _masked(rng: np.random.Generator, work: Workload, tokens: int) -> Indices:
    """Half of all routes, and every fourth token altogether."""
    indices = _uniform(rng, work, tokens)
    indices[rng.random(indices.shape) < 0.5] = -1
    indices[::4] = -1
    return indices


def _none(rng: np.random.Generator, work: Workload, tokens: int) -> Indices:
    return np.full((tokens, work.top_k), -1, np.int64)


def _repeated(rng: np.random.Generator, work: Workload, tokens: int) -> Indices:
    """Each draws anew, so that a token may go to the same expert more than once."""
    return rng.integers(0, work.experts, (tokens, work.top_k))


ROUTINGS: dict[str, _Draw] = {
    "uniform": _uniform,
    "skewed": _skewed,
    "one-expert": _one_expert,
    "one-rank": _one_rank,
    "masked": _masked,
    "none": _none,
    "repeated": _repeated,
}

"""Tokens and routes of a round, and what dispatch and combine have to make of them: said in plain loops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass
class Batch:
    """One rank's share of a round. x: uint8 [T, hidden]; scales: float32 [T, blocks]; indices, weights: [T, top_k]."""

    x: Array
    scales: Array
    indices: Array
    weights: Array


def draw(
    random: np.random.Generator, tokens: int, hidden: int, experts: int, top_k: int, block: int, masked: float = 0.0
) -> Batch:
    """Whole numbers throughout, so that sums are exact. masked: share of routes that go nowhere."""
    indices = np.stack([random.permutation(experts)[:top_k] for _ in range(tokens)] or [np.empty(0, int)])
    indices = indices.reshape(tokens, top_k).astype(np.int32)
    indices[random.random(indices.shape) < masked] = -1
    return Batch(
        random.integers(0, 256, (tokens, hidden), np.uint8),
        random.integers(1, 100, (tokens, -(-hidden // block))).astype(np.float32),
        indices,
        random.integers(1, 4, (tokens, top_k)).astype(np.float32),
    )


def ranks_of(experts_per_rank: Sequence[int], indices: Array) -> Array:
    """Of each expert; -1 of -1."""
    owners = [rank for rank, count in enumerate(experts_per_rank) for _ in range(count)]
    return np.array([*owners, -1])[indices]


def split_at_random(random: np.random.Generator, experts: int, world: int) -> list[int]:
    """Experts of each rank, often 0."""
    cuts = np.sort(random.integers(0, experts + 1, world - 1))
    return np.diff(cuts, prepend=0, append=experts).tolist()


def expected_rows(batches: list[Batch], first: int, count: int) -> list[list[tuple[int, int, int]]]:
    """Of each expert from `first` on: (source, token, k) of its rows, in order."""
    return [
        [
            (source, token, k)
            for source, batch in enumerate(batches)
            for token in range(len(batch.x))
            for k in range(batch.indices.shape[1])
            if batch.indices[token, k] == expert
        ]
        for expert in range(first, first + count)
    ]


def expert_of_row(counts: Array, offsets: Array, first: int, rows: int) -> Array:
    """The expert that each row is for, -1 for rows of padding."""
    experts = np.full(rows, -1)
    for local, (count, offset) in enumerate(zip(counts, offsets[:-1], strict=True)):
        experts[offset : offset + count] = first + local
    return experts


def outputs(x: Array, experts: Array) -> Array:
    """What experts make of rows: float32, small whole numbers that tell token and expert."""
    return ((x.astype(np.int64) * (experts[:, None] + 1)) % 31).astype(np.float32)


def expected_sums(batch: Batch) -> Array:
    """What combine returns for these outputs."""
    sums = np.zeros(batch.x.shape, np.float32)
    for token, k in np.argwhere(batch.indices >= 0):
        made = outputs(batch.x[token : token + 1], batch.indices[token : token + 1, k])
        sums[token] += batch.weights[token, k] * made[0]
    return sums


def to_bfloat16(values: Array) -> Array:
    """As numpy has it, uint16. For numbers that bfloat16 has exactly."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    assert not (bits & 0xFFFF).any(), "not exact in bfloat16"
    return (bits >> 16).astype(np.uint16)


def misaligned(array: Any) -> Any:
    """The same values, one byte off."""
    copy = np.frombuffer(bytearray(array.nbytes + 1), array.dtype, array.size, 1).reshape(array.shape)
    copy[...] = array
    return copy

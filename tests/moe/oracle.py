"""What dispatch and combine have to give, worked out in one process, plainly: the whole definition, in loops.

Rows of an expert are in the order of (source rank, token, k). Experts here compute with whole numbers that bfloat16
has exactly, so results are compared bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.moe.workloads import Workload, decoded, encoded

Array = npt.NDArray[Any]
_VALUES = 8  # what experts give is less: with weights up to 2 and a top-k up to 16 sums stay below 256


@dataclass(frozen=True)
class Route:
    """One row: the token it is of, and which of the token's experts."""

    source: int
    token: int
    k: int


@dataclass(frozen=True)
class Received:
    """What one rank has to have after dispatch, its experts one after another, without padding."""

    counts: npt.NDArray[np.int32]  # [experts of the rank]
    routes: list[Route]  # [rows]
    x: Array  # [rows, hidden]
    scales: Array | None  # [rows, blocks]


def received(work: Workload, rank: int) -> Received:
    """By rank `rank`."""
    own = work.experts_of(rank)
    of_expert: list[list[Route]] = [[] for _ in own]
    for source in range(work.ranks):
        for (token, k), expert in np.ndenumerate(work.indices(source)):
            if expert in own:
                of_expert[expert - own.start].append(Route(source, token, k))
    routes = [route for group in of_expert for route in group]
    counts = np.array([len(group) for group in of_expert], np.int32)
    return Received(counts, routes, _rows(work, routes, work.x), _rows(work, routes, work.scales))


def _rows(work: Workload, routes: list[Route], data: Any) -> Any:
    of_source = [data(source) for source in range(work.ranks)]
    if of_source[0] is None:
        return None
    empty = np.empty((0, of_source[0].shape[1]), of_source[0].dtype)
    return np.stack([of_source[r.source][r.token] for r in routes]) if routes else empty


def expert(work: Workload, number: int, x: Array, scales: Array | None) -> Array:
    """What expert `number` makes of rows: [rows, hidden] of out_dtype; whole numbers below _VALUES."""
    values = decoded(x, work.dtype) + number
    if scales is not None:
        assert work.scale_block is not None
        values += np.repeat(scales.astype(np.int64), work.scale_block, axis=1)[:, : work.hidden]
    return encoded(values % _VALUES, work.out_dtype)


def combined(work: Workload, rank: int, weights: npt.NDArray[np.float32] | None = None) -> Array:
    """What rank `rank` has to have after combine: [tokens, hidden] of out_dtype.

    The sum over k from left to right in float32, each product and each sum rounded. weights: if not the workload's.
    """
    x, scales, indices = work.x(rank), work.scales(rank), work.indices(rank)
    weights = work.weights(rank) if weights is None else weights
    sums = np.zeros((work.count(rank), work.hidden), np.float32)
    for (token, k), number in np.ndenumerate(indices):
        if number >= 0:
            row_scales = None if scales is None else scales[token : token + 1]
            given = expert(work, int(number), x[token : token + 1], row_scales)[0]
            sums[token] += weights[token, k] * decoded(given, work.out_dtype).astype(np.float32)
    return rounded(sums, work.out_dtype)


def rounded(values: npt.NDArray[np.float32], dtype: str) -> Array:
    """To the nearest, ties to even; bfloat16 as its bits."""
    if dtype == "bfloat16":
        bits = values.view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return values.astype(dtype)


def doubled(work: Workload, combined: Array) -> Array:
    """What accumulating onto it once more gives, where all are whole numbers."""
    return encoded(2 * decoded(combined, work.out_dtype), work.out_dtype)

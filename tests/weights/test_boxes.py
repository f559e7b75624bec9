"""Which boxes meet: as a comparison of all with all says it, and without making one where there are many."""

from __future__ import annotations

import tracemalloc

import numpy as np
import numpy.typing as npt
import pytest

from crossrail.weights.planning import boxes as boxes_module
from crossrail.weights.planning.boxes import Boxes, overlaps
from tests.support.seeds import Seed

Pair = tuple[int, int, tuple[int, ...], tuple[int, ...]]


def some(rng: np.random.Generator, count: int, dims: int, keys: int) -> Boxes:
    start = rng.integers(0, 12, (count, dims))
    return Boxes(np.sort(rng.integers(0, keys, count)), start, start + rng.integers(0, 5, (count, dims)))


def found(left: Boxes, right: Boxes) -> list[Pair]:
    pairs = overlaps(left, right)
    return [(int(a), int(b), tuple(low), tuple(high)) for a, b, low, high in zip(*pairs, strict=True)]


def all_with_all(left: Boxes, right: Boxes) -> list[Pair]:
    pairs: list[Pair] = []
    for a in range(len(left.key)):
        for b in range(len(right.key)):
            low, high = np.maximum(left.start[a], right.start[b]), np.minimum(left.stop[a], right.stop[b])
            if left.key[a] == right.key[b] and (low < high).all():
                pairs.append((a, b, tuple(low), tuple(high)))
    return pairs


@pytest.mark.parametrize("few", [0, 1 << 30], ids=["many", "few"])
def test_overlaps_are_those_of_all_with_all(few: int, seed: Seed, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = seed.rng()
    monkeypatch.setattr(boxes_module, "_FEW", few)

    for _ in range(60):
        dims, keys = int(rng.integers(1, 4)), int(rng.integers(1, 6))
        left, right = (some(rng, int(rng.integers(0, 50)), dims, keys) for _ in range(2))
        in_any_order = rng.permutation(len(left.key))
        left = Boxes(*(column[in_any_order] for column in left))

        assert found(left, right) == all_with_all(left, right)


def pieces(count: int, dim: int, size: int) -> Boxes:
    """A matrix of a hundred rows and columns or more, in so many pieces along one dimension."""
    start: npt.NDArray[np.int64] = np.zeros((count, 2), np.int64)
    start[:, dim] = np.arange(count) * size
    stop = np.full((count, 2), 100)
    stop[:, dim] = start[:, dim] + size
    return Boxes(np.zeros(count, np.int64), start, stop)


@pytest.mark.parametrize("dim", [0, 1])
def test_thousands_of_pieces_of_one_parameter_are_not_all_compared(dim: int) -> None:
    shards, cells = pieces(6000, dim, 3), pieces(9000, dim, 2)
    tracemalloc.start()

    pairs = overlaps(cells, shards)

    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(pairs.left) == 12000
    assert peak_bytes < 32 << 20  # 54 million pairs, some millions of them at a time, took hundreds of MiB, and seconds

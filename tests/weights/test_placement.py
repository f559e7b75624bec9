"""Boxes of shards, against arrays that are divided for real."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossrail.errors import UsageError
from crossrail.weights.inventory.placement import Placement, Replicate, Shard, local_box


def divided(array: np.ndarray, axis: int, index: int, count: int) -> np.ndarray:
    size = -(-array.shape[axis] // count)
    return np.take(array, range(size * index, min(size * (index + 1), array.shape[axis])), axis)


@given(st.data())
def test_box_is_what_dividing_leaves(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    mesh = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    coordinate = [data.draw(st.integers(0, count - 1)) for count in mesh]
    placements: list[Placement] = [
        Replicate() if data.draw(st.booleans()) else Shard(data.draw(st.integers(0, len(shape) - 1))) for _ in mesh
    ]
    array = np.arange(np.prod(shape)).reshape(shape)

    box = local_box(shape, mesh, coordinate, placements)

    left = array
    for placed, index, count in zip(placements, coordinate, mesh, strict=True):
        if isinstance(placed, Shard):
            left = divided(left, placed.dim, index, count)
    np.testing.assert_array_equal(array[tuple(slice(*piece) for piece in box)], left)


def test_strided_shard_divides_what_tensor_parallelism_left() -> None:
    # 10 rows by 2 of tensor parallelism, then each 5 by FSDP 2: 3 and 2.
    boxes = {
        (fsdp, tp): local_box((10,), (2, 2), (fsdp, tp), (Shard(0, split_factor=2), Shard(0)))[0]
        for fsdp in range(2)
        for tp in range(2)
    }

    assert boxes == {(0, 0): (0, 3), (1, 0): (3, 5), (0, 1): (5, 8), (1, 1): (8, 10)}


def test_more_ranks_than_rows_leaves_some_empty() -> None:
    assert [local_box((3,), (4,), (rank,), (Shard(0),))[0] for rank in range(4)] == [(0, 1), (1, 2), (2, 3), (3, 3)]


@pytest.mark.parametrize(
    ("mesh", "coordinate", "placements", "text"),
    [
        ((2,), (0, 0), (Shard(0),), "differ"),
        ((2,), (2,), (Shard(0),), "not in a mesh"),
        ((2,), (0,), (Shard(1),), "dimension 1"),
        ((2, 2), (0, 0), (Shard(0, split_factor=3), Shard(0)), "split_factor=3"),
    ],
)
def test_placement_that_is_none_refused(
    mesh: tuple[int, ...], coordinate: tuple[int, ...], placements: tuple[Placement, ...], text: str
) -> None:
    with pytest.raises(UsageError, match=text):
        local_box((8,), mesh, coordinate, placements)

"""Worst cases are reached and never passed: by all routings of small shapes, and by random ones of larger shapes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from crossrail import _core
from crossrail.moe.bounds import Bounds, output_rows, private_rows, rows_per_expert
from tests.moe.batches import split_at_random
from tests.support.seeds import Seed


@dataclass(frozen=True)
class Shape:
    """As Config has it, and the number of ranks."""

    world: int
    experts: int
    top_k: int
    max_tokens: int
    padding: int = 1
    layout: str = "grouped"
    capacity_factor: float | None = None
    private_tokens: int | None = 2
    stride_bytes: int = 32
    y_bytes: int = 64
    split: tuple[int, ...] = ()

    @property
    def groups(self) -> int:
        return self.world

    @property
    def experts_per_rank_max(self) -> int:
        return max(self.split) if self.split else -(-self.experts // self.world)

    def placement(self, counts: Any) -> Any:
        masked = rows_per_expert(self) if self.layout == "masked" else 0
        layout = _core.moe.Layout(
            world=self.world,
            experts=self.experts,
            experts_per_rank=self.split,
            top_k=self.top_k,
            max_tokens=self.max_tokens,
            private_rows=private_rows(self),
            padding=self.padding,
            rows_per_expert=masked,
            node_of_rank=list(range(self.world)),  # all are far
        )
        return _core.moe.Placement(layout, np.ascontiguousarray(counts, np.int32))


def counts_of_one_rank(shape: Shape) -> set[tuple[tuple[int, ...], ...]]:
    """All tables of counts that tokens with different experts can make."""
    choices = [c for k in range(shape.top_k + 1) for c in itertools.combinations(range(shape.experts), k)]
    of_group = {
        tuple(sum(e in chosen for chosen in tokens) for e in range(shape.experts))
        for tokens in itertools.combinations_with_replacement(choices, shape.max_tokens)
    }
    return set(itertools.product(of_group, repeat=shape.world))


@pytest.mark.parametrize("padding", [1, 2, 3, 5])
@pytest.mark.parametrize(
    ("world", "experts", "top_k", "max_tokens"), [(1, 3, 2, 3), (2, 4, 2, 1), (2, 2, 2, 4), (1, 2, 1, 5), (2, 4, 3, 2)]
)
def test_worst_case_is_the_worst_of_all_routings(
    world: int, experts: int, top_k: int, max_tokens: int, padding: int
) -> None:
    shape = Shape(world, experts, top_k, max_tokens, padding)
    placements = [shape.placement(counts) for counts in counts_of_one_rank(shape)]
    bounds = Bounds.of(shape, world - 1)
    assert bounds.output_rows == output_rows(shape) == max(p.rows_needed(0) for p in placements)
    assert bounds.far_rows == max(p.far_rows_needed(0) for p in placements)
    assert bounds.returned_rows == max(len(p.return_far(0)[0]) for p in placements)
    far_routes = max(sum(p.routes(0, rank) for rank in range(1, world)) for p in placements)
    assert bounds.sent_rows >= far_routes and bounds.result_rows == bounds.sent_rows


@pytest.mark.parametrize(("split", "most"), [((1, 3), 1), ((3, 1), 0), ((0, 4), 1), ((0, 3, 0), 1)])
def test_each_rank_reaches_its_own_room_and_the_one_with_most_experts_that_for_far_ones(
    split: tuple[int, ...], most: int
) -> None:
    shape = Shape(len(split), sum(split), 2, 1 if len(split) > 2 else 2, padding=2, split=split)
    placements = [shape.placement(counts) for counts in counts_of_one_rank(shape)]
    bounds = Bounds.of(shape, len(split) - 1)
    for rank in range(len(split)):
        rows, far = (max(getattr(p, what)(rank) for p in placements) for what in ("rows_needed", "far_rows_needed"))
        returned = max(len(p.return_far(rank)[0]) for p in placements)
        assert rows == output_rows(shape, split[rank])
        assert far <= bounds.far_rows and returned <= bounds.returned_rows
        assert rank != most or (rows, far, returned) == (bounds.output_rows, bounds.far_rows, bounds.returned_rows)


@pytest.mark.parametrize("layout", ["grouped", "masked"])
def test_no_routing_passes_the_bounds_of_larger_shapes(seed: Seed, layout: str) -> None:
    rng = seed.rng()
    for _ in range(30):
        world, experts, top_k = int(rng.integers(1, 6)), int(rng.integers(4, 30)), int(rng.integers(1, 5))
        split = tuple(split_at_random(rng, experts, world)) if rng.random() < 0.5 else ()
        shape = Shape(world, experts, top_k, int(rng.integers(1, 40)), int(rng.integers(1, 20)), layout, split=split)
        popular = rng.integers(2, experts + 1)
        counts = np.zeros((world, experts), np.int32)
        for group in range(world):
            for _ in range(shape.max_tokens):
                counts[group, rng.permutation(popular)[:top_k]] += 1
        placement, bounds = shape.placement(counts), Bounds.of(shape, world - 1)
        for rank in range(world):
            assert placement.rows_needed(rank) <= bounds.output_rows
            assert placement.far_rows_needed(rank) <= bounds.far_rows
            assert layout == "grouped" or placement.fullest_expert(rank) <= bounds.rows_per_expert


def test_documented_figures_of_the_decode_shape() -> None:
    """128 tokens on each of 64 ranks, 256 experts, top 8, hidden 7168 in fp8 with scales out and bfloat16 back."""
    shape = Shape(64, 256, 8, 128, 16, private_tokens=None, stride_bytes=7392, y_bytes=14336)
    bounds = Bounds.of(shape, 56)
    assert bounds.output_rows == 64 * 128 * 4  # all tokens to all four experts fill their blocks
    assert bounds.private_rows == 19  # 4 experts' worth of 4 routes each, and a fifth
    assert bounds.far_rows == 56 * 128 * 4
    assert bounds.returned_rows == 56 * 128 * 4 and bounds.result_rows == 128 * 8
    half = Shape(64, 256, 8, 128, 16, capacity_factor=2.0, private_tokens=None)
    assert output_rows(half) == 2 * 256 * 4 + 4 * 15


@pytest.mark.parametrize("layout", ["grouped", "masked"])
def test_there_is_room_for_a_row_however_small_the_capacity(layout: str) -> None:
    assert output_rows(Shape(2, 2, 2, 1, layout=layout, capacity_factor=0.3)) == 1


def test_without_far_groups_nothing_is_kept_for_rails() -> None:
    bounds = Bounds.of(Shape(4, 8, 2, 16), 0)
    assert (bounds.far_rows, bounds.sent_rows, bounds.returned_rows, bounds.result_rows, bounds.far_bytes) == (0,) * 5

"""Nodes of any sizes: which ranks share memory, as asked for and as found, and whole rounds of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from crossrail.errors import UsageError
from crossrail.moe import memory_bounds
from crossrail.moe.nodes import check_nodes, nodes_found, nodes_of
from tests.moe.batches import draw
from tests.moe.ranks import Ranks
from tests.moe.test_rounds import whole_round
from tests.support.seeds import Seed

SIZES: dict[str, Any] = {"experts": 9, "hidden": 40, "top_k": 3, "max_tokens": 12, "scale_block": 16,
                         "out_dtype": "float32"}  # fmt: skip
OVER_TCP: dict[str, Any] = {"transport": "tcp", "rails": ["127.0.0.1"]}


def test_nodes_that_are_asked_for_are_of_consecutive_ranks() -> None:
    assert nodes_of(4, 2) == (0, 0, 1, 1)
    assert nodes_of(4, [3, 1]) == (0, 0, 0, 1)


def test_ranks_share_memory_wherever_all_of_them_can_map_each_other() -> None:
    assert nodes_found([{0, 2}, {1}, {0, 2}]) == (0, 1, 0)
    assert nodes_found([{0, 1, 2}, {0, 1, 2}, {0, 1, 2}]) == (0, 0, 0)
    assert nodes_found([{0, 1}, {1}]) == (0, 1)  # one of them cannot
    assert nodes_found([{0, 1}, {0, 1, 2}, {1, 2}]) == (0, 0, 1)  # not all


def test_a_rank_that_cannot_map_another_of_its_node_is_named() -> None:
    check_nodes((0, 0, 1), [{0, 1}, {0, 1}, {2}], [2, 1])
    with pytest.raises(UsageError, match=r"node_size is \[2, 1\], and rank 1 cannot map the memory of rank 0\. Next: "):
        check_nodes((0, 0, 1), [{0, 1}, {1}, {2}], [2, 1])


def rounds(ranks: Ranks, seed: Seed) -> None:
    random = seed.rng()
    for number in range(4):
        counts = random.integers(0, 13, len(ranks)) if number else np.zeros(len(ranks), int)
        batches = [draw(random, int(n), 40, 9, 3, 16, 0.1) for n in counts]
        ranks.each(lambda part, rank, now=batches, i=number: whole_round(part, rank, now, in_place=i % 2 == 0))


@pytest.mark.parametrize("apart", [3, 1])
def test_ranks_of_one_host_share_memory_whoever_else_there_is(apart: int, nothing_leaks: None, seed: Seed) -> None:
    """One rank is reached by tcp alone, as if it were elsewhere; in the middle of the others, too."""
    others = [rank for rank in range(4) if rank != apart]
    with Ranks(4, [OVER_TCP if rank == apart else {} for rank in range(4)], **SIZES) as ranks:
        for rank, part in enumerate(ranks.parts):
            mates = [] if rank == apart else [other for other in others if other != rank]
            assert f"mapped memory: ranks {mates}\n" in part.explain()
            assert part.node_size == len(mates) + 1
        rounds(ranks, seed)


@pytest.mark.parametrize("options", [{}, {"on_lost": "mask"}, {"layout": "masked"}, {"proxy": "thread"}], ids=str)
@pytest.mark.parametrize("node_size", [[3, 1], [1, 2, 1, 1], np.array([1, 4])], ids=str)
def test_rows_and_sums_are_exact_between_nodes_of_any_sizes(
    node_size: Any, options: dict[str, Any], nothing_leaks: None, seed: Seed
) -> None:
    with Ranks(sum(node_size), node_size=node_size, **SIZES, **options) as ranks:
        assert [part.node_size for part in ranks.parts] == [size for size in node_size for _ in range(size)]
        rounds(ranks, seed)


def test_ranks_that_name_the_same_nodes_in_two_ways_agree(seed: Seed) -> None:
    with Ranks(2, node_size=1, **SIZES) as ranks:
        assert ranks.parts[0].config.node_size == 1
    with Ranks(2, node_size=[1, 1], **SIZES) as ranks:
        assert ranks.parts[0].config.node_size == 1


@pytest.mark.parametrize("node_sums", [False, True])
def test_memory_is_what_was_foretold(node_sums: bool) -> None:
    with Ranks(5, node_size=[1, 4], node_sums=node_sums, **SIZES) as ranks:
        for rank, part in enumerate(ranks.parts):
            told = memory_bounds(world=5, rank=rank, node_size=[1, 4], node_sums=node_sums, **SIZES)
            far = part._far
            assert told.far_bytes == far.rows.nbytes + far.routes.nbytes
            assert told.board_bytes == part._board.region.nbytes

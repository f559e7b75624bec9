"""GraphAllToAll in host memory, for groups of ranks that hold the same tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from crossrail.errors import WaitTimeout
from crossrail.moe import AllToAll
from crossrail.moe.graph import GraphAllToAll
from crossrail.moe.graph.rounds import GraphRound
from tests.moe.batches import Batch, draw, expected_sums, split_at_random
from tests.moe.graph_rounds import check, given, made_of
from tests.moe.ranks import Ranks
from tests.moe.test_rounds import answer
from tests.moe.test_torch_gpu import BLOCK, CONFIG, EXPERTS, HIDDEN, TCP, TOKENS, TOP_K, batches_of
from tests.support.seeds import Seed


@pytest.mark.parametrize("engine", [{}, TCP], ids=["shm", "tcp"])
@pytest.mark.parametrize("options", [{}, {"private_tokens": 1, "layout": "grouped"}], ids=str)
@pytest.mark.parametrize(("size", "dp_size"), [(4, 2), (6, 3), (3, 3), (6, 2)])
def test_ranks_that_hold_the_same_tokens(
    size: int, dp_size: int, options: dict[str, Any], engine: dict[str, Any], seed: Seed
) -> None:
    """The last but one is an AllToAll; of the first and the last, kernels reach nobody."""
    random = seed.rng()
    split = None if seed.number() % 2 else split_at_random(random, EXPERTS, size)

    def make(engine: Any, group: Any, **config: Any) -> Any:
        if group.rank == size - 2:
            return AllToAll(engine, group, node_size=1, **config)
        return GraphAllToAll(engine, group, peer_access=group.rank not in (0, size - 1), **config)

    def run(part: Any, rank: int, batches: list[Batch]) -> None:
        mine = batches[rank // dp_size]
        if rank != size - 2:
            x, scales, indices, weights = given(part, mine)
            got = part.dispatch(x, scales, indices, weights)
            check(part, got, batches)
            sums = part.combine(made_of(part, got), got)
            assert np.array_equal(sums.numpy(), expected_sums(mine))
        else:
            got = part.dispatch(mine.x, mine.scales, mine.indices, mine.weights)
            answer(part, got, in_place=False)
            assert np.array_equal(part.combine_recv(got), expected_sums(mine))

    config = CONFIG | {"private_tokens": TOKENS * TOP_K, "layout": "masked"} | options
    with Ranks(size, engine, make, dp_size=dp_size, experts_per_rank=split, **config) as ranks:
        for _ in range(4):
            batches = batches_of(random, size // dp_size)
            ranks.each(lambda part, rank, b=batches: run(part, rank, b))


@pytest.mark.parametrize("split", [None, (0, 0, 0, EXPERTS)], ids=str)
@pytest.mark.parametrize("dp_size", [2, 4])
def test_ranks_that_hold_the_same_tokens_and_reach_each_other(
    dp_size: int, split: tuple[int, ...] | None, seed: Seed
) -> None:
    """All experts on one rank: its tables are full."""
    random = seed.rng()
    with Ranks(4, None, GraphAllToAll, dp_size=dp_size, experts_per_rank=split, **CONFIG) as ranks:
        for _ in range(4):
            groups = [draw(random, TOKENS, HIDDEN, EXPERTS, TOP_K, BLOCK) for _ in range(4 // dp_size)]
            batches = [batch for batch in groups for _ in range(dp_size)]

            def run(part: GraphAllToAll, rank: int, batches: list[Batch] = batches) -> None:
                got = part.dispatch(*given(part, batches[rank]))
                check(part, got, batches[::dp_size])
                assert np.array_equal(part.combine(made_of(part, got), got).numpy(), expected_sums(batches[rank]))

            ranks.each(run)


def go_on(part: GraphAllToAll, opened: GraphRound, batches: list[Batch] | None) -> None:
    """batches: whose rows are to be there."""
    got = part.dispatch_recv(opened)
    if batches is not None:
        check(part, got, batches)
    part.combine(made_of(part, got), got)
    part.check()


def test_rows_are_not_awaited_of_ranks_that_send_us_none(seed: Seed) -> None:
    """Else nobody would say that rank 1, which sends no rows to ranks 0 and 2, is late with them: a hang."""
    batches = [batch for batch in batches_of(seed.rng(), 2) for _ in range(2)]
    with Ranks(4, None, GraphAllToAll, dp_size=2, **CONFIG, timeout_s=0.5) as ranks:
        thread = ranks.parts[1]._thread
        publish = thread.publish
        thread.publish = lambda word, *rest: None if word == "packed" else publish(word, *rest)

        def run(part: GraphAllToAll, rank: int) -> None:
            opened = part.dispatch_send(*given(part, batches[rank]))
            if rank == 1:
                return
            with pytest.raises(WaitTimeout, match=r"rank [13] .* within 0.5 s"):
                go_on(part, opened, batches[::2] if rank != 3 else None)

        ranks.each(run)

"""How the rounds of a GraphAllToAll end on all ranks, once they have on one."""

from __future__ import annotations

from typing import Any

import pytest

from crossrail.errors import UsageError
from crossrail.moe.graph import GraphAllToAll
from tests.moe.graph_rounds import whole_round
from tests.moe.ranks import Ranks
from tests.moe.test_torch_gpu import CONFIG, EXPERTS, TCP, batches_of
from tests.moe.test_torch_graph import dispatch_and_check
from tests.support.limits import WAIT_S
from tests.support.seeds import Seed


@pytest.mark.parametrize("engine", [{}, TCP], ids=["shm", "tcp"])
def test_a_rank_whose_rounds_have_ended_tells_the_others_why(engine: dict[str, Any], seed: Seed) -> None:
    batches = batches_of(seed.rng(), 2)

    def run(part: GraphAllToAll, rank: int) -> None:
        whole_round(part, rank, batches)
        if rank == 0:
            batches[0].indices[0, 0] = EXPERTS
            with pytest.raises(UsageError, match=f"{EXPERTS}"):
                dispatch_and_check(part, batches[0])
            return
        with pytest.raises(UsageError, match=r"rank 0 .* has closed its AllToAll .*: its round failed: UsageError: "):
            dispatch_and_check(part, batches[rank])

    with Ranks(2, engine, GraphAllToAll, **CONFIG, timeout_s=100 * WAIT_S) as ranks:
        ranks.each(run)

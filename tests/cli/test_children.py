"""Several processes that are told the same at once: answers in their order, and the first that fails is heard."""

from __future__ import annotations

import pytest

from crossrail.cli.child import Child, ChildFailed, Children
from tests.moe.workloads import Workload


def test_answers_are_in_order_and_the_first_failure_is_told() -> None:
    with Children([Child("tests.moe.fleet_rank", f"rank {rank}") for rank in range(2)]) as both:
        addresses = both.each("open", [{"name": f"rank-{rank}", "transport": "shm"} for rank in range(2)])
        assert [b"rank-0" in bytes.fromhex(addresses[0]), b"rank-1" in bytes.fromhex(addresses[1])] == [True, True]

        # Rank 0 dispatches, and waits for rank 1, which does not know what to do.
        both.all("join", addresses=addresses)
        work = Workload(2, experts=4, hidden=64, top_k=2, max_tokens=4, routing="uniform", seed=1).to_json()
        common = {"work": work, "options": {}}
        with pytest.raises(ChildFailed, match=r"rank 1 .*KeyError: 'unheard of'"):
            both.each("round", [common | {"style": "whole"}, common | {"style": "unheard of"}])

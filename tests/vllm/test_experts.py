"""CrossrailPrepareAndFinalize in vLLM's own kernel, between processes, with the experts that vLLM has for reference."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from crossrail.cli.child import Child, Children

RANKS = 2
DEADLINE_S = 600.0  # each imports vLLM first


@pytest.fixture(scope="module")
def ranks() -> Iterator[Children]:
    with Children([Child("tests.vllm.experts_rank", f"rank {rank}") for rank in range(RANKS)]) as ranks:
        addresses = ranks.each("open", [{"name": f"rank-{rank}"} for rank in range(RANKS)], DEADLINE_S)
        ranks.all("meet", DEADLINE_S, addresses=addresses)
        yield ranks


@pytest.mark.parametrize("kind", ["AllToAll", "GraphAllToAll"])
@pytest.mark.parametrize(("top_k", "weight_on_input"), [(3, False), (1, False), (1, True)])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 3e-2)])
def test_a_layer_equals_all_experts_in_one_process(
    ranks: Children, kind: str, top_k: int, weight_on_input: bool, dtype: str, tolerance: float
) -> None:
    options = {"kind": kind, "top_k": top_k, "weight_on_input": weight_on_input, "dtype": dtype}
    assert max(ranks.all("layer", DEADLINE_S, **options)) < tolerance

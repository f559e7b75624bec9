"""Rounds of GraphAllToAll by Triton's kernels, interpreted in host memory."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from crossrail.moe.graph import GraphAllToAll
from crossrail.moe.graph.triton import TritonGraphKernels
from tests.moe.batches import Batch, draw, expected_sums
from tests.moe.graph_rounds import check, check_writes_to_others, given, made_of, whole_round
from tests.moe.ranks import Ranks
from tests.moe.test_torch_gpu import BLOCK, CONFIG, EXPERTS, HIDDEN, TCP, TOKENS, TOP_K
from tests.support.seeds import Seed

_ONE_AT_A_TIME = threading.Lock()  # Triton's interpreter is for one thread


class OneAtATime:
    """Of a rank: calls one kernel while no other rank does."""

    name = "triton"

    def __init__(self, kernels: TritonGraphKernels) -> None:
        self._kernels = kernels

    def __getattr__(self, name: str) -> Any:
        kernel = getattr(self._kernels, name)

        def call(*arguments: Any) -> None:
            with _ONE_AT_A_TIME:
                kernel(*arguments)

        return call


@pytest.mark.parametrize("engine", [{}, TCP], ids=["shm", "tcp"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"private_tokens": 1, "layout": "grouped", "padding": 2},
        {"hidden": 45},
        {"experts_per_rank": (EXPERTS - 1, 1)},
    ],
    ids=str,
)
def test_rounds_are_exact(engine: dict[str, Any], options: dict[str, Any], seed: Seed) -> None:
    """With 45 numbers rows are moved byte by byte."""
    random = seed.rng()
    config = CONFIG | options
    with Ranks(2, engine, GraphAllToAll, kernels=OneAtATime(TritonGraphKernels()), **config) as ranks:
        for _ in range(3):
            tokens = [int(count) for count in random.integers(0, TOKENS + 1, 2)]
            batches = [draw(random, n, config["hidden"], EXPERTS, TOP_K, BLOCK, 0.1) for n in tokens]
            ranks.each(lambda part, rank, b=batches: whole_round(part, rank, b))


@pytest.mark.parametrize("split", [None, (0, EXPERTS)], ids=str)
def test_ranks_that_hold_the_same_tokens(split: tuple[int, ...] | None, seed: Seed) -> None:
    random = seed.rng()
    kernels = OneAtATime(TritonGraphKernels())
    with Ranks(2, None, GraphAllToAll, kernels=kernels, dp_size=2, experts_per_rank=split, **CONFIG) as ranks:
        for _ in range(3):
            batch = draw(random, TOKENS, HIDDEN, EXPERTS, TOP_K, BLOCK)

            def run(part: GraphAllToAll, rank: int, batch: Batch = batch) -> None:
                got = part.dispatch(*given(part, batch))
                check(part, got, [batch])
                assert np.array_equal(part.combine(made_of(part, got), got).numpy(), expected_sums(batch))

            ranks.each(run)


def test_kernels_write_nothing_to_others_once_the_rounds_have_ended(seed: Seed) -> None:
    batch = draw(seed.rng(), 4, HIDDEN, EXPERTS, TOP_K, BLOCK)
    with Ranks(2, None, GraphAllToAll, kernels=OneAtATime(TritonGraphKernels()), **CONFIG) as ranks:
        check_writes_to_others(ranks.parts[0], batch)


def test_sums_are_nan_once_the_rounds_have_ended() -> None:
    kernels = TritonGraphKernels()
    memory: Any = SimpleNamespace(sources=[torch.ones((3, 5))])
    where = torch.zeros((2, 1, 2), dtype=torch.int32)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        out = torch.zeros((2, 5), dtype=dtype)
        kernels.sum(memory, out, where, torch.ones((2, 1)), False, torch.tensor([7]))
        assert torch.equal(out, torch.ones_like(out))
        kernels.sum(memory, out, where, torch.ones((2, 1)), False, torch.tensor([-1]))
        assert out.isnan().all()


def test_an_index_beyond_32_bits_is_told_as_the_largest() -> None:
    kernels, number = TritonGraphKernels(), torch.tensor([2])
    routes = torch.zeros(8, dtype=torch.int32)
    board: Any = SimpleNamespace(routes=routes, routes_max=8, stride=8)
    kept = torch.zeros((3, 2), dtype=torch.int32)
    indices = torch.tensor([[1, (1 << 32) + 3], [-1, -(1 << 32) - 1], [2, 5]])
    most = (1 << 31) - 1
    kernels.share(board, kept, indices, torch.tensor([2]), number)
    assert kept.tolist() == [[1, most], [-1, most], [-1, -1]]
    assert routes.tolist() == [1, most, -1, most, -1, -1, -1, -1]
    kernels.share(board, kept, indices, torch.tensor([1 << 40]), number)
    assert kept.tolist() == [[1, most], [-1, most], [2, 5]]

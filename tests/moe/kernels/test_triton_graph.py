"""Rounds of GraphAllToAll by Triton's kernels, interpreted in host memory."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from crossrail.moe.graph import GraphAllToAll
from crossrail.moe.graph.triton import TritonGraphKernels
from tests.moe.batches import draw
from tests.moe.graph_rounds import whole_round
from tests.moe.ranks import Ranks
from tests.moe.test_torch_gpu import BLOCK, CONFIG, EXPERTS, TCP, TOKENS, TOP_K
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


@pytest.mark.parametrize(
    "options", [{}, {"private_tokens": 1, "layout": "grouped", "padding": 2}, {"hidden": 45}], ids=str
)
def test_rounds_are_exact(options: dict[str, Any], seed: Seed) -> None:
    """With 45 numbers rows are moved byte by byte."""
    random = seed.rng()
    config = CONFIG | options
    with Ranks(2, TCP, GraphAllToAll, kernels=OneAtATime(TritonGraphKernels()), **config) as ranks:
        for _ in range(3):
            tokens = [int(count) for count in random.integers(0, TOKENS + 1, 2)]
            batches = [draw(random, n, config["hidden"], EXPERTS, TOP_K, BLOCK, 0.1) for n in tokens]
            ranks.each(lambda part, rank, b=batches: whole_round(part, rank, b))

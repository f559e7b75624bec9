"""Dispatch and combine with rows on a true GPU, which several ranks share: over shm and tcp, through the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from crossrail.moe.kernels.reference import ReferenceKernels
from tests.moe.ranks import Ranks
from tests.moe.test_torch_gpu import CONFIG, TCP, batches_of, whole_round
from tests.support.seeds import Seed

pytestmark = [pytest.mark.hw, pytest.mark.timeout(180)]


@pytest.mark.parametrize("engine", [{}, TCP], ids=["shm", "tcp"])
@pytest.mark.parametrize("kernels", ["triton", "reference"])
def test_rounds_are_exact(engine: dict[str, Any], kernels: str, seed: Seed) -> None:
    random = seed.rng()
    who = None if kernels == "triton" else ReferenceKernels()
    with Ranks(3, engine, device="cuda:0", kernels=who, **CONFIG) as ranks:
        for number in range(6):
            batches = batches_of(random, 3)
            ranks.each(lambda part, rank, b=batches, n=number: whole_round(part, rank, b, in_place=bool(n % 2)))


def test_a_stream_of_its_own(seed: Seed) -> None:
    """Kernels of a round follow those that made x, on whatever stream is current."""
    random = seed.rng()

    def on_a_stream(part: Any, rank: int, batches: Any) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            whole_round(part, rank, batches)

    with Ranks(2, {}, device="cuda:0", **CONFIG) as ranks:
        for _ in range(4):
            batches = batches_of(random, 2)
            ranks.each(lambda part, rank, b=batches: on_a_stream(part, rank, b))


def test_decode_at_its_shape_gives_the_same_bits_again(seed: Seed) -> None:
    tokens, hidden, experts, top_k = 128, 7168, 16, 8
    sizes = {"experts": experts, "hidden": hidden, "top_k": top_k, "max_tokens": tokens, "dtype": "bfloat16",
             "scale_block": None}  # fmt: skip
    generator = np.random.default_rng(seed.number())
    x = torch.randn((tokens, hidden), device="cuda").to(torch.bfloat16)
    indices = torch.from_numpy(np.stack([generator.permutation(experts)[:top_k] for _ in range(tokens)])).cuda()
    weights = torch.rand((tokens, top_k), device="cuda")

    def once(part: Any, rank: int) -> Any:
        got = part.dispatch(x, None, indices, weights)
        return part.combine(got.x * 2, got).clone()

    with Ranks(2, {}, device="cuda:0", **sizes) as ranks:
        first, second = ranks.each(once), ranks.each(once)
        torch.cuda.synchronize()
        for one, other in zip(first, second, strict=True):
            assert torch.equal(one, other)

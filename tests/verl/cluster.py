"""Trainer and rollout ranks of one test, which do in one process what verl's controller has them do in theirs."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import torch

from tests.support.limits import WAIT_S

Weights = dict[str, torch.Tensor]


def as_sent(weight: torch.Tensor, dtype: torch.dtype | None = torch.bfloat16) -> torch.Tensor:
    return weight.to(dtype) if dtype is not None and weight.is_floating_point() else weight


def is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit."""
    same_form = a.dtype == b.dtype and a.shape == b.shape
    return same_form and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


class Cluster:
    def __init__(self, make: Callable[..., Any], trainers: int, rollouts: int, **options: Any) -> None:
        self.trainers = [make(**options) for _ in range(trainers)]
        self.rollouts = [make(**options) for _ in range(rollouts)]

    def begin(self) -> None:
        """As CheckpointEngineManager.build_process_group."""
        ranks = [*self.trainers, *self.rollouts]
        metadata = [rank.prepare() for rank in ranks]
        for_trainers, for_rollouts = type(ranks[0]).build_topology(len(self.trainers), len(self.rollouts), metadata)
        for group, arguments in ((self.trainers, for_trainers), (self.rollouts, for_rollouts)):
            assert all(len(of_all) == len(group) for of_all in arguments.values())
            for i, rank in enumerate(group):
                rank.init_process_group(**{name: of_all[i] for name, of_all in arguments.items()})

    async def update(self, weights: Sequence[Any], step: int | None = None) -> list[Any]:
        """weights: of each trainer rank. What each rank returned or raised, trainers first; of rollouts the weights."""
        self.begin()
        sent = [rank.send_weights(each, global_steps=step) for rank, each in zip(self.trainers, weights, strict=True)]
        came = [received(rank.receive_weights(global_steps=step)) for rank in self.rollouts]
        results = await asyncio.wait_for(asyncio.gather(*sent, *came, return_exceptions=True), WAIT_S)
        for rank in (*self.trainers, *self.rollouts):
            rank.finalize()
        return results


async def received(weights: AsyncIterator[tuple[str, torch.Tensor]]) -> Weights:
    return {name: tensor.clone() async for name, tensor in weights}


def some_weights(seed: int, long_bytes: int) -> Weights:
    """Of all kinds, one of them so long."""
    torch.manual_seed(seed)
    weights = {f"layers.{i}.weight": torch.randn(1 + 37 * i % 200, 64) for i in range(40)}
    weights["long"] = torch.randn(long_bytes // 4)
    weights["turned"] = torch.randn(30, 50).t()  # not contiguous
    weights["bfloat16"] = torch.randn(5, 7).to(torch.bfloat16)
    weights["ids"] = torch.arange(9)
    weights["none"] = torch.empty(0, 3)
    weights["scale"] = torch.tensor(3.5)
    weights["after"] = torch.randn(11)
    return weights

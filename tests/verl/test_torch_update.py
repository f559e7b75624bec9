"""Updates of verl's weights: every rollout rank gets every tensor, whoever sends which part of it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from crossrail.integrations.verl import memory, sending
from tests.verl.cluster import Cluster, Weights, as_sent, is_same, received, some_weights

Make = Callable[..., Any]


def assert_came(results: list[Any], weights: Weights, dtype: torch.dtype | None = torch.bfloat16) -> None:
    for result in results:
        assert isinstance(result, dict), result
        assert list(result) == list(weights)
        different = [name for name in weights if not is_same(result[name], as_sent(weights[name], dtype))]
        assert not different


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize(("trainers", "rollouts"), [(1, 1), (1, 3), (2, 3), (2, 2), (3, 2), (5, 1)])
async def test_every_rollout_rank_gets_every_tensor(make: Make, trainers: int, rollouts: int, transport: str) -> None:
    cluster = Cluster(make, trainers, rollouts, bucket_bytes=256 << 10, transport=transport)
    for step in range(3):
        weights = some_weights(step, long_bytes=1 << 20)  # longer than a bucket
        results = await cluster.update([iter(weights.items()) for _ in range(trainers)], step)
        assert_came(results[trainers:], weights)
        sent = [metrics["crossrail/sent_bytes"] for metrics in results[:trainers]]
        total = sum(as_sent(weight).nbytes for weight in weights.values())
        assert min(sent) > 0 and rollouts * total <= sum(sent) < rollouts * (total + 256 * 60), "no byte twice"


@pytest.mark.parametrize("dtype", [None, "float16", torch.float32])
async def test_weights_are_sent_as_what_the_rollout_takes(make: Make, dtype: Any) -> None:
    weights = some_weights(1, long_bytes=4096)
    results = await Cluster(make, 1, 1, rollout_dtype=dtype).update([weights.items()])
    assert_came(results[1:], weights, getattr(torch, dtype) if isinstance(dtype, str) else dtype)


async def test_weights_come_by_an_async_generator_too(make: Make) -> None:
    weights = some_weights(2, long_bytes=4096)

    async def each() -> AsyncIterator[tuple[str, torch.Tensor]]:
        for item in weights.items():
            yield item

    assert_came((await Cluster(make, 1, 1).update([each()]))[1:], weights)


async def test_no_weights_at_all(make: Make) -> None:
    results = await Cluster(make, 2, 1).update([iter(()), iter(())])
    assert results[2] == {}


async def test_tensor_stays_what_it_is_until_the_next_is_asked_for(make: Make) -> None:
    cluster = Cluster(make, 1, 1, bucket_bytes=64 << 10)
    weights = {str(i): torch.full((8 << 10,), float(i)) for i in range(40)}  # four to a bucket

    async def look() -> int:
        seen = 0
        async for name, tensor in cluster.rollouts[0].receive_weights():
            for _ in range(20):
                await asyncio.sleep(0)
            assert is_same(tensor, as_sent(weights[name])), name
            seen += 1
        return seen

    cluster.begin()
    _, seen = await asyncio.wait_for(asyncio.gather(cluster.trainers[0].send_weights(weights.items()), look()), 20)
    assert seen == 40


async def test_generator_may_reuse_pinned_memory(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, of which there is none here: what copy_() begins is done when kernels are waited for."""
    copy, late = torch.Tensor.copy_, list[tuple[torch.Tensor, torch.Tensor]]()

    def begin_copy(to: torch.Tensor, of: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if not non_blocking:
            return copy(to, of)
        late.append((to, of))
        return to

    def wait_for_kernels(devices: list[str]) -> None:
        assert devices == ["cuda:0"]
        while late:
            copy(*late.pop())

    monkeypatch.setattr(torch.Tensor, "copy_", begin_copy)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)
    monkeypatch.setattr(sending, "wait_for_kernels", wait_for_kernels)
    buffer = torch.empty(8 << 10, dtype=torch.bfloat16)
    weights = {str(i): torch.full_like(buffer, float(i)) for i in range(10)}  # several to a bucket

    def each() -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in weights.items():
            copy(buffer, weight)
            yield name, buffer

    cluster = Cluster(make, 1, 1, bucket_bytes=64 << 10)
    cluster.begin()
    cluster.trainers[0]._update.memory.devices = ["cuda:0"]
    both = asyncio.gather(cluster.trainers[0].send_weights(each()), received(cluster.rollouts[0].receive_weights()))
    _, came = await asyncio.wait_for(both, 20)
    assert_came([came], weights)


def test_buckets_are_registered_when_no_kernel_uses_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch gives memory out again that kernels of before are still writing."""
    events: list[Any] = []
    buffer = SimpleNamespace(is_cuda=True, device="cuda:1")
    engine: Any = SimpleNamespace(register=lambda given: events.append(given), alloc=lambda nbytes: None)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", lambda *_, **__: buffer)
        patch.setattr(memory, "wait_for_kernels", lambda devices: events.append(list(devices)))
        memory.Memory(engine, 1 << 20, "cuda:1")
    assert events == [["cuda:1"], buffer]

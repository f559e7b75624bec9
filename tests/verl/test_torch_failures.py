"""Updates that come to nothing: all ranks end soon and say why, and the next update goes well."""

import asyncio
from collections.abc import Callable, Generator, Iterator
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import crossrail as xr
from crossrail.integrations.verl import VerlUpdateFailed
from crossrail.integrations.verl.pairing import Rank
from crossrail.integrations.verl.waiting import Peers
from tests.support.limits import WAIT_S
from tests.support.tcp_wire import give_up
from tests.verl.cluster import Cluster, is_same, some_weights
from tests.verl.conftest import SECRET

Make = Callable[..., Any]


def many(count: int = 60) -> Iterator[tuple[str, torch.Tensor]]:
    """Many buckets of 64 KiB."""
    return ((f"w{i}", torch.full((32 << 10,), float(i))) for i in range(count))


async def assert_works(cluster: Cluster) -> None:
    weights = some_weights(9, long_bytes=300_000)
    results = await cluster.update([weights.items() for _ in cluster.trainers])
    for result in results[len(cluster.trainers) :]:
        assert isinstance(result, dict) and is_same(result["after"], weights["after"].to(torch.bfloat16))


async def test_rollout_that_cannot_load_a_tensor(make: Make) -> None:
    cluster = Cluster(make, 2, 2, bucket_bytes=64 << 10)
    cluster.begin()
    asked = []

    def noted() -> Iterator[tuple[str, torch.Tensor]]:
        for item in many():
            asked.append(item[0])
            yield item

    async def load(rank: Any, until: int) -> int:
        async with aclosing(rank.receive_weights()) as weights:
            seen = 0
            async for _ in weights:
                seen += 1
                if seen == until:
                    raise MemoryError("out of memory")
        return seen

    ends = await asyncio.wait_for(
        asyncio.gather(
            cluster.trainers[0].send_weights(noted()),
            cluster.trainers[1].send_weights(many()),
            load(cluster.rollouts[0], 3),
            load(cluster.rollouts[1], 1000),
            return_exceptions=True,
        ),
        WAIT_S,
    )
    assert isinstance(ends[0], VerlUpdateFailed) and "gave up" in str(ends[0])
    assert len(asked) == 60, "other trainer ranks may be gathering the rest"
    assert isinstance(ends[1], dict) and isinstance(ends[2], MemoryError) and ends[3] == 60, (
        "the other pair is not hurt"
    )
    await assert_works(cluster)


async def test_trainer_whose_weights_raise(make: Make) -> None:
    cluster = Cluster(make, 2, 1, bucket_bytes=64 << 10)

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield from many(20)
        raise RuntimeError("gathering failed")

    ends = await cluster.update([broken(), many()])
    assert isinstance(ends[0], RuntimeError) and "gathering failed" in str(ends[0])
    for end in ends[1:]:
        assert isinstance(end, VerlUpdateFailed) and "gave up" in str(end)
    await assert_works(cluster)


@pytest.mark.parametrize("where", ["tensor", "kernels"])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError, xr.CrossrailError])
async def test_trainer_on_which_something_else_fails_gathers_the_rest(
    make: Make, monkeypatch: pytest.MonkeyPatch, error: type[Exception], where: str
) -> None:
    """The other trainer ranks sit in a collective with it: it goes on until all have been gathered."""
    cluster = Cluster(make, 2, 1, bucket_bytes=64 << 10)
    asked: list[str] = []

    class Broken(torch.Tensor):
        def detach(self) -> torch.Tensor:
            raise error("no memory left")

    def noted() -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in many():
            asked.append(name)
            yield name, weight.as_subclass(Broken) if where == "tensor" and len(asked) == 20 else weight

    def fails(_devices: object) -> None:
        if len(asked) >= 20:
            raise error("no memory left")

    if where == "kernels":
        monkeypatch.setattr("crossrail.integrations.verl.sending.wait_for_kernels", fails)
    ends = await cluster.update([noted(), many()])
    assert isinstance(ends[0], error) and "no memory left" in str(ends[0])
    assert len(asked) == 60, "other trainer ranks may be gathering the rest"
    for end in ends[1:]:
        assert isinstance(end, Exception)
    monkeypatch.undo()
    monkeypatch.setenv("CROSSRAIL_SECRET", SECRET)
    await assert_works(cluster)


async def test_trainers_that_yield_different_weights(make: Make) -> None:
    cluster = Cluster(make, 2, 1, bucket_bytes=64 << 10)
    weights = dict(many(8))
    ends = await cluster.update([weights.items(), reversed(weights.items())])
    assert isinstance(ends[2], VerlUpdateFailed) and "in another order" in str(ends[2])
    await assert_works(cluster)


async def test_rank_that_died(make: Make) -> None:
    cluster = Cluster(make, 1, 2, bucket_bytes=64 << 10)
    cluster.begin()
    cluster.rollouts[0]._engine.close()
    with pytest.raises(VerlUpdateFailed, match=r"verl-.*(lost|died|closed|left|gone)"):
        await asyncio.wait_for(cluster.trainers[0].send_weights(many()), WAIT_S)
    with pytest.raises(VerlUpdateFailed, match="gave up"):
        async for _ in cluster.rollouts[1].receive_weights():
            pass


async def test_trainer_that_died_before_it_sent_anything(make: Make) -> None:
    cluster = Cluster(make, 1, 1)
    cluster.begin()
    cluster.rollouts[0]._engine.connect(cluster.trainers[0]._engine.address)
    cluster.trainers[0]._engine.close()
    with pytest.raises(VerlUpdateFailed, match="died"):
        async for _ in cluster.rollouts[0].receive_weights():
            pass


async def test_ranks_that_had_given_each_other_up_find_each_other_again(make: Make) -> None:
    cluster = Cluster(make, 2, 2, transport="tcp")
    for ends in zip(cluster.trainers, cluster.rollouts, strict=True):
        for one, other in (ends, ends[::-1]):
            give_up(one._engine, other._engine.address, WAIT_S)
    await assert_works(cluster)


async def test_trainer_that_does_not_come(make: Make) -> None:
    cluster = Cluster(make, 1, 1, timeout_s=0.2)
    cluster.begin()
    with pytest.raises(VerlUpdateFailed, match=r"bucket 0 of the weights: not within 0\.2 s \(timeout_s\), from verl-"):
        async for _ in cluster.rollouts[0].receive_weights():
            pass
    with pytest.raises(VerlUpdateFailed, match="gave up"):
        await asyncio.wait_for(cluster.trainers[0].send_weights(many()), WAIT_S)


async def test_rollout_that_does_not_take_buckets(make: Make) -> None:
    cluster = Cluster(make, 1, 1, bucket_bytes=64 << 10, timeout_s=0.5)
    cluster.begin()
    with pytest.raises(VerlUpdateFailed, match=r"bucket 2 of the weights: no room for it: not within 0\.5 s"):
        await asyncio.wait_for(cluster.trainers[0].send_weights(many()), WAIT_S)


async def test_who_does_not_take_what_goes_to_all_is_named() -> None:
    """The transfer itself only knows how many there are."""
    state = {b"one": "connected", b"two": "frozen"}
    engine = SimpleNamespace(peer_state=state.__getitem__)
    ranks = [Rank(name.decode(), name, b"", b"", (1, 2), 3, 4) for name in state]
    peers = Peers(cast(Any, engine), ranks, cast(Any, SimpleNamespace(poll=lambda: 0)), 0.0)
    scatter = cast(Any, Never())
    with pytest.raises(VerlUpdateFailed, match=r"^bucket freed: not taken within 0 s \(timeout_s\) by two$"):
        await peers.done([scatter], "bucket freed")
    state[b"two"] = "connected"
    with pytest.raises(VerlUpdateFailed, match=r" by all of one, two$"):
        await peers.done([scatter], "bucket freed")


class Never:
    """A scatter that does not end."""

    kind, peer = "scatter", "2 peers"

    def cancel(self) -> None:
        pass

    def __await__(self) -> Generator[Any, None, None]:
        yield from asyncio.get_running_loop().create_future()


async def test_weights_of_another_step(make: Make) -> None:
    cluster = Cluster(make, 1, 1)
    cluster.begin()
    sent = asyncio.ensure_future(cluster.trainers[0].send_weights(many(2), global_steps=7))
    with pytest.raises(VerlUpdateFailed, match="step 7 came, those of step 8"):
        async for _ in cluster.rollouts[0].receive_weights(global_steps=8):
            pass
    await asyncio.wait_for(sent, WAIT_S)


async def test_what_is_late_of_a_failed_update_is_not_taken_for_the_next(make: Make) -> None:
    cluster = Cluster(make, 1, 1, bucket_bytes=64 << 10)
    cluster.begin()
    old = cluster.trainers[0]._update.ranks[0]
    cluster.begin()  # the first came to nothing
    late = cluster.trainers[0]._engine
    region = cluster.trainers[0]._update.memory.tables
    with pytest.raises(xr.CrossrailError):
        late.submit_write(region, old.tables_there, 64, imm=old.halves[0]).wait(WAIT_S)
    await assert_works(cluster)


def test_refused_with_reason(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(xr.UsageError, match="rollout_dtype is 'int99'"):
        make(rollout_dtype="int99")
    for timeout_s in ("60", None, -1.0):
        with pytest.raises(xr.UsageError, match=r"timeout_s (must be a number|is -1\.0)"):
            make(timeout_s=timeout_s)
    one, other = make(bucket_bytes=1 << 20), make(bucket_bytes=2 << 20)
    with pytest.raises(xr.UsageError, match="update_weights_bucket_megabytes must be the same"):
        type(one).build_topology(1, 1, [one.prepare(), other.prepare()])
    with pytest.raises(xr.UsageError, match="comes after prepare and init_process_group"):
        asyncio.run(one.send_weights(iter(())))
    with pytest.raises(xr.UsageError, match="bucket_size is 8"):
        make(bucket_bytes=8)
    monkeypatch.delenv("CROSSRAIL_SECRET")
    with pytest.raises(xr.UsageError, match="verl's checkpoint engine needs a secret"):
        make()

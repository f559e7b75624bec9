"""crossrail.integrations.checkpoint_engine with the real package: ranks and workers in processes of their own."""

from __future__ import annotations

import importlib.metadata
import os
import signal
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

import crossrail as xr
from crossrail.cli.child import Child, ChildFailed, Children
from crossrail.integrations.checkpoint_engine.versions import check_parts, check_version
from tests.integrations.checkpoint_engine_rank import digests, weights
from tests.support.limits import eventually
from tests.support.ports import free_port

RANKS = 2
DEADLINE_S = 100.0
BUCKET_GB = 100_000 / (1 << 30)  # less than half of what a rank has


class World:
    """Ranks of one group with their workers."""

    def __init__(self, ranks: int, folder: Path, **options: Any) -> None:
        module = "tests.integrations.checkpoint_engine_rank"
        self.ranks = Children([Child(module, f"rank {rank}") for rank in range(ranks)])
        self.workers = Children([Child(module, f"worker {rank}") for rank in range(ranks)])
        self._folder = folder
        self._updates = 0
        self._has_one = False
        port = free_port()
        common = {"ranks": ranks, "port": port} | options
        self.ranks.each("open", [common | {"rank": rank} for rank in range(ranks)], DEADLINE_S)

    def register(self, name: str, seed: int, **options: Any) -> None:
        """Part r at rank r."""
        parts = [{"name": name, "seed": seed, "parts": [rank]} | options for rank in range(len(self.ranks))]
        self.ranks.each("register", parts, DEADLINE_S)

    def gather_one(self) -> None:
        """A checkpoint "one", whichever test of this world asks for it first."""
        if not self._has_one:
            self.register("one", seed=10)
            self._has_one = True
        self.ranks.all("gather", name="one")

    def update(self, name: str, ranks: list[int] | None = None, **options: Any) -> list[dict[str, str]]:
        """What the workers of these ranks have been given."""
        meeting = self.begin(name, ranks, **options)
        chosen = range(len(self.ranks)) if ranks is None else ranks
        for rank in chosen:
            self.workers[rank].start("receive", rank=rank, meeting=meeting)
        for rank in range(len(self.ranks)):
            self.ranks[rank].finish(DEADLINE_S)
        return [self.workers[rank].finish(DEADLINE_S) for rank in chosen]

    def begin(self, name: str, ranks: list[int] | None = None, **options: Any) -> str:
        self._updates += 1
        meeting = self._folder / f"update{self._updates}"
        meeting.mkdir()
        for child in (self.ranks[rank] for rank in range(len(self.ranks))):
            child.start("update", name=name, meeting=str(meeting), ranks=ranks, **options)
        return str(meeting)

    def failures(self, children: Children) -> list[str]:
        """What each says of the command begun; empty: it went well."""
        said = []
        for child in (children[i] for i in range(len(children))):
            try:
                child.finish(DEADLINE_S)
                said.append("")
            except ChildFailed as error:
                said.append(str(error))
        return said

    def close(self) -> None:
        self.ranks.close()
        self.workers.close()


@pytest.fixture(autouse=True, scope="module")
def environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CROSSRAIL_SECRET", "shared by all ranks")
        patch.setenv("PS_MAX_BUCKET_SIZE_GB", str(BUCKET_GB))
        yield


@pytest.fixture(scope="module")
def world(environment: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    made = World(RANKS, tmp_path_factory.mktemp("checkpoint-engine"))
    yield made
    made.ranks.all("close", DEADLINE_S)
    made.close()


def whole(seed: int, parts: int = RANKS) -> dict[str, str]:
    return digests({name: tensor for part in range(parts) for name, tensor in weights(seed, part).items()})


def test_all_workers_get_all_weights(world: World, tmp_path: Path) -> None:
    world.register("all", seed=1, folder=str(tmp_path))
    assert world.ranks.all("gather", name="all") == [[0, 1], [0, 1]]
    assert world.update("all") == [whole(1)] * RANKS


def test_a_rank_without_a_part_of_it_and_another_checkpoint_after(world: World) -> None:
    world.ranks[0].call("register", name="only 0", seed=2, parts=[0, 1])
    assert world.ranks.all("gather", name="only 0") == [[0], [0]]
    assert world.update("only 0") == [whole(2)] * RANKS
    world.register("next", seed=3)
    world.ranks.all("gather", name="next")
    assert world.update("next") == [whole(3)] * RANKS


def test_shared_pool_filled_again(world: World) -> None:
    for seed in (4, 5):
        world.register(f"pool {seed}", seed=seed, use_shared_memory_pool=True)
        world.ranks.all("gather", name=f"pool {seed}")
        assert world.update(f"pool {seed}") == [whole(seed)] * RANKS
        world.ranks.all("unregister", name=f"pool {seed}")


def test_only_these_ranks(world: World) -> None:
    world.register("some", seed=6)
    world.ranks.all("gather", name="some")
    assert world.update("some", ranks=[1]) == [whole(6)]


def test_buckets_are_no_longer_than_asked(world: World) -> None:
    world.register("cut", seed=7)
    world.ranks.all("gather", name="cut")
    world.update("cut")
    nbytes = sum(tensor.nbytes for part in range(RANKS) for tensor in weights(7, part).values())
    assert all(calls >= nbytes // (160_000 + 256) for calls in world.workers.all("calls"))  # the longest tensor's


def test_metas_of_another_group(world: World, tmp_path: Path) -> None:
    """New ranks read the weights of those that are there and do nothing."""
    world.register("running", seed=8)
    world.ranks.all("gather", name="running")
    metas = world.ranks[0].call("metas")
    joining = World(1, tmp_path)
    try:
        joining.ranks[0].call("load", metas=metas)
        assert joining.update("running", ranks=[0]) == [whole(8)]
        world.ranks.all("unregister", name="running")
        meeting = joining.begin("running", ranks=[0])
        joining.workers[0].start("receive", rank=0, meeting=meeting)
        said = joining.failures(joining.ranks)
        assert "the weights of rank 0 are gone" in said[0]
    finally:
        joining.close()


def test_metas_that_others_made_refused(world: World) -> None:
    world.register("sealed", seed=9)
    world.ranks.all("gather", name="sealed")
    metas = world.ranks[0].call("metas")
    address = metas["1"]["p2p_store_addr"]
    for wrong, complaint in (
        ("10.0.0.1:17000", "not the description"),
        (address[:-8] + "AAAAAAA=", "not sealed with our secret"),
    ):
        metas["1"]["p2p_store_addr"] = wrong
        with pytest.raises(ChildFailed, match=rf"metas of rank 1: .*{complaint}"):
            world.ranks[1].call("load", metas=metas)


def test_unknown_checkpoint_refused_on_all_ranks(world: World) -> None:
    world.ranks.all("gather", name="nobody has it")
    world.begin("nobody has it")
    assert all("no rank has a checkpoint 'nobody has it'" in said for said in world.failures(world.ranks))


def test_metas_of_another_checkpoint_refused(world: World) -> None:
    world.gather_one()
    world.begin("two")
    assert all("its metas are those of 'one'" in said for said in world.failures(world.ranks))


def test_ranks_that_are_not_there_refused(world: World) -> None:
    world.gather_one()
    world.begin("one", ranks=[0, 2])
    assert all("ranks=[0, 2] must be in 0..1" in said for said in world.failures(world.ranks))


def test_different_calls_refused(world: World) -> None:
    world.gather_one()
    world.ranks[0].start("gather", name="one")
    world.ranks[1].start("gather", name="other")
    assert all("all ranks must make the same calls" in said for said in world.failures(world.ranks))


def test_checkpoint_unregistered_meanwhile(world: World) -> None:
    world.register("gone", seed=11)
    world.ranks.all("gather", name="gone")
    world.ranks[1].call("unregister", name="gone")
    meeting = world.begin("gone")
    for rank in range(RANKS):
        world.workers[rank].start("receive", rank=rank, meeting=meeting)
    assert all("the weights of rank 1 are gone" in said for said in world.failures(world.ranks))
    assert all("the update failed" in said for said in world.failures(world.workers))


@pytest.mark.parametrize("ranks", [None, [0]])
def test_worker_that_cannot_load(world: World, ranks: list[int] | None) -> None:
    world.gather_one()
    meeting = world.begin("one", ranks)
    for rank in ranks or range(RANKS):
        world.workers[rank].start("receive", rank=rank, meeting=meeting, fails="" if rank else "load")
    said = world.failures(world.ranks)
    assert all(
        "rank 0: its worker could not load the weights" in each and "no room for this one" in each for each in said
    )
    with pytest.raises(ChildFailed, match="the update failed"):
        world.workers[0].finish(DEADLINE_S)
    if ranks is None:
        with pytest.raises(ChildFailed, match="the update failed"):
            world.workers[1].finish(DEADLINE_S)
    assert world.update("one") == [whole(10)] * RANKS


def test_request_that_fails_ends_the_update_of_all(world: World) -> None:
    world.gather_one()
    world.begin("one", request_fails=True)
    said = world.failures(world.ranks)
    assert all("its request to the inference engine failed: ConnectionError: 503" in each for each in said)


def test_worker_that_never_comes(world: World) -> None:
    world.gather_one()
    meeting = world.begin("one", timeout_s=6.0)
    world.workers[0].start("receive", rank=0, meeting=meeting)
    assert all("rank 1: its worker has not connected within 6 s" in said for said in world.failures(world.ranks))
    with pytest.raises(ChildFailed, match="the update failed"):
        world.workers[0].finish(DEADLINE_S)


def test_rank_that_does_not_call(world: World) -> None:
    world.ranks[0].start("gather", name="one", timeout_s=1.0)
    with pytest.raises(ChildFailed, match=r"nothing arrived from rank 1 for 1 s \(waiting for begin\)"):
        world.ranks[0].finish(DEADLINE_S)
    with pytest.raises(ChildFailed, match="nothing arrived from rank 1"):  # it was told, if it comes in the end
        world.ranks[1].call("gather", name="one")


@pytest.mark.parametrize(
    ("dead", "complaint"),
    [(0, "rank 0"), (1, r"rank 1 is gone|of rank 1 cannot be read"), (1, "rank 1 is gone")],
    ids=["with the store", "with weights", "without weights"],
)
def test_rank_that_died(environment: None, tmp_path: Path, dead: int, complaint: str) -> None:
    world = World(RANKS, tmp_path)
    try:
        if complaint == "rank 1 is gone":
            world.ranks[0].call("register", name="m", seed=12, parts=[0, 1])
        else:
            world.register("m", seed=12)
        world.ranks.all("gather", name="m")
        other = world.ranks[1 - dead]
        meeting = world.begin("m")
        for rank in range(RANKS):
            world.workers[rank].start("receive", rank=rank, meeting=meeting, fails="slow")
        # A worker that has not come yet when its rank fails may come too late to be told.
        loading = [f"{meeting}/loading{rank}" for rank in range(RANKS)]
        eventually(lambda: all(map(os.path.exists, loading)), "the workers load", DEADLINE_S)
        os.kill(world.ranks[dead].pid, signal.SIGKILL)
        with pytest.raises(ChildFailed, match=complaint):
            other.finish(DEADLINE_S)
        with pytest.raises(ChildFailed, match="the update failed"):
            world.workers[1 - dead].finish(DEADLINE_S)
    finally:
        world.close()


@pytest.mark.parametrize("ranks", [None, [0, 1]], ids=["broadcast", "p2p"])
def test_the_real_server_with_our_store(environment: None, tmp_path: Path, ranks: list[int] | None) -> None:
    """Its updates of some ranks read by our P2PStore; the others are broadcasts over gloo, for comparison."""
    world = World(RANKS, tmp_path, is_theirs=True)
    try:
        world.register("m", seed=13)
        world.ranks.all("gather_theirs", name="m")
        assert world.update("m", ranks) == [whole(13)] * RANKS
    finally:
        world.close()


def test_as_documented(environment: None, tmp_path: Path) -> None:
    world = World(RANKS, tmp_path, opens=False)
    try:
        for rank in range(RANKS):
            world.ranks[rank].start("as_documented", meeting=str(tmp_path), seed=14)
            world.workers[rank].start("receive", rank=rank, meeting=str(tmp_path))
        assert world.failures(world.ranks) == [""] * RANKS
        assert [world.workers[rank].finish(DEADLINE_S) for rank in range(RANKS)] == [whole(14)] * RANKS
    finally:
        world.close()


@pytest.mark.parametrize(("version", "is_known"), [("0.4.2", True), ("0.4.9", True), ("0.3.5", False), ("1.0", False)])
def test_version(monkeypatch: pytest.MonkeyPatch, version: str, is_known: bool) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    with nullcontext() if is_known else pytest.raises(xr.UsageError, match=rf"is {version}, .* tested with 0\.4\.2"):
        check_version()


def test_part_that_has_changed_named() -> None:
    def update(name: str, force: bool) -> None: ...

    check_parts({update: "name force"})
    with pytest.raises(xr.UsageError, match=r"update takes 'name force', not 'name'"):
        check_parts({update: "name"})

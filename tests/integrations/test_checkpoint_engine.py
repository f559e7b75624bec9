"""crossrail.integrations.checkpoint_engine with the real package: ranks and workers in processes of their own."""

from __future__ import annotations

import importlib.metadata
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import checkpoint_engine.ps
import pytest
import torch

import crossrail as xr
from crossrail.cli.child import Child, ChildFailed, Children
from crossrail.integrations.checkpoint_engine import CheckpointUpdateFailed, P2PStore, server
from crossrail.integrations.checkpoint_engine.cpu import CpuDeviceManager
from crossrail.integrations.checkpoint_engine.delivery import Bucket, Delivery
from crossrail.integrations.checkpoint_engine.meeting import Done, Hello, Meeting
from crossrail.integrations.checkpoint_engine.versions import check_parts, check_version
from tests.integrations.checkpoint_engine_rank import digests, weights
from tests.support.limits import WAIT_S, eventually
from tests.support.ports import free_port
from tests.support.tcp_wire import give_up

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


def test_ranks_of_a_host_take_the_rails_near_their_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    monkeypatch.setattr(xr.engine, "default_rails", lambda transport, rails, device: seen.append(device) or rails)
    for kind in ("cuda", "npu"):
        manager = SimpleNamespace(device_type=kind, device_module=SimpleNamespace(device_count=lambda: 8))
        P2PStore(manager, rank=11, transport="shm").close()

    assert seen == ["cuda:3", None]


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


@pytest.mark.parametrize("comes_again", [False, True])
def test_checkpoint_unregistered_meanwhile(world: World, comes_again: bool) -> None:
    name = f"gone {comes_again}"
    world.register(name, seed=11)
    world.ranks.all("gather", name=name)
    world.ranks[1].call("unregister", name=name)
    if comes_again:
        world.ranks[1].call("register", name=name, seed=15, parts=[1])
    world.begin(name)
    complaint = f"rank 1: it has unregistered, or replaced, its part of '{name}' since gather_metas"
    assert all(complaint in said for said in world.failures(world.ranks))
    if comes_again:
        world.ranks.all("gather", name=name)
        assert world.update(name) == [digests(weights(11, 0) | weights(15, 1))] * RANKS


def test_part_registered_since_refused(world: World) -> None:
    world.ranks[0].call("register", name="late", seed=18, parts=[0])
    assert world.ranks.all("gather", name="late") == [[0], [0]]
    world.ranks[1].call("register", name="late", seed=18, parts=[1])
    world.begin("late")
    complaint = "rank 1: it has registered its part of 'late' since gather_metas: gather_metas('late') first"
    assert all(complaint in said for said in world.failures(world.ranks))
    world.ranks.all("gather", name="late")
    assert world.update("late") == [whole(18)] * RANKS


def test_shared_pool_that_another_checkpoint_has_taken(world: World, tmp_path: Path) -> None:
    """Neither this group nor one that reads from it gets the other's bytes under this name."""
    world.register("pool a", seed=16, use_shared_memory_pool=True)
    world.ranks.all("gather", name="pool a")
    metas = world.ranks[0].call("metas")
    world.ranks[1].call("unregister", name="pool a")
    world.ranks[1].call("register", name="pool b", seed=17, parts=[1], use_shared_memory_pool=True)
    joining = World(1, tmp_path)
    try:
        world.begin("pool a")
        complaint = "rank 1: it has unregistered, or replaced, its part of 'pool a' since gather_metas"
        assert all(complaint in said for said in world.failures(world.ranks))
        joining.ranks[0].call("load", metas=metas)
        meeting = joining.begin("pool a")
        joining.workers[0].start("receive", rank=0, meeting=meeting)
        assert "the weights of rank 1 are gone" in joining.failures(joining.ranks)[0]
        assert "the update failed" in joining.failures(joining.workers)[0]
    finally:
        joining.close()
        world.ranks[0].call("unregister", name="pool a")
        world.ranks[1].call("unregister", name="pool b")


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


def test_rank_that_does_not_call_is_missed_after_the_timeout_and_not_after_two() -> None:
    meeting = Meeting(torch.distributed.HashStore(), 0, 2, 1, "gather_metas('m')", timeout_s=3.0)
    begun = time.monotonic()
    with pytest.raises(CheckpointUpdateFailed, match="nothing arrived from rank 1 for 3 s"), meeting:
        meeting.agree(Hello(meeting.call, "uuid", b"", 0))
    assert 3.0 <= time.monotonic() - begun < 5.0


def test_rank_is_waited_for_as_long_as_it_gives_signs() -> None:
    store = torch.distributed.HashStore()
    waiting, slow = (Meeting(store, rank, 2, 1, "update('m')", timeout_s=2.0) for rank in range(2))

    def work() -> None:
        slow.agree(Hello(slow.call, "uuid", b"", 0))
        for _ in range(24):
            time.sleep(0.25)
            slow.sign()
        slow.exchange("loaded", Done())

    with ThreadPoolExecutor(1) as executor:
        working = executor.submit(work)
        waiting.agree(Hello(waiting.call, "uuid", b"", 0))
        assert waiting.exchange("loaded", Done()) == [Done()] * 2
        working.result()
    begun = time.monotonic()
    with pytest.raises(CheckpointUpdateFailed, match="nothing arrived from rank 1 for 2 s"):
        waiting.exchange("end", Done())
    assert time.monotonic() - begun < 10.0


def test_rank_gives_a_sign_between_making_the_buffer_and_waiting_for_its_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Either may take nearly as long as others wait without a sign."""
    events: list[str] = []

    class Buffer:
        def __init__(self, *_: object) -> None:
            events.append("made")

        def run(self, *_: object) -> None:
            events.append("run")

        def close(self) -> None:
            events.append("closed")

    for name, stand_in in (
        ("Delivery", Buffer),
        ("Worker", lambda *_: nullcontext()),
        ("bucket_bytes_max", lambda *_: 256),
        ("in_turns", lambda *_: []),
    ):
        monkeypatch.setattr(server, name, stand_in)
    parameters: Any = server.ParameterServer.__new__(server.ParameterServer)
    parameters._current_global_parameter_metas = {}
    parameters._opened, parameters._rank, parameters._mem_fraction = None, 0, 0.9
    parameters.device_manager = SimpleNamespace(device_module=SimpleNamespace(mem_get_info=lambda: (1024, 1024)))
    parameters._bind_zmq_socket = lambda: (events.append("waits for its worker"), [])
    parameters._deliver(lambda _: None, SimpleNamespace(sign=lambda: events.append("sign")))
    assert events == ["made", "sign", "waits for its worker", "run", "closed"]


class Read:
    """A region that a peer still reads for the first `refusals` calls of close()."""

    def __init__(self, region: xr.Region, refusals: int) -> None:
        self._region = region
        self._refusals = refusals

    def close(self, timeout_s: float = 5.0) -> None:
        self._refusals -= 1
        if self._refusals >= 0:
            raise xr.WaitTimeout("still read by a peer")
        self._region.close(timeout_s)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._region, name)


def test_unregistering_tensors_of_which_one_is_still_read_can_be_called_again(environment: None) -> None:
    store = P2PStore(CpuDeviceManager(), rank=0, transport="shm")
    names = ["first", "read", "last"]
    store.register_named_tensors({name: torch.zeros(1024, dtype=torch.uint8) for name in names})
    regions = dict(store._regions)
    store._regions["read"] = Read(regions["read"], refusals=2)  # type: ignore[assignment]
    with pytest.raises(xr.WaitTimeout, match="still read"):
        store.unregister_named_tensors(names)
    assert list(store.named_tensors) == names
    assert regions["first"].closed and regions["last"].closed, "nobody begins to read another meanwhile"
    assert store.unregister_named_tensors([*names, "never registered"]) == 3
    assert store.named_tensors == {} and regions["read"].closed
    assert store.unregister_named_tensors(names) == 0
    store.close()


@pytest.fixture
def stores(environment: None) -> Iterator[list[P2PStore]]:
    """Two, of which the first has given the second up, over tcp."""
    made = [P2PStore(CpuDeviceManager(), rank=rank, transport="tcp", timeout_s=WAIT_S) for rank in range(2)]
    give_up(made[0].engine, made[1].engine.address, WAIT_S)
    yield made
    for store in made:
        store.close()


def test_owner_that_was_given_up_is_read_again(stores: list[P2PStore]) -> None:
    here, there = torch.zeros(64, dtype=torch.uint8), torch.arange(64, dtype=torch.uint8)
    for store, tensor in zip(stores, (here, there), strict=True):
        store.register_named_tensors({"w": tensor})
    stores[0].batch_transfer_sync_read(stores[1].addr, [here.data_ptr()], [there.data_ptr()], [64])
    assert torch.equal(here, there)


def test_owner_that_was_given_up_is_looked_for_by_a_delivery(stores: list[P2PStore]) -> None:
    stores[1].register_named_tensors({"w": torch.zeros(64, dtype=torch.uint8)})
    metas = {1: SimpleNamespace(p2p_store_addr=stores[1].addr)}
    Delivery(stores[0], CpuDeviceManager(), metas, [Bucket(1, SimpleNamespace(size=256))]).close()
    assert stores[0].engine.peer_state(stores[1].engine.address) != "lost"


def test_rank_that_was_given_up_is_watched_again(stores: list[P2PStore]) -> None:
    engines = [store.engine for store in stores]
    meeting = Meeting(torch.distributed.HashStore(), 0, 2, 1, "update('m')", WAIT_S)
    meeting.watch(engines[0], [engine.address for engine in engines])
    meeting.look()
    assert engines[0].peer_state(engines[1].address) == "connected"


def test_buffer_is_registered_when_no_kernel_uses_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch gives memory out again that kernels of before are still writing."""
    events: list[str] = []
    monkeypatch.setattr(checkpoint_engine.ps, "reduce_tensor", lambda tensor: None)
    module = SimpleNamespace(synchronize=lambda: events.append("kernels have ended"))
    engine = SimpleNamespace(register=lambda tensor, access: events.append(f"registered as {access}"))
    device, store = SimpleNamespace(device_type="cpu", device_module=module), SimpleNamespace(engine=engine)
    Delivery(store, device, {}, [Bucket(0, SimpleNamespace(size=256))])  # type: ignore[arg-type]
    assert events == ["kernels have ended", "registered as local"]


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


@pytest.mark.parametrize("has_met", [False, True])
def test_rank_that_died_before_it_made_the_call(environment: None, tmp_path: Path, has_met: bool) -> None:
    world = World(RANKS, tmp_path)
    try:
        world.register("m", seed=12)
        if has_met:
            world.ranks.all("gather", name="m")
        world.ranks[0].start("gather", name="m", timeout_s=10 * DEADLINE_S)
        os.kill(world.ranks[1].pid, signal.SIGKILL)
        with pytest.raises(ChildFailed, match=r"gather_metas\('m'\) failed: rank 0: rank 1 is gone: "):
            world.ranks[0].finish(DEADLINE_S)
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


@pytest.mark.parametrize("timeout_s", [float("nan"), -1.0])
def test_store_that_is_to_wait_for_no_time_is_refused(environment: None, timeout_s: float) -> None:
    with pytest.raises(xr.UsageError, match=f"^timeout_s is {timeout_s:g}"):
        P2PStore(CpuDeviceManager(), rank=0, transport="shm", timeout_s=timeout_s)

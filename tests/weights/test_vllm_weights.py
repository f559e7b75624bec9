"""vLLM's workers as inference ranks, and who drives them, without vLLM: blocking calls around a receiver's loop."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import types
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

import crossrail as xr
from crossrail._options import SECRET_VARIABLE
from crossrail.integrations.vllm import weights_trainer, weights_worker
from crossrail.integrations.vllm.plugin import register
from crossrail.integrations.vllm.weights_trainer import VllmInstance, VllmUpdates
from crossrail.integrations.vllm.weights_worker import Link, WeightsWorker
from crossrail.weights import UpdateFailed, messages
from crossrail.weights.services.updates import Updates
from crossrail.weights.services.versions import State
from tests.support.limits import SLOWNESS, eventually
from tests.weights import small_model as small
from tests.weights.conftest import MakeFleet
from tests.weights.fleet import PATIENCE_S, SECRET, Fleet
from tests.weights.small_model import weights_of

HALVES = 2  # ranks of the small model in bfloat16


@dataclass
class Instance:
    """What an instance of vLLM with two workers does with these calls. calls: those that came; errors: of workers."""

    workers: dict[int, WeightsWorker] = field(default_factory=dict)
    sinks: dict[int, small.Target] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    is_receiving: threading.Event = field(default_factory=threading.Event)
    join_s: float = PATIENCE_S
    apply: Callable[[int], None] = lambda rank: None

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        address = bytes.fromhex(init_info["controller"])
        for rank in range(HALVES):

            def fill(memory: Any, rank: int = rank) -> None:
                self.sinks[rank] = small.Target(memory, small.plain)

            link = Link(address, init_info["first_rank"] + rank, "shm", join_s=self.join_s)
            self.workers[rank] = WeightsWorker(link, fill, apply=lambda rank=rank: self.apply(rank))

    def start_weight_update(self) -> None:
        self.calls.append("start")
        for worker in self.workers.values():
            worker.start()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.calls.append("update")
        errors: list[Exception] = []

        def receive(worker: WeightsWorker) -> None:
            try:
                worker.receive(**update_info)
            except xr.CrossrailError as error:
                errors.append(error)

        threads = [threading.Thread(target=receive, args=(worker,)) for worker in self.workers.values()]
        for thread in threads:
            thread.start()
        self.is_receiving.set()
        for thread in threads:
            thread.join()
        self.is_receiving.clear()
        self.errors += map(str, errors)
        if errors:
            raise errors[0]

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.calls.append(f"finish {weight_version}")

    def are_asked(self) -> bool:
        """An update waits for each worker."""
        return all(worker._receiver and worker._receiver._updates.attempt for worker in self.workers.values())

    def assert_holds(self, version: int) -> None:
        for rank, sink in self.sinks.items():
            for key, wanted in sink.expected(weights_of(version)).items():
                assert np.array_equal(sink.arrays[key], wanted), f"{key} of rank {rank}"

    def close(self) -> None:
        for worker in self.workers.values():
            worker.close()


@dataclass
class Scene:
    fleet: Fleet
    instance: Instance
    updates: VllmUpdates

    async def published(self, version: int, update: Callable[[], Awaitable[Any]]) -> Any:
        """While all trainers publish it; how that ended for them is not looked at."""
        offered = asyncio.ensure_future(self.fleet.publish(version))
        try:
            return await update()
        finally:
            offered.cancel()
            await asyncio.gather(offered, return_exceptions=True)


@pytest.fixture
async def scene(make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Scene]:
    monkeypatch.setenv(SECRET_VARIABLE, SECRET.decode())
    fleet = make_fleet(trainer_count=2)
    controller = await fleet.start(targets=[])
    instance = Instance()
    with VllmUpdates(controller, [VllmInstance(instance, HALVES)]) as updates:
        await updates.join()
        yield Scene(fleet, instance, updates)
    await asyncio.to_thread(instance.close)


async def test_update_runs_while_the_instance_is_in_update_weights(scene: Scene) -> None:
    for version in (1, 2):
        report = await scene.published(version, lambda v=version: scene.updates.update(v, PATIENCE_S))
        assert report.version == version
        scene.instance.assert_holds(version)
    assert scene.instance.calls == ["start", "update", "finish 1", "start", "update", "finish 2"]


async def test_what_has_come_is_applied_before_the_update_ends(scene: Scene) -> None:
    """On the threads that are in update_weights, when it is complete and nobody writes any more."""
    applied: list[tuple[int, int]] = []

    def apply(rank: int) -> None:
        assert threading.current_thread() is not threading.main_thread() and scene.instance.is_receiving.is_set()
        worker = scene.instance.workers[rank]
        assert worker._receiver and worker._receiver.state is State.WHOLE and worker.is_torn
        applied.append((rank, worker._receiver.version))

    scene.instance.apply = apply
    for version in (1, 2):
        await scene.published(version, lambda v=version: scene.updates.update(v, PATIENCE_S))
    assert sorted(applied) == [(rank, version) for rank in range(HALVES) for version in (1, 2)]
    assert not any(worker.is_torn for worker in scene.instance.workers.values())


async def test_what_cannot_be_applied_tears_until_an_update_can(scene: Scene) -> None:
    def apply(rank: int) -> None:
        if rank == 1:
            raise RuntimeError("no such kernel")

    scene.instance.apply = apply
    with pytest.raises(UpdateFailed, match="no such kernel; the weights are torn: update them"):
        await scene.published(1, lambda: scene.updates.update(1, PATIENCE_S))
    assert [worker.is_torn for worker in scene.instance.workers.values()] == [False, True]
    for worker in scene.instance.workers.values():
        worker.start()
    with pytest.raises(UpdateFailed):  # that nobody asks for
        await asyncio.to_thread(scene.instance.update_weights, {"version": 2, "timeout_s": 0.2})
    assert ["torn" in error for error in scene.instance.errors].count(True) == 2
    scene.instance.apply = lambda rank: None
    await scene.published(1, lambda: scene.updates.update(1, PATIENCE_S))
    assert not any(worker.is_torn for worker in scene.instance.workers.values())


async def test_instances_keep_no_thread_of_the_loop(make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which the controller needs one to take in the workers that their calls wait for."""
    monkeypatch.setenv(SECRET_VARIABLE, SECRET.decode())
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    fleet = make_fleet(trainer_count=2)
    controller = await fleet.start(targets=[])
    instance = Instance(join_s=10.0)
    updates = VllmUpdates(controller, [VllmInstance(instance, HALVES)])
    try:
        await updates.join()
        scene = Scene(fleet, instance, updates)
        await scene.published(1, lambda: updates.update(1, PATIENCE_S))
        instance.assert_holds(1)
    finally:
        updates.close()
        await asyncio.to_thread(instance.close)
    with pytest.raises(xr.UsageError, match="closed"):
        await updates.update(2)


async def test_nothing_is_written_before_the_instance_lets_it(scene: Scene) -> None:
    await scene.published(1, lambda: scene.updates.update(1, PATIENCE_S))
    with pytest.raises(UpdateFailed):  # no update_weights: its workers are busy
        await scene.published(2, lambda: scene.fleet.controller.update(2, 1.0))
    scene.instance.assert_holds(1)
    await scene.published(2, lambda: scene.updates.update(2, PATIENCE_S))
    scene.instance.assert_holds(2)


@pytest.mark.parametrize("before", [1, 2], ids=["same", "later"])
async def test_version_that_workers_are_at_or_beyond_is_brought(scene: Scene, before: int) -> None:
    """As after an update that left somebody out, or a trainer that begins again at an earlier checkpoint."""
    await scene.published(before, lambda: scene.updates.update(before, PATIENCE_S))
    receiving = asyncio.to_thread(scene.instance.update_weights, {"version": 1, "timeout_s": PATIENCE_S})
    waiting = asyncio.ensure_future(receiving)
    assert await asyncio.to_thread(scene.instance.is_receiving.wait, PATIENCE_S)
    await scene.published(1, lambda: scene.fleet.controller.update(1, PATIENCE_S))
    await waiting
    scene.instance.assert_holds(1)


async def test_workers_wait_for_an_update_to_their_version_that_was_opened_before(scene: Scene) -> None:
    await scene.published(1, lambda: scene.updates.update(1, PATIENCE_S))
    was_receiving = []
    opened = asyncio.Event()

    def watch(stage: str, done: int, whole: int) -> None:
        if stage == "write":
            opened.set()
            if done == whole:  # not committed yet
                was_receiving.append(scene.instance.is_receiving.is_set())

    updating = asyncio.ensure_future(scene.fleet.controller.update(1, PATIENCE_S, watch))
    await asyncio.to_thread(eventually, scene.instance.are_asked, "both workers are asked to let writers in")
    receiving = asyncio.to_thread(scene.instance.update_weights, {"version": 1, "timeout_s": PATIENCE_S})
    waiting = asyncio.ensure_future(receiving)
    await asyncio.wait_for(opened.wait(), PATIENCE_S)
    await scene.published(1, lambda: updating)
    await waiting
    assert was_receiving and all(was_receiving)


async def test_failed_update_ends_the_wait_at_once_and_the_next_heals(scene: Scene) -> None:
    """A trainer has left: planning is refused, which the instance hears too."""
    await scene.published(1, lambda: scene.updates.update(1, PATIENCE_S))
    gone = scene.fleet.trainers[1]
    await gone.leave()
    with pytest.raises(UpdateFailed, match=r"is held by no trainer.*trainer 1 \(it left\)"):
        await scene.published(2, lambda: scene.updates.update(2, PATIENCE_S))
    assert not scene.instance.is_receiving.is_set()
    await gone.join(scene.fleet.controller.address, PATIENCE_S)
    await scene.published(2, lambda: scene.updates.update(2, PATIENCE_S))
    scene.instance.assert_holds(2)


async def test_client_that_fails_for_itself_ends_the_update(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers have not heard of it, and would keep the update waiting until its time is up."""
    monkeypatch.setattr(weights_trainer, "_REASON_S", 0.2)
    unreachable = ConnectionError("its port is closed")

    def fail(_update_info: dict[str, Any]) -> None:
        raise unreachable

    with monkeypatch.context() as patch:
        patch.setattr(scene.instance, "update_weights", fail)
        with pytest.raises(ConnectionError) as raised:
            await scene.published(1, lambda: scene.updates.update(1, PATIENCE_S))
    assert raised.value is unreachable
    await scene.published(1, lambda: scene.updates.update(1, PATIENCE_S))
    scene.instance.assert_holds(1)


async def test_update_that_fails_while_it_is_open_tears(scene: Scene) -> None:
    opened = asyncio.Event()
    update = scene.updates.update(1, PATIENCE_S, lambda stage, *_: opened.set() if stage == "write" else None)
    updating = asyncio.ensure_future(update)  # nobody publishes
    receiving = asyncio.to_thread(scene.instance.is_receiving.wait, PATIENCE_S)
    assert await receiving
    await asyncio.wait_for(opened.wait(), PATIENCE_S)
    await scene.fleet.trainers[1].leave()
    with pytest.raises(UpdateFailed):
        await updating
    assert "the weights are torn: update them" in scene.instance.errors[0]
    await scene.fleet.trainers[1].join(scene.fleet.controller.address, PATIENCE_S)
    await scene.published(1, lambda: scene.updates.update(1, PATIENCE_S))
    scene.instance.assert_holds(1)


async def torn(scene: Scene, until_torn: Callable[[], None], timeout_s: float = 1.0 * SLOWNESS) -> list[str]:
    """What workers say of an update that is open and comes to nothing; until_torn() is called once it is open."""
    opened = asyncio.Event()
    update = scene.fleet.controller.update(1, PATIENCE_S, lambda stage, *_: opened.set() if stage == "write" else None)
    updating = asyncio.ensure_future(update)  # nobody publishes
    receiving = asyncio.ensure_future(
        asyncio.to_thread(scene.instance.update_weights, {"version": 1, "timeout_s": timeout_s})
    )
    await asyncio.wait_for(opened.wait(), PATIENCE_S)
    until_torn()
    with pytest.raises(UpdateFailed):
        await receiving
    updating.cancel()
    await asyncio.gather(updating, return_exceptions=True)
    return scene.instance.errors


async def heal(scene: Scene) -> None:
    await scene.fleet.controller.ready(range(2), range(HALVES), PATIENCE_S)
    await scene.published(1, lambda: scene.updates.update(1, PATIENCE_S))
    scene.instance.assert_holds(1)


@pytest.mark.parametrize("answer", [None, messages.JoinRefused("not now")], ids=["silent", "refuses"])
async def test_controller_that_takes_no_worker_back_hides_no_torn_weights(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, answer: messages.JoinRefused | None
) -> None:
    monkeypatch.setattr(weights_worker, "_PATIENCE_S", 0.5)
    for worker in scene.instance.workers.values():
        worker._link = replace(worker._link, join_s=3.0)
    box = scene.fleet.mailboxes["controller"]

    async def no_joining(_sender: bytes, _join: messages.Join) -> messages.JoinRefused:
        if answer is None:
            await asyncio.Event().wait()
        assert answer is not None
        return answer

    errors = await torn(scene, lambda: box.handle(messages.Join, no_joining))
    assert len(errors) == HALVES
    assert all("the weights are torn: update them" in error for error in errors)
    box.handle(messages.Join, scene.fleet.controller._roster._on_join)
    address = scene.fleet.controller.address
    for worker in scene.instance.workers.values():
        await asyncio.to_thread(worker._call, worker._receiver.join(address, PATIENCE_S), PATIENCE_S)
    await heal(scene)


async def test_writer_that_cannot_be_locked_out_is_told(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    async def stands_still(*_: object) -> None:
        raise xr.WaitTimeout("a write stands still")

    with monkeypatch.context() as patch:
        errors = await torn(scene, lambda: patch.setattr(Updates, "fail", stands_still))
        assert len(errors) == HALVES
        for error in errors:
            assert "writers are not locked out yet: a write stands still; the weights are torn" in error
    await heal(scene)  # left out for that, they join again once it goes on


async def test_worker_that_takes_over_torn_weights_says_so(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """vLLM's init_weight_transfer_engine, called again."""
    await scene.published(1, lambda: scene.updates.update(1, PATIENCE_S))
    instance = scene.instance
    await torn(scene, lambda: None)
    instance.errors.clear()
    for rank, worker in instance.workers.items():
        await asyncio.to_thread(worker.close)
        assert worker.is_torn

        def fill(memory: Any, rank: int = rank) -> None:
            instance.sinks[rank] = small.Target(memory, small.plain)

        instance.workers[rank] = await asyncio.to_thread(WeightsWorker, worker._link, fill, is_torn=worker.is_torn)
    assert caplog.text.count("the weights are torn: update them before they are used") >= HALVES
    with pytest.raises(UpdateFailed, match="the weights are torn: update them"):  # that nobody asks for
        await asyncio.to_thread(instance.update_weights, {"version": 1, "timeout_s": 0.2})
    await heal(scene)
    assert not any(worker.is_torn for worker in instance.workers.values())


async def test_time_that_is_up_locks_writers_out(scene: Scene) -> None:
    """Nobody publishes: it ends by the instance's own clock, and fails at the controller."""
    update = asyncio.ensure_future(scene.fleet.controller.update(1, PATIENCE_S))
    with pytest.raises(UpdateFailed, match="not complete within 1 s"):
        await asyncio.to_thread(scene.instance.update_weights, {"version": 1, "timeout_s": 1.0})
    with pytest.raises(UpdateFailed):
        await update
    await scene.published(1, lambda: scene.updates.update(1, PATIENCE_S))
    scene.instance.assert_holds(1)


async def test_close_that_meets_a_writer_that_stands_still_can_be_called_again(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stands_still(*_: object) -> None:
        raise xr.WaitTimeout("a write stands still")

    opened = asyncio.Event()
    update = scene.fleet.controller.update(1, PATIENCE_S, lambda stage, *_: opened.set() if stage == "write" else None)
    updating = asyncio.ensure_future(update)  # nobody publishes
    receiving = asyncio.to_thread(scene.instance.update_weights, {"version": 1, "timeout_s": PATIENCE_S})
    waiting = asyncio.ensure_future(receiving)
    await asyncio.wait_for(opened.wait(), PATIENCE_S)
    worker = scene.instance.workers[0]
    assert worker._receiver is not None
    with monkeypatch.context() as patch:
        patch.setattr(worker._receiver._updates, "fail", stands_still)
        for _ in range(2):
            with pytest.raises(xr.WaitTimeout, match=r"cannot be closed yet.* a write stands still"):
                await asyncio.to_thread(worker.close)
            assert worker._receiver.state is State.RECEIVING and not worker._engine.closed
    with pytest.raises(xr.UsageError, match=r"close\(\) was called"):
        worker.start()
    await asyncio.to_thread(worker.close)
    assert worker._receiver.state is State.TORN and worker._engine.closed
    for ended in (updating, waiting):
        with pytest.raises(UpdateFailed):
            await ended
    worker.close()  # once more does nothing


async def test_close_waits_for_leave_and_then_for_the_fence(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that it says which writer stands still, not that there was no end."""
    worker = scene.instance.workers[0]
    receiver = worker._receiver
    assert receiver is not None
    close = receiver.close

    async def leaves_slowly(timeout_s: float) -> None:
        await asyncio.sleep(2 * timeout_s)

    async def closes_in_vain(timeout_s: float) -> None:
        await asyncio.sleep(timeout_s)
        raise xr.WaitTimeout("cannot be closed yet: a write stands still")

    with monkeypatch.context() as patch:
        for name, value in (("_LEAVE_S", 1.0), ("FENCE_S", 1.0), ("_PATIENCE_S", 2.5)):
            patch.setattr(weights_worker, name, value)
        patch.setattr(receiver, "leave", leaves_slowly)
        patch.setattr(receiver, "close", closes_in_vain)
        with pytest.raises(xr.WaitTimeout, match="a write stands still"):
            await asyncio.to_thread(worker.close)
    monkeypatch.setattr(receiver, "close", close)
    await asyncio.to_thread(worker.close)


async def test_controller_that_is_not_there(monkeypatch: pytest.MonkeyPatch, scene: Scene) -> None:
    with xr.Engine("nobody", transport="shm") as engine:
        address = engine.address.to_bytes()
        link = Link(address, 9, "shm", join_s=0.5)
        with pytest.raises(xr.CrossrailError):
            await asyncio.to_thread(WeightsWorker, link, lambda memory: None)
    monkeypatch.delenv(SECRET_VARIABLE)
    with pytest.raises(xr.UsageError, match="needs a secret"):
        WeightsWorker(link, lambda memory: None)


def test_plugin_lets_a_vllm_start_that_knows_no_backends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer", None)
    monkeypatch.setitem(sys.modules, "vllm.distributed", types.ModuleType("vllm.distributed"))
    monkeypatch.setitem(sys.modules, "vllm", types.ModuleType("vllm"))
    with caplog.at_level("INFO", logger="crossrail.vllm"):
        register()
    assert "no weight transfer by crossrail" in caplog.text


def test_importing_these_imports_no_vllm() -> None:
    modules = "crossrail.integrations.vllm." + ", crossrail.integrations.vllm.".join(
        ("plugin", "weights_trainer", "weights_worker")
    )
    code = f"import sys, {modules}; sys.exit('vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0

"""Weights in a GPU's memory, over shm and tcp, under the double of its driver: no CPU touches them."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import crossrail as xr
from crossrail._buffers import gpu_allocation
from crossrail.weights import TornWeights, UpdateFailed, WeightMemory, WeightReceiver, WeightTrainer
from crossrail.weights import gpu as weights_gpu
from crossrail.weights.inventory import memory as weights_memory
from crossrail.weights.services.versions import State
from tests.conftest import EngineFactory
from tests.support.fake_gpu import FakeGpu
from tests.weights.conftest import MakeFleet
from tests.weights.fleet import PATIENCE_S, Fleet, until
from tests.weights.gpu_world import GpuWeights, GpuWorld, OnGpu


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("spare", [True, False])
async def test_versions_arrive_bit_for_bit(
    gpu_world: GpuWorld, make_fleet: MakeFleet, transport: str, spare: bool
) -> None:
    fleet = make_fleet(transport, spare=spare, target_memory=gpu_world.memory)
    await fleet.start()
    for version in (1, 2, 3):
        await fleet.update(version)
        await fleet.assert_holds(version)
    for receiver in fleet.receivers.values():
        assert {region.device for regions in receiver._buffers._regions for region in regions} == {"cuda:0"}
    assert gpu_world.gpu.copies > 0


class Mixed(GpuWeights):
    """Of whose arrays every second is on the host, as memory beside a vLLM on a GPU is."""

    def __init__(self, world: GpuWorld, engine: xr.Engine, role: Any, rank: int) -> None:
        super().__init__(world, engine, role, rank)
        self.host: list[np.ndarray] = []
        self._is_turn_of_host = False

    def allocate(self, nbytes: int) -> np.ndarray:
        self._is_turn_of_host = not self._is_turn_of_host
        if not self._is_turn_of_host:
            return self.world.allocate(nbytes)
        self.host.append(np.zeros(nbytes, np.uint8))
        return self.host[-1]

    def is_on_host(self, array: np.ndarray) -> bool:
        return any(np.shares_memory(array, one) for one in self.host)

    def add(self, name: str, array: np.ndarray, **more: Any) -> None:
        (self.add_host if self.is_on_host(array) else super().add)(name, array, **more)

    def like(self, array: np.ndarray, regions: Sequence[xr.Region]) -> np.ndarray:
        return array if self.is_on_host(array) else super().like(array, regions)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_inference_rank_with_some_on_the_gpu_and_some_on_the_host(
    gpu_world: GpuWorld, make_fleet: MakeFleet, transport: str
) -> None:
    def memory(engine: xr.Engine, role: Any, rank: int) -> tuple[WeightMemory, Callable[[int], np.ndarray]]:
        made = Mixed(gpu_world, engine, role, rank)
        return made, made.allocate

    fleet = make_fleet(transport, spare=False, target_memory=memory)
    await fleet.start()
    for version in (1, 2):
        await fleet.update(version)
        await fleet.assert_holds(version)
    for receiver in fleet.receivers.values():
        assert {region.device for region in receiver.memory.regions} == {"cpu", "cuda:0"}


async def test_readers_keep_their_version_while_the_next_arrives(gpu_world: GpuWorld, make_fleet: MakeFleet) -> None:
    fleet = make_fleet(spare=True, target_memory=gpu_world.memory)
    await fleet.start()
    await fleet.update(1)
    async with fleet.receivers[0].reading(PATIENCE_S) as reading:
        kept = {key: reading.like(array).copy() for key, array in fleet.sinks[0].arrays.items()}
        await fleet.update(2)
        for key, array in fleet.sinks[0].arrays.items():
            assert (reading.like(array) == kept[key]).all()
    await fleet.assert_holds(2)


async def test_failed_update_tears_and_the_next_heals(gpu_world: GpuWorld, make_fleet: MakeFleet) -> None:
    """Regions of a GPU are revoked and renewed: what the failed one still writes lands nowhere."""
    fleet = make_fleet(spare=False, target_memory=gpu_world.memory)
    await fleet.start()
    await fleet.update(1)
    before = {rank: bytes(receiver.memory.regions[0].descriptor) for rank, receiver in fleet.receivers.items()}
    await fleet.drop_trainer(1)
    await fleet.failing_update(2)
    for rank, receiver in fleet.receivers.items():
        if receiver.state is State.TORN:
            with pytest.raises(TornWeights, match="after version 1"):
                async with receiver.reading(1.0):
                    pass
            assert bytes(receiver.memory.regions[0].descriptor) != before[rank]
    await fleet.add_trainer(1, "another-trainer-1")
    await fleet.update(3)
    await fleet.assert_holds(3)


async def test_update_that_is_cancelled(gpu_world: GpuWorld, make_fleet: MakeFleet) -> None:
    fleet = make_fleet(spare=False, target_memory=gpu_world.memory)
    await fleet.start()
    await fleet.update(1)
    offers = [asyncio.ensure_future(fleet.publish(2, [rank])) for rank in fleet.trainers]
    begun = asyncio.Event()
    update = asyncio.ensure_future(
        fleet.controller.update(2, PATIENCE_S, lambda stage, *_: begun.set() if stage == "write" else None)
    )
    await begun.wait()
    update.cancel()
    ended = await asyncio.gather(update, *offers, return_exceptions=True)
    assert isinstance(ended[0], asyncio.CancelledError)
    assert all(isinstance(each, UpdateFailed) for each in ended[1:])
    await fleet.update(3)
    await fleet.assert_holds(3)


async def test_copy_that_the_driver_refuses_fails_the_update(gpu_world: GpuWorld, make_fleet: MakeFleet) -> None:
    fleet = make_fleet(spare=True, target_memory=gpu_world.memory)
    await fleet.start()
    await fleet.update(1)
    gpu_world.gpu.fail_copies(700)
    await fleet.failing_update(2)
    gpu_world.gpu.fail_copies(0)
    await fleet.assert_holds(1)
    await fleet.update(3)
    await fleet.assert_holds(3)


# --- trainers ---


@dataclass
class Rows:
    """A trainer whose weights are on the GPU, seen there, and an inference rank that wants them in some type."""

    trainer: WeightTrainer
    receiver: WeightReceiver
    seen: np.ndarray
    wanted: np.ndarray


@asynccontextmanager
async def rows_of_a_gpu(fleet: Fleet, world: GpuWorld, dtype: type) -> AsyncIterator[Rows]:
    await fleet.start(targets=[])
    boxes = [fleet.mailbox(name) for name in ("trainer", "inference")]
    seen = world.allocate(40 * 30 * 4).view(np.float32).reshape(40, 30)
    wanted = np.zeros((40, 30), dtype)
    source = GpuWeights(world, fleet.engines["trainer"], "trainer", 0)
    with source, WeightMemory(fleet.engines["inference"], "target", 0) as target:
        source.add("w", seen)
        target.add("w", wanted)
        trainer, receiver = WeightTrainer(boxes[0], source), WeightReceiver(boxes[1], target)
        await trainer.join(fleet.controller.address, PATIENCE_S)
        await receiver.join(fleet.controller.address, PATIENCE_S)
        yield Rows(trainer, receiver, seen, wanted)
        await trainer.close()
        await receiver.close()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_what_lies_ready_is_written_from_where_it_lies(
    gpu_world: GpuWorld, make_fleet: MakeFleet, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # which is not needed for it
    fleet = make_fleet(transport, trainer_count=0)
    async with rows_of_a_gpu(fleet, gpu_world, np.float32) as rows:
        for version in (1, 2):
            rows.seen[:] = np.random.default_rng(version).random((40, 30))
            offer = asyncio.ensure_future(rows.trainer.publish(version))
            await fleet.controller.update(version, PATIENCE_S)
            await offer
            assert rows.receiver.version == version and np.array_equal(rows.wanted, rows.seen)


async def test_what_has_to_be_prepared_takes_torch(
    gpu_world: GpuWorld, make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    fleet = make_fleet(trainer_count=0)
    async with rows_of_a_gpu(fleet, gpu_world, np.float16) as rows:
        offer = asyncio.ensure_future(rows.trainer.publish(1))
        with pytest.raises(UpdateFailed, match=r"preparing weights on cuda:0 needs torch, .*: import torch"):
            await fleet.controller.update(1, PATIENCE_S)
        with pytest.raises(UpdateFailed):
            await offer


class InTorchsWords:
    """An array that says on which GPU it is, as a tensor does."""

    def __init__(self, array: OnGpu) -> None:
        self.__cuda_array_interface__ = array.__cuda_array_interface__

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0


class Event:
    """Of a stream: query() says whether all before it has ended."""

    def __init__(self) -> None:
        self.is_done = False

    def query(self) -> bool:
        return self.is_done


async def test_nothing_is_sent_before_kernels_that_came_before_publish_have_ended(
    gpu_world: GpuWorld, make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, asked = Event(), []

    def launched(devices: list[str]) -> list[Event]:
        asked.append((devices, threading.current_thread()))
        return [step]

    monkeypatch.setattr(weights_gpu, "launched", launched)
    fleet = make_fleet(trainer_count=0)
    async with rows_of_a_gpu(fleet, gpu_world, np.float32) as rows:
        publishing = rows.trainer.publish(1)
        assert asked == [(["cuda:0"], threading.current_thread())]  # at the call, not when it is awaited
        offer = asyncio.ensure_future(publishing)
        update = asyncio.ensure_future(fleet.controller.update(1, PATIENCE_S))
        await until(lambda: rows.trainer._going)
        await asyncio.sleep(0.1)  # in which all would have been written
        assert not rows.wanted.any() and rows.trainer._step is None
        rows.seen[:] = 7.0  # the kernel's last act
        step.is_done = True
        await asyncio.gather(offer, update)
        assert (rows.wanted == 7.0).all()


async def test_kernels_are_waited_for_by_an_offer_that_comes_before_the_trainer_has_joined(
    gpu_world: GpuWorld, make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(weights_gpu, "launched", lambda devices: asked.append(devices) or [])
    fleet = make_fleet(trainer_count=0)
    await fleet.start(targets=[])
    box = fleet.mailbox("trainer")
    weights = gpu_world.on_gpu(gpu_world.allocate(16).view(np.float32))
    with WeightMemory(fleet.engines["trainer"], "trainer", 0) as memory:
        memory.add("w", InTorchsWords(weights))
        async with WeightTrainer(box, memory) as trainer:
            trainer.publish(1).close()
            await trainer.join(fleet.controller.address, PATIENCE_S)
            trainer.publish(1).close()
    assert asked == [["cuda:0"]] * 2


async def test_kernels_that_never_end_fail_the_update(
    gpu_world: GpuWorld, make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_gpu, "launched", lambda _: [Event()])
    fleet = make_fleet(trainer_count=0)
    async with rows_of_a_gpu(fleet, gpu_world, np.float32) as rows:
        offer = asyncio.ensure_future(rows.trainer.publish(1))
        with pytest.raises(UpdateFailed, match=r"not complete within 1 s|its GPU has not made version"):
            await fleet.controller.update(1, 1.0)
        with pytest.raises(UpdateFailed):
            await offer
        assert rows.trainer._step is None


# --- kernels that read ---


@pytest.mark.parametrize("spare", [True, False])
async def test_kernels_that_still_read_end_before_anything_is_written(
    gpu_world: GpuWorld, make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch, spare: bool
) -> None:
    may_end, waited = threading.Event(), []

    def wait(devices: list[str]) -> None:
        waited.append(devices)
        assert may_end.wait(PATIENCE_S)

    fleet = make_fleet(spare=spare, target_memory=gpu_world.memory)
    await fleet.start()
    monkeypatch.setattr(weights_gpu, "wait_for_kernels", wait)
    update = asyncio.ensure_future(fleet.update(1))
    await until(lambda: len(waited) >= len(fleet.receivers))
    assert not any(array.any() for sink in fleet.sinks.values() for array in sink.arrays.values())
    assert not any(receiver._buffers.versions.is_receiving for receiver in fleet.receivers.values())
    may_end.set()
    await update
    await fleet.assert_holds(1)
    assert waited == [["cuda:0"]] * len(fleet.receivers)


async def test_reader_that_comes_while_kernels_are_waited_for_waits_for_the_update(
    gpu_world: GpuWorld, make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end, waited = threading.Event(), []

    def wait(devices: list[str]) -> None:
        waited.append(devices)
        assert may_end.wait(PATIENCE_S)

    fleet = make_fleet(spare=False, target_memory=gpu_world.memory)
    await fleet.start(targets=[0])
    monkeypatch.setattr(weights_gpu, "wait_for_kernels", wait)
    receiver = fleet.receivers[0]
    update = asyncio.ensure_future(fleet.update(1))
    await until(lambda: waited)
    with pytest.raises(xr.WaitTimeout):
        async with receiver.reading(0.05):
            pass
    may_end.set()
    async with receiver.reading(PATIENCE_S) as reading:
        assert reading.version == 1
    await update
    assert len(waited) == 1
    await fleet.assert_holds(1, [0])


async def test_update_that_is_aborted_while_kernels_are_waited_for_lets_readers_in(
    gpu_world: GpuWorld, make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end, waited = threading.Event(), threading.Event()

    def wait(_devices: list[str]) -> None:
        waited.set()
        assert may_end.wait(PATIENCE_S)

    fleet = make_fleet(spare=False, target_memory=gpu_world.memory)
    controller = await fleet.start(targets=[0])
    with monkeypatch.context() as patched:
        patched.setattr(weights_gpu, "wait_for_kernels", wait)
        updating = asyncio.ensure_future(controller.update(1, PATIENCE_S))
        await until(lambda: waited.is_set())
        updating.cancel()
        await asyncio.gather(updating, return_exceptions=True)
        async with fleet.receivers[0].reading(1.0) as reading:
            assert reading.version == -1
        may_end.set()
    await fleet.update(2)
    await fleet.assert_holds(2)


async def test_attempts_that_give_up_on_kernels_leave_one_thread_that_waits_for_them(
    gpu_world: GpuWorld, make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end, waiting = threading.Event(), list[threading.Thread]()

    def wait(_devices: list[str]) -> None:
        waiting.append(threading.current_thread())
        assert may_end.wait(PATIENCE_S)

    fleet = make_fleet(spare=False, target_memory=gpu_world.memory)
    controller = await fleet.start(targets=[0])
    with monkeypatch.context() as patched:
        patched.setattr(weights_gpu, "wait_for_kernels", wait)
        for version in (1, 2, 3):
            with pytest.raises(UpdateFailed):
                await controller.update(version, 0.5)
        assert len(waiting) == 1 and waiting[0].is_alive()
        updating = asyncio.ensure_future(fleet.update(4))
        await until(lambda: fleet.receivers[0]._updates.attempt)
        await asyncio.sleep(0.1)
        assert len(waiting) == 1
        may_end.set()
        await updating
        assert len(waiting) == 2  # also for what was launched since the first began
    await fleet.assert_holds(4)


# --- memory ---


def array_at(gpu: FakeGpu, address: int, nbytes: int) -> OnGpu:
    return OnGpu(np.zeros(nbytes, np.uint8), address)


def test_what_touches_in_an_allocation_is_one_region(gpu: FakeGpu, open_engine: EngineFactory) -> None:
    engine = open_engine(transport="shm")
    one, other = gpu.allocate(64 << 10), gpu.allocate(64 << 10)
    begin = one.address
    with WeightMemory(engine, "target", 0) as memory:
        # a and b touch; c is behind b's padding; d is further away; e is in another allocation.
        for name, at, nbytes in (("a", 0, 512), ("b", 512, 1000), ("c", 2000, 100), ("d", 4096, 1 << 10)):
            memory.add(name, array_at(gpu, begin + at, nbytes), dtype="uint8")
        memory.add("e", array_at(gpu, other.address, 64 << 10), dtype="uint8")
        inventory = memory.inventory()
        found = sorted((region.base, region.nbytes) for region in memory.regions)
        assert found == sorted([(begin, 2100), (begin + 4096, 1 << 10), (other.address, 64 << 10)])
        assert {region.device for region in memory.regions} == {"cuda:0"}
        where = {held.name: (found.index(_place(memory, held.region)), held.offset) for held in inventory.holdings}
        assert where["b"][1] == 512 and where["c"][1] == 2000 and where["d"][1] == where["e"][1] == 0


def _place(memory: WeightMemory, index: int) -> tuple[int, int]:
    return memory.regions[index].base, memory.regions[index].nbytes


def test_neighbouring_allocations_are_two_regions(
    gpu: FakeGpu, open_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver would neither export nor copy a range over both."""
    engine, begin = open_engine(transport="shm"), gpu.allocate(8192).address
    monkeypatch.setattr(weights_memory, "gpu_allocation", lambda at: (begin + (at - begin) // 4096 * 4096, 4096))
    with WeightMemory(engine, "trainer", 0) as memory:
        for name, at in (("a", 0), ("b", 2048), ("c", 4096), ("d", 6144)):
            memory.add(name, array_at(gpu, begin + at, 2048), dtype="uint8")
        memory.inventory()
        assert [(region.base - begin, region.nbytes) for region in memory.regions] == [(0, 4096), (4096, 4096)]


def test_allocation_of_an_address(gpu: FakeGpu) -> None:
    memory = gpu.allocate(3 * 4096)
    assert gpu_allocation(memory.address) == gpu_allocation(memory.address + 9000) == (memory.address, 3 * 4096)
    with pytest.raises(xr.UsageError, match="is not in the memory of a GPU that CUDA knows"):
        gpu_allocation(np.zeros(1).ctypes.data)


def test_arrays_of_a_gpu_are_as_numpys(gpu: FakeGpu, open_engine: EngineFactory) -> None:
    engine = open_engine(transport="shm")
    address = gpu.allocate(1 << 16).address
    rows = np.zeros((8, 16), np.uint16)
    with WeightMemory(engine, "trainer", 0) as memory:
        memory.add("w", OnGpu(rows[2:, 4:], address + 64), dtype="bfloat16")
        (held,) = memory.inventory().holdings
        assert (held.dtype, held.shape, held.strides) == ("bfloat16", (6, 12), (32, 2))
        with pytest.raises(xr.UsageError, match="registered already"):
            memory.add("v", OnGpu(rows, address))
    with WeightMemory(engine, "trainer", 1) as memory:
        with pytest.raises(xr.UsageError, match="v: float32 lies in an array of float32, not of uint16"):
            memory.add("v", OnGpu(rows, address), dtype="float32")
        with pytest.raises(xr.UsageError, match="v: the array is reversed"):
            memory.add("v", OnGpu(rows[::-1], address), dtype="bfloat16")


def test_spare_memory_of_a_gpu_is_shown_by_torch(
    gpu: FakeGpu, open_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    engine = open_engine(transport="shm")
    one, other = (gpu.allocate(4096) for _ in range(2))
    array = array_at(gpu, one.address, 4096)
    with WeightMemory(engine, "target", 0) as memory, engine.register(other) as spare:
        memory.add("w", array)
        memory.inventory()
        assert memory.like(array, memory.regions) is array
        with pytest.raises(xr.UsageError, match=r"a tensor in memory of cuda:0 needs torch, .*: import torch"):
            memory.like(array, [spare])
        with pytest.raises(xr.UsageError, match="in none of the regions"):
            memory.like(array_at(gpu, other.address, 4096), memory.regions)


def test_memory_of_a_gpu_without_torch_is_refused(monkeypatch: pytest.MonkeyPatch, open_engine: EngineFactory) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(xr.UsageError, match="memory of cuda:0 needs torch"):
        weights_gpu.alloc(open_engine(transport="shm"), "cuda:0", 4096)

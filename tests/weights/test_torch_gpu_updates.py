"""Trainers on a GPU, by the double of its driver: torch's code prepares what lies there, as kernels would see it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

import crossrail as xr
from crossrail.weights import WeightMemory, WeightReceiver, WeightTrainer
from crossrail.weights import gpu as weights_gpu
from crossrail.weights.planning.planner import PlanOptions
from crossrail.weights.step.torch_preparer import TorchPreparer
from tests.weights.conftest import MakeFleet
from tests.weights.fleet import PATIENCE_S
from tests.weights.gpu_world import GpuWeights, GpuWorld
from tests.weights.small_model import plain


class Kernels(TorchPreparer):
    """Arena and weights on the double's GPU; the CPU plays its kernels, by their view of it."""

    def __init__(self, world: GpuWorld) -> None:
        super().__init__("cpu")
        self._world = world

    def alloc(self, engine: xr.Engine, nbytes: int) -> xr.Region:
        return weights_gpu.alloc(engine, "cuda:0", nbytes)

    def far(self, regions: Sequence[xr.Region]) -> frozenset[int]:
        return weights_gpu.on_host(regions)

    def bytes_of(self, region: xr.Region, offset: int) -> torch.Tensor:
        if region.device == "cpu":
            return super().bytes_of(region, offset)
        return torch.from_numpy(self._world.seen_at(region)[offset:])


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize(("dtype", "gather"), [("bfloat16", "needed"), ("float32", "full")])
async def test_from_gpu_to_gpu(
    gpu_world: GpuWorld, make_fleet: MakeFleet, transport: str, dtype: str, gather: Any
) -> None:
    fleet = make_fleet(
        transport,
        dtype=dtype,
        source_memory=gpu_world.memory,
        target_memory=gpu_world.memory,
        plan_options=PlanOptions(gather=gather, write_bytes_min=2000),
        make_preparer=lambda: Kernels(gpu_world),
    )
    await fleet.start()
    for version in (1, 2):
        report = await fleet.update(version)
        await fleet.assert_holds(version)
    assert sum(step.prepare_s for step in report.steps.values()) > 0
    assert gather == "needed" or sum(step.gathered_bytes for step in report.steps.values()) > 0
    for trainer in fleet.trainers.values():
        assert trainer._arena is not None and trainer._arena.device == "cuda:0"


async def test_trainers_on_the_host_read_from_those_on_a_gpu(gpu_world: GpuWorld, make_fleet: MakeFleet) -> None:
    """0 and 2 have their shards on the GPU, 1 and 3 on the host, and all prepare on it."""

    def memory(engine: xr.Engine, role: Any, rank: int) -> Any:
        if rank % 2 == 0:
            return gpu_world.memory(engine, role, rank)
        return WeightMemory(engine, role, rank), plain

    fleet = make_fleet(
        source_memory=memory,
        plan_options=PlanOptions(gather="full", write_bytes_min=2000),
        make_preparer=lambda: Kernels(gpu_world),
    )
    await fleet.start()
    await fleet.update(1)
    await fleet.assert_holds(1)


async def test_one_trainer_with_some_on_the_gpu_and_some_on_the_host(
    gpu_world: GpuWorld, make_fleet: MakeFleet
) -> None:
    fleet = make_fleet(trainer_count=0)
    await fleet.start(targets=[])
    boxes = [fleet.mailbox(name) for name in ("trainer", "inference")]
    there = gpu_world.allocate(64 * 32 * 4).view(np.float32).reshape(64, 32)
    here = np.zeros((64, 32), np.float32)
    wanted = {name: np.zeros((64, 32), np.float16) for name in ("there", "here")}
    codes, scales = np.zeros((64, 32), np.uint8), np.zeros((1, 1), np.float32)
    source = GpuWeights(gpu_world, fleet.engines["trainer"], "trainer", 0)
    with source, WeightMemory(fleet.engines["inference"], "target", 0) as target:
        source.add("there", there)
        source.add_host("here", here)
        source.add_host("quantised", here)
        for name, array in wanted.items():
            target.add(name, array)
        target.add("quantised", codes, dtype="float8_e4m3fn")
        target.add("quantised_scale", scales, scale_of="quantised", block=(128, 128))
        trainer = WeightTrainer(boxes[0], source, preparer=Kernels(gpu_world))
        receiver = WeightReceiver(boxes[1], target)
        for member in (trainer, receiver):
            await member.join(fleet.controller.address, PATIENCE_S)
        assert sorted(region.device for region in source.regions) == ["cpu", "cuda:0"]
        there[:], here[:] = np.random.default_rng(1).random((2, 64, 32))
        offer = asyncio.ensure_future(trainer.publish(1))
        report = await fleet.controller.update(1, PATIENCE_S)
        await offer
        assert report.steps[0].load_s > 0
        assert np.array_equal(wanted["there"], there.astype(np.float16))
        assert np.array_equal(wanted["here"], here.astype(np.float16))
        assert scales[0, 0] == here.max() / np.float32(448) and codes.max() == 0x7E
        await trainer.close()
        await receiver.close()


async def test_nan_on_a_gpu_is_named_and_the_next_version_comes_through(
    gpu_world: GpuWorld, make_fleet: MakeFleet
) -> None:
    fleet = make_fleet(source_memory=gpu_world.memory, make_preparer=lambda: Kernels(gpu_world))
    await fleet.start()
    with fleet.loading_nan(2):
        assert "5] is nan" in await fleet.failing_update(1)
    await fleet.update(2)
    await fleet.assert_holds(2)


class FakeCuda:
    """Of torch.cuda, what weights.gpu asks for."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def is_initialized(self) -> bool:
        return True

    def current_stream(self, device: str) -> str:
        return f"stream of {device}"

    def synchronize(self, device: str) -> None:
        self.calls.append(f"synchronize {device}")

    def Event(self) -> Any:  # noqa: N802 (torch's name)
        owner = self

        class Event:
            def record(self, stream: str) -> None:
                owner.calls.append(f"record {stream}")

        return Event()


def test_torch_is_asked_for_events_and_for_the_end_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda()
    monkeypatch.setattr(torch, "cuda", cuda)
    assert len(weights_gpu.launched(["cuda:1", "cuda:0"])) == 2
    weights_gpu.wait_for_kernels(["cuda:0"])
    assert cuda.calls == ["record stream of cuda:1", "record stream of cuda:0", "synchronize cuda:0"]


def test_torch_that_has_no_gpu_has_no_kernels() -> None:
    assert weights_gpu.launched(["cuda:0"]) == []
    weights_gpu.wait_for_kernels(["cuda:0"])


def test_tensor_over_part_of_a_region() -> None:
    with xr.Engine("here", transport="null") as engine, engine.alloc(4096) as region:
        tensor = weights_gpu.tensor_at(region, 64, (3, 5), (32, 4), "float32")
        tensor[:] = torch.arange(15.0).view(3, 5)
        rows = region.array("float32")[16:].reshape(-1, 8)
        assert rows[:3, :5].tolist() == tensor.tolist() and not rows[:3, 5:].any()
        assert weights_gpu.tensor_at(region, 64, (), (), "bfloat16").dtype == torch.bfloat16
        del tensor

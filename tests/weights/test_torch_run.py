"""Tensors of torch as weights, and torch's own float8 and bfloat16 as a second opinion on ours."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

import crossrail as xr
from crossrail.weights import WeightController, WeightMemory, WeightReceiver, WeightTrainer
from crossrail.weights.conversion.casts import Caster
from crossrail.weights.conversion.float8 import BlockQuantiser, blocks
from crossrail.weights.errors import UpdateFailed
from tests.support.seeds import Seed
from tests.weights.conftest import MakeFleet
from tests.weights.fleet import PATIENCE_S


def test_bfloat16_is_torchs(seed: Seed) -> None:
    bits = seed.rng().integers(0, 1 << 32, 100_000, np.uint32)
    values = bits.view(np.float32)
    out = np.empty(values.shape, np.uint16)
    Caster().cast(values, "float32", out, "bfloat16")
    theirs = torch.from_numpy(values).to(torch.bfloat16)
    is_nan = torch.isnan(theirs).numpy()
    assert np.array_equal(out[~is_nan], theirs.view(torch.uint16).numpy()[~is_nan])
    assert torch.isnan(torch.from_numpy(out).view(torch.bfloat16)).numpy()[is_nan].all()


@pytest.mark.parametrize("shape", [(128, 128), (300, 200)])
def test_float8_is_torchs(shape: tuple[int, int], seed: Seed) -> None:
    values = (seed.rng().standard_normal(shape) * 2.0 ** seed.rng().uniform(-20, 0, shape)).astype(np.float32)
    out, scales = np.empty(shape, np.uint8), np.empty(tuple(blocks(n) for n in shape), np.float32)
    BlockQuantiser().quantise(values, out, scales)
    spread = np.repeat(np.repeat(scales, 128, 0), 128, 1)[: shape[0], : shape[1]]
    theirs = torch.from_numpy(values / spread).to(torch.float8_e4m3fn)
    assert np.array_equal(out, theirs.view(torch.uint8).numpy())


async def test_tensors_of_a_module_reach_tensors_of_another(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(trainer_count=0)
    controller = await fleet.start(targets=[])
    assert isinstance(controller, WeightController)
    source = torch.nn.Linear(48, 64, dtype=torch.bfloat16)
    fused = torch.zeros(80, 48, dtype=torch.bfloat16)
    boxes = [fleet.mailbox(name) for name in ("trainer", "inference")]
    given = WeightMemory(fleet.engines["trainer"], "trainer", 0)
    given.add("weight", source.weight.detach())
    given.add("bias", source.bias.detach())
    taken = WeightMemory(fleet.engines["inference"], "target", 0)
    taken.add("weight", fused[16:])
    taken.add("bias", torch.zeros(64, dtype=torch.bfloat16))
    trainer, receiver = WeightTrainer(boxes[0], given), WeightReceiver(boxes[1], taken)
    await trainer.join(controller.address, PATIENCE_S)
    await receiver.join(controller.address, PATIENCE_S)
    offer = asyncio.ensure_future(trainer.publish(1))
    await controller.update(1, PATIENCE_S)
    await offer
    assert torch.equal(fused[16:], source.weight)
    assert not fused[:16].any()
    await trainer.close()
    await receiver.close()
    for memory in (given, taken):
        memory.close()


def test_tensor_elsewhere_than_on_the_cpu_is_refused() -> None:
    with xr.Engine("here", transport="null") as engine:
        memory = WeightMemory(engine, "trainer", 0)
        with pytest.raises(xr.UsageError, match="w: the tensor is on meta"):
            memory.add("w", torch.zeros(3, device="meta"))


async def test_tensors_that_moved_fail_the_update_and_new_memories_go_on(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(trainer_count=0, spare=False)
    controller = await fleet.start(targets=[])
    boxes = [fleet.mailbox(name) for name in ("trainer", "inference")]
    modules = [torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False)]
    memories: list[WeightMemory] = []

    def memory_of(name: str, role: Any, module: torch.nn.Linear) -> WeightMemory:
        memories.append(WeightMemory(fleet.engines[name], role, 0))
        memories[-1].add("weight", module.weight)
        return memories[-1]

    async def update(version: int) -> None:
        offer = asyncio.ensure_future(trainer.publish(version, PATIENCE_S))
        try:
            await controller.update(version, PATIENCE_S)
        finally:
            await asyncio.wait([offer])
            offer.exception()

    trainer = WeightTrainer(boxes[0], memory_of("trainer", "trainer", modules[0]))
    receiver = WeightReceiver(boxes[1], memory_of("inference", "target", modules[1]))
    await trainer.join(controller.address, PATIENCE_S)
    await receiver.join(controller.address, PATIENCE_S)
    await update(1)

    modules[0].weight.data = torch.ones(8, 8)
    with pytest.raises(xr.UsageError, match=r"^weight: its tensor lies elsewhere"):
        trainer.publish(2)
    await trainer.close()
    trainer = WeightTrainer(boxes[0], memory_of("trainer", "trainer", modules[0]))
    await trainer.join(controller.address, PATIENCE_S)
    await update(2)
    assert torch.equal(modules[1].weight, torch.ones(8, 8))

    modules[1].weight.data = torch.zeros(8, 8)
    with pytest.raises(UpdateFailed, match="inference rank 0: Open: weight: its tensor lies elsewhere"):
        await update(3)
    await receiver.close()
    receiver = WeightReceiver(boxes[1], memory_of("inference", "target", modules[1]))
    await receiver.join(controller.address, PATIENCE_S)
    await update(3)
    assert torch.equal(modules[1].weight, torch.ones(8, 8))
    await trainer.close()
    await receiver.close()
    for memory in memories:
        memory.close()

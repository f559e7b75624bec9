"""Weights on a true GPU: what torch makes there is what numpy makes, and updates of them follow the streams' order."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

from crossrail.weights import WeightMemory, WeightReceiver, WeightTrainer
from crossrail.weights.conversion.casts import Caster, storage
from crossrail.weights.conversion.float8 import BlockQuantiser, blocks
from crossrail.weights.conversion.torch_casts import Checks, cast, quantise
from crossrail.weights.step.torch_preparer import TorchPreparer
from tests.support.seeds import Seed
from tests.weights.conftest import MakeFleet
from tests.weights.fleet import PATIENCE_S
from tests.weights.test_torch_casts import EXACT_NAN, FLOATS, any_bits, as_torch

pytestmark = [pytest.mark.hw, pytest.mark.timeout(180)]

SHAPE = 1000, 640


@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("target", FLOATS)
def test_casts_as_numpy_does(source: str, target: str, seed: Seed) -> None:
    values = any_bits(seed.rng(), source, 1 << 20)
    ours = np.empty(values.shape, storage(target))
    theirs = torch.empty(values.shape, dtype=getattr(torch, target), device="cuda")
    Caster().cast(values, source, ours, target)
    cast(as_torch(values, source).cuda(), theirs)
    ours_there = as_torch(ours, target)
    is_nan = torch.isnan(ours_there)
    assert torch.equal(torch.isnan(theirs.cpu()), is_nan)
    if (source, target) in EXACT_NAN or source == target:
        is_nan[:] = False
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[ours.itemsize]
    assert torch.equal(theirs.cpu().view(bits)[~is_nan], ours_there.view(bits)[~is_nan])


@pytest.mark.parametrize("block", [(128, 128), (1, 128), (3, 7)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_quantises_as_numpy_does(block: tuple[int, int], dtype: str, seed: Seed) -> None:
    rng = seed.rng()
    values = (rng.standard_normal(SHAPE) * 2.0 ** rng.uniform(-40, 20, SHAPE)).astype(np.float32)
    if dtype == "bfloat16":
        values = (values.view(np.uint32) >> 16).astype(np.uint16)
    grid = tuple(blocks(n, size) for n, size in zip(SHAPE, block, strict=True))
    ours, our_scales = np.empty(SHAPE, np.uint8), np.empty(grid, np.float32)
    BlockQuantiser().quantise(values, ours, our_scales, "w", block)
    theirs, their_scales = torch.empty(SHAPE, dtype=torch.uint8, device="cuda"), torch.empty(grid, device="cuda")
    checks = Checks()
    quantise(as_torch(values, dtype).cuda(), theirs, their_scales, "w", block, checks)
    checks.finish()
    assert np.array_equal(theirs.cpu().numpy(), ours)
    assert np.array_equal(their_scales.cpu().numpy(), our_scales)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("spare", [True, False])
async def test_updates_from_gpu_to_gpu(make_fleet: MakeFleet, transport: str, spare: bool) -> None:
    """What kernels are still writing at publish() is what arrives, and what arrived is what the next kernel reads."""
    fleet = make_fleet(transport, trainer_count=0)
    await fleet.start(targets=[])
    boxes = [fleet.mailbox(name) for name in ("trainer", "inference")]
    names = ("as_it_is", "cast", "quantised")
    sources = {name: torch.zeros(SHAPE, device="cuda") for name in names}
    wanted: dict[str, Any] = {
        "as_it_is": torch.zeros(SHAPE, device="cuda"),
        "cast": torch.zeros(SHAPE, dtype=torch.bfloat16, device="cuda"),
        "quantised": torch.zeros(SHAPE, dtype=torch.float8_e4m3fn, device="cuda"),
    }
    scales = torch.zeros(8, 5, device="cuda")
    stream = torch.cuda.Stream()
    with (
        WeightMemory(fleet.engines["trainer"], "trainer", 0) as source,
        WeightMemory(fleet.engines["inference"], "target", 0) as target,
    ):
        for name in names:
            source.add(name, sources[name])
            target.add(name, wanted[name])
        target.add("quantised_scale", scales, scale_of="quantised", block=(128, 128))
        trainer, receiver = WeightTrainer(boxes[0], source), WeightReceiver(boxes[1], target, spare=spare)
        for member in (trainer, receiver):
            await member.join(fleet.controller.address, PATIENCE_S)
        for version in (1, 2, 3):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(50_000_000)
                for tensor in sources.values():
                    tensor.copy_(torch.randn(SHAPE, device="cuda"))
                offer = asyncio.ensure_future(trainer.publish(version))
            await fleet.controller.update(version, PATIENCE_S)
            await offer
            async with receiver.reading(PATIENCE_S) as reading:
                for name in ("as_it_is", "cast"):
                    got = reading.like(wanted[name])
                    assert torch.equal(got, sources[name].to(got.dtype))
                codes, factors = reading.like(wanted["quantised"]), reading.like(scales)
                ours, our_scales = np.empty(SHAPE, np.uint8), np.empty((8, 5), np.float32)
                BlockQuantiser().quantise(sources["quantised"].cpu().numpy(), ours, our_scales)
                assert np.array_equal(codes.view(torch.uint8).cpu().numpy(), ours)
                assert np.array_equal(factors.cpu().numpy(), our_scales)
        await trainer.close()
        await receiver.close()


async def test_weights_on_the_host_are_loaded_and_prepared_on_the_gpu(make_fleet: MakeFleet, seed: Seed) -> None:
    """Pinned and not, with gaps, and larger than what is staged at once."""
    fleet = make_fleet("shm", trainer_count=0)
    await fleet.start(targets=[])
    boxes = [fleet.mailbox(name) for name in ("trainer", "inference")]
    rng = seed.rng()
    large, small = (3000, 4096), (300, 640)
    held = {
        "pinned": torch.empty(large, pin_memory=True),
        "pageable": torch.empty(large),
        "with_gaps": torch.empty(small[0], 2 * small[1])[:, : small[1]],
        "quantised": torch.empty(small),
    }
    wanted: dict[str, Any] = {
        name: torch.zeros(held[name].shape, dtype=torch.bfloat16, device="cuda")
        for name in ("pinned", "pageable", "with_gaps")
    }
    wanted["quantised"] = torch.zeros(small, dtype=torch.float8_e4m3fn, device="cuda")
    scales = torch.zeros(3, 5, device="cuda")
    with (
        WeightMemory(fleet.engines["trainer"], "trainer", 0) as source,
        WeightMemory(fleet.engines["inference"], "target", 0) as target,
    ):
        for name, tensor in held.items():
            source.add(name, tensor)
            target.add(name, wanted[name])
        target.add("quantised_scale", scales, scale_of="quantised", block=(128, 128))
        trainer = WeightTrainer(boxes[0], source, tmp_bytes_max=256 << 20, preparer=TorchPreparer("cuda:0"))
        receiver = WeightReceiver(boxes[1], target)
        for member in (trainer, receiver):
            await member.join(fleet.controller.address, PATIENCE_S)
        for version in (1, 2):
            for tensor in held.values():
                tensor.copy_(torch.from_numpy(rng.standard_normal(tuple(tensor.shape), np.float32)))
            offer = asyncio.ensure_future(trainer.publish(version))
            report = await fleet.controller.update(version, PATIENCE_S)
            await offer
            assert report.steps[0].load_s > 0
            for name in ("pinned", "pageable", "with_gaps"):
                assert torch.equal(wanted[name].cpu(), held[name].to(torch.bfloat16)), name
            ours, our_scales = np.empty(small, np.uint8), np.empty((3, 5), np.float32)
            BlockQuantiser().quantise(held["quantised"].numpy(), ours, our_scales)
            assert np.array_equal(wanted["quantised"].view(torch.uint8).cpu().numpy(), ours)
            assert np.array_equal(scales.cpu().numpy(), our_scales)
        await trainer.close()
        await receiver.close()

"""Tasks made ready from a plan: what is joined, what is quantised and what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import crossrail as xr
from crossrail.weights.inventory.holdings import Holding, Inventory, RegionInfo
from crossrail.weights.inventory.memory import WeightMemory
from crossrail.weights.planning.plan import Param
from crossrail.weights.planning.planner import make_plan
from crossrail.weights.step.ready import ready_tasks
from tests.conftest import EngineFactory
from tests.weights.float8_values import decoded
from tests.weights.replay import run_task


def test_rows_of_one_length_are_one_submit(open_engine: EngineFactory) -> None:
    engine = open_engine(transport="null")
    values = np.zeros((64, 32), np.float32)
    half = np.zeros((64, 16), np.float32)
    wide = np.zeros((64, 20), np.float32)
    with WeightMemory(engine, "trainer", 0) as source, WeightMemory(engine, "target", 0) as target:
        source.add("w", values)
        target.add("w", half, shape=(64, 32), box=((0, 64), (0, 16)))
        plan = make_plan([source.inventory()], [target.inventory()])
        (task,) = ready_tasks(plan, 0)
        assert sum(len(batch.source_index) for batch in task.batches) == len(plan.writes)
    with WeightMemory(engine, "trainer", 0) as source, WeightMemory(engine, "target", 0) as target:
        source.add("w", values)
        target.add("w", wide[:, 2:18], shape=(64, 32), box=((0, 64), (16, 32)))
        plan = make_plan([source.inventory()], [target.inventory()])
        (task,) = ready_tasks(plan, 0)
        (batch,) = task.batches
        assert (batch.nbytes, len(batch.source_index)) == (64, 64)
        assert batch.offset_step == 80


@pytest.mark.parametrize("shape", [(), (1,), (300,), (1, 1), (2, 3, 4)], ids=str)
def test_numbers_and_rows_are_quantised_as_matrices_are(shape: tuple[int, ...], open_engine: EngineFactory) -> None:
    engine = open_engine(transport="null")
    block = (1, 128, 128)[3 - len(shape) :]
    grid = tuple(-(-extent // size) for extent, size in zip(shape, block, strict=True))
    values = np.arange(-7, np.prod(shape, dtype=int) - 7, dtype=np.float32).reshape(shape)
    codes, scales = np.zeros(shape, np.uint8), np.zeros(grid, np.float32)
    with WeightMemory(engine, "trainer", 0) as source, WeightMemory(engine, "target", 0) as target:
        source.add("w", values)
        target.add("w", codes, dtype="float8_e4m3fn")
        target.add("w_scale", scales, scale_of="w", block=block)
        plan = make_plan([source.inventory()], [target.inventory()])
        (task,) = ready_tasks(plan, 0)
        memories, received = ([region.array() for region in each.regions] for each in (source, target))
        run_task(task, memories, {0: memories}, {0: received})
    for index in np.ndindex(*grid):
        at = tuple(slice(i * size, (i + 1) * size) for i, size in zip(index, block, strict=True))
        assert scales[index] == np.abs(values[at]).max() / np.float32(448)
        np.testing.assert_allclose(decoded(codes[at]) * scales[index], values[at], rtol=1 / 16)
        assert (np.abs(decoded(codes[at])).max()) == 448


def test_scales_of_several_matrices_together_are_refused_by_name(open_engine: EngineFactory) -> None:
    engine = open_engine(transport="null")
    with WeightMemory(engine, "target", 0) as target:
        target.add("layer.w", np.zeros((4, 4, 4), np.uint8), dtype="float8_e4m3fn")
        with pytest.raises(xr.UsageError, match=r"layer\.w_scale: blocks of \(2, 128, 128\) share a scale"):
            target.add("layer.w_scale", np.zeros((2, 1, 1), np.float32), scale_of="layer.w", block=(2, 128, 128))


@pytest.mark.parametrize(
    ("block", "dtype", "why"),
    [
        ((2, 128, 128), "float32", r"blocks of \(2, 128, 128\) share a scale"),
        ((1, 128, 128), "float16", "float16 is not quantised, only float32 and bfloat16 are"),
    ],
)
def test_plan_that_cannot_be_carried_out_is_refused_by_name(block: tuple[int, ...], dtype: str, why: str) -> None:
    """make_plan() makes none such, but it comes from another process."""
    shape, grid = (4, 4, 4), [-(-4 // size) for size in block]
    regions = [RegionInfo(b"", 1024)]
    trainer = Inventory.of("trainer", 0, regions, [Holding.whole("layer.w", "float32", shape, 0, 0)])
    wanted = [
        Holding.whole("layer.w", "float8_e4m3fn", shape, 0, 0),
        Holding.whole("s", "float32", grid, 0, 512, scale_of="layer.w", block=block),
    ]
    plan = make_plan([trainer], [Inventory.of("target", 0, regions, wanted)])
    plan = replace(plan, params=(Param("layer.w", dtype, shape),))
    with pytest.raises(xr.UsageError, match=rf"layer\.w: {why}"):
        list(ready_tasks(plan, 0))

"""Tasks made ready from a plan do, byte for byte, what converting the whole checkpoint by hand does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import crossrail as xr
from crossrail.weights.inventory.memory import WeightMemory
from crossrail.weights.planning.planner import make_plan
from crossrail.weights.step.preparer import NumpyPreparer
from crossrail.weights.step.ready import ready_tasks
from tests.conftest import EngineFactory
from tests.weights.float8_values import decoded
from tests.weights.replay import IN_A_SHARD, refused, run_task, update_all


@pytest.mark.parametrize("gather", ["needed", "full"])
@pytest.mark.parametrize("count", [1, 3, 4])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_all_targets_get_what_conversion_gives(gather: Any, count: int, dtype: str, open_engine: EngineFactory) -> None:
    update_all(open_engine(transport="null"), gather, count, dtype, NumpyPreparer())


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


@pytest.mark.parametrize(("shape", "block", "at"), IN_A_SHARD, ids=str)
def test_what_is_not_finite_is_told_where_it_is_in_the_whole_parameter(
    shape: tuple[int, ...], block: tuple[int, ...], at: tuple[int, ...], open_engine: EngineFactory
) -> None:
    error = refused(open_engine(transport="null"), shape, block, at, NumpyPreparer())
    assert (error.parameter, error.index) == ("w", at)
    assert str(error).startswith(f"w[{', '.join(map(str, at))}] is nan" if at else "w is nan")


def test_scales_of_several_matrices_together_are_refused_by_name(open_engine: EngineFactory) -> None:
    engine = open_engine(transport="null")
    with WeightMemory(engine, "trainer", 0) as source, WeightMemory(engine, "target", 0) as target:
        source.add("layer.w", np.zeros((4, 4, 4), np.float32))
        target.add("layer.w", np.zeros((4, 4, 4), np.uint8), dtype="float8_e4m3fn")
        target.add("layer.w_scale", np.zeros((2, 1, 1), np.float32), scale_of="layer.w", block=(2, 128, 128))
        plan = make_plan([source.inventory()], [target.inventory()])
        with pytest.raises(xr.UsageError, match=r"layer\.w: blocks of \(2, 128, 128\) share a scale"):
            list(ready_tasks(plan, 0))


def test_quantising_other_than_float32_and_bfloat16_is_refused_by_name(open_engine: EngineFactory) -> None:
    engine = open_engine(transport="null")
    with WeightMemory(engine, "trainer", 0) as source, WeightMemory(engine, "target", 0) as target:
        source.add("layer.w", np.zeros((4, 4), np.float16))
        target.add("layer.w", np.zeros((4, 4), np.uint8), dtype="float8_e4m3fn")
        target.add("layer.w_scale", np.zeros((1, 1), np.float32), scale_of="layer.w", block=(128, 128))
        plan = make_plan([source.inventory()], [target.inventory()])
        with pytest.raises(xr.UsageError, match=r"layer\.w: float16 is not quantised"):
            list(ready_tasks(plan, 0))

"""Runs ready tasks in plain memory, without engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

import crossrail as xr
from crossrail.weights.errors import NotFinite
from crossrail.weights.inventory.memory import WeightMemory
from crossrail.weights.planning.planner import PlanOptions, make_plan
from crossrail.weights.step.preparer import NumpyPreparer, Preparer
from crossrail.weights.step.ready import ready_tasks
from crossrail.weights.step.task import ReadyTask
from tests.weights.small_model import TARGETS, Target, Trainer, plain, weights_of

Bytes = npt.NDArray[np.uint8]


@dataclass
class Plain:
    """What preparers want of a region."""

    memory: Bytes
    device: str = "cpu"

    @property
    def base(self) -> int:
        return self.memory.ctypes.data

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes

    def array(self) -> Bytes:
        return self.memory

    def view(self) -> memoryview:
        return memoryview(self.memory)


def run_task(
    task: ReadyTask,
    own: list[Bytes],
    trainers: dict[int, list[Bytes]],
    targets: dict[int, list[Bytes]],
    preparer: Preparer | None = None,
) -> None:
    """What a Step does, one thing after another, in plain memory. The arena is full of other things before."""
    base = 512
    arena = np.full(base + task.piece_bytes + 512, 0xA5, np.uint8)
    for read in task.reads:
        piece = trainers[read.trainer][read.region][read.source : read.source + read.nbytes]
        arena[base + read.piece : base + read.piece + read.nbytes] = piece
    preparer = preparer or NumpyPreparer()
    regions: list[Any] = [Plain(memory) for memory in own]
    preparer.open(regions, Plain(arena))  # type: ignore[arg-type]
    preparer.load([(task, base)])
    preparer.prepare([(task, base)])
    preparer.close()
    assert (arena[:base] == 0xA5).all() and (arena[base + task.piece_bytes :] == 0xA5).all()
    source, begin = (arena, base) if task.own_region is None else (own[task.own_region], task.own_offset)
    for batch in task.batches:
        for source_at, offset_at in zip(batch.source_index.tolist(), batch.offset_index.tolist(), strict=True):
            at = begin + batch.source + batch.source_step * source_at
            to = batch.offset + batch.offset_step * offset_at
            targets[batch.target][batch.region][to : to + batch.nbytes] = source[at : at + batch.nbytes]


# Shape, blocks that share a scale, an element of the second of two trainers; they have halves by the first dimension.
IN_A_SHARD = [
    ((512, 256), (128, 128), (266, 3)),
    ((300, 200), (128, 128), (200, 9)),  # in blocks that both have a part of
    ((8, 130, 40), (1, 128, 128), (6, 129, 7)),
    ((2, 4, 130, 40), (1, 1, 128, 128), (1, 2, 5, 6)),
    ((600,), (128,), (333,)),
    ((), (), ()),
]


def refused(
    engine: xr.Engine, shape: tuple[int, ...], block: tuple[int, ...], at: tuple[int, ...], preparer: Preparer
) -> NotFinite:
    """What the preparer says when that element is no number."""
    whole = np.ones(shape, np.float32)
    whole[at] = np.nan
    halves = np.array_split(whole, 2) if shape else [whole]
    grid = tuple(-(-extent // size) for extent, size in zip(shape, block, strict=True))
    target = WeightMemory(engine, "target", 0)
    target.add("w", np.zeros(shape, np.uint8), dtype="float8_e4m3fn")
    target.add("w_scale", np.zeros(grid, np.float32), scale_of="w", block=block)
    sources = [WeightMemory(engine, "trainer", rank) for rank in range(len(halves))]
    for rank, (source, half) in enumerate(zip(sources, halves, strict=True)):
        begin = rank * len(halves[0]) if shape else 0
        box = ((begin, begin + len(half)), *((0, extent) for extent in shape[1:])) if shape else ()
        source.add("w", half, shape=shape, box=box)
    inventories = [source.inventory() for source in sources]
    plan = make_plan(inventories, [target.inventory()], PlanOptions(write_bytes_min=1))  # each prepares its own
    memories = {source.rank: [region.array() for region in source.regions] for source in sources}
    received = {0: [region.array() for region in target.regions]}
    try:
        for rank in memories:
            for task in ready_tasks(plan.of_trainer(rank), rank):
                run_task(task, memories[rank], memories, received, preparer)
    except NotFinite as error:
        return error
    finally:
        for memory in (*sources, target):
            memory.close()
    raise AssertionError("it was quantised")


def update_all(engine: xr.Engine, gather: Any, count: int, dtype: str, preparer: Preparer) -> None:
    """An update by a plan. Asserts what each target has then, and that it was told of as many writes as come."""
    weights = weights_of(1)
    trainers = [Trainer(WeightMemory(engine, "trainer", rank), count, plain, dtype) for rank in range(count)]
    targets = [Target(WeightMemory(engine, "target", rank), plain) for rank in range(TARGETS)]
    for trainer in trainers:
        trainer.load(weights)
    options = PlanOptions(gather=gather, write_bytes_min=1000)
    plan = make_plan([t.memory.inventory() for t in trainers], [t.memory.inventory() for t in targets], options)
    memories = {t.memory.rank: [region.array() for region in t.memory.regions] for t in trainers}
    received = {t.memory.rank: [region.array() for region in t.memory.regions] for t in targets}
    writes = dict.fromkeys(range(TARGETS), 0)
    for rank in range(count):
        for task in ready_tasks(plan.of_trainer(rank), rank):
            run_task(task, memories[rank], memories, received, preparer)
            for batch in task.batches:
                writes[batch.target] += len(batch.source_index)
    for target in targets:
        for key, wanted in target.expected(weights).items():
            assert np.array_equal(target.arrays[key], wanted), f"{key} of {target.memory.rank}"
        assert writes[target.memory.rank] == plan.expected(target.memory.rank)
    for each in [*trainers, *targets]:
        each.memory.close()

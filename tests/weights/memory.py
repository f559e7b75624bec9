"""Processes with real memory, and a plan carried out in it by plain loops: what the planner's tests compare with.

Quantisation is a stand-in that tells every element and block from every other: whole numbers, of which a value keeps
the distance to its block's maximum, and the scale is that maximum.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from crossrail.weights import Holding, Inventory, Plan, RegionInfo
from crossrail.weights.dtypes import DTYPES

STORAGE = {"bfloat16": np.uint16, "float32": np.float32, "float8_e4m3fn": np.uint8, "float64": np.float64}
POISON = 0xA5


class Process:
    """An inventory and the memory that it describes, one region."""

    def __init__(self, role: str, rank: int, holdings: Sequence[Holding], nbytes: int) -> None:
        self.memory = np.full(nbytes, POISON, np.uint8)
        self.inventory = Inventory.of(role, rank, [RegionInfo(b"", nbytes)], holdings)

    def view(self, holding: Holding) -> np.ndarray:
        extent = [stop - start for start, stop in holding.box]
        dtype = np.dtype(STORAGE[holding.dtype])
        return np.ndarray(extent, dtype, self.memory, holding.offset, holding.strides)


def fill_trainers(trainers: Sequence[Process], whole: dict[str, np.ndarray]) -> None:
    for trainer in trainers:
        for holding in trainer.inventory.holdings:
            trainer.view(holding)[...] = whole[holding.name][_slices(holding.box)]


def expected_memory(target: Process, whole: dict[str, np.ndarray], dtypes: dict[str, str]) -> np.ndarray:
    """What its memory is to be after an update, by converting whole parameters."""
    blocks = {held.scale_of: held.block for held in target.inventory.holdings if held.scale_of is not None}
    wanted = Process("target", 0, list(target.inventory.holdings), len(target.memory))
    for holding in target.inventory.holdings:
        name = holding.scale_of or holding.name
        quantised = holding.scale_of or (holding.dtype == "float8_e4m3fn" and dtypes[name] != holding.dtype)
        if quantised:
            values, scales = quantise(whole[name], blocks[name])
            array = scales if holding.scale_of else values
        else:
            array = whole[name].astype(STORAGE[holding.dtype])
        wanted.view(holding)[...] = array[_slices(holding.box)]
    return wanted.memory


def quantise(array: np.ndarray, block: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    grid = [-(-extent // size) for extent, size in zip(array.shape, block, strict=True)]
    values, scales = np.zeros(array.shape, np.uint8), np.zeros(grid, np.float32)
    for index in np.ndindex(*grid):
        at = tuple(slice(i * size, (i + 1) * size) for i, size in zip(index, block, strict=True))
        scales[index] = array[at].max()
        values[at] = (scales[index] - array[at]).astype(np.int64).astype(np.uint8)
    return values, scales


def carry_out(plan: Plan, trainers: Sequence[Process], targets: Sequence[Process]) -> None:
    source = {trainer.inventory.rank: trainer.memory for trainer in trainers}
    target = {one.inventory.rank: one.memory for one in targets}
    for number, task in enumerate(plan.tasks):
        if task["direct"]:
            buffer = source[int(task["trainer"])][int(task["offset"]) :]
        else:
            buffer = np.full(int(task["buffer_bytes"]), POISON, np.uint8)
            for part in range(*plan.task_parts[number : number + 2]):
                _prepare(plan, part, source, buffer)
        for write in plan.writes[slice(*plan.task_writes[number : number + 2])]:
            nbytes, to, begin = int(write["nbytes"]), int(write["offset"]), int(write["source"])
            target[int(write["target"])][to : to + nbytes] = buffer[begin : begin + nbytes]


def _prepare(plan: Plan, number: int, source: dict[int, np.ndarray], buffer: np.ndarray) -> None:
    part = plan.parts[number]
    param = plan.params[part["param"]]
    dims = len(param.shape)
    start = part["start"][:dims]
    gathered = np.zeros(part["stop"][:dims] - start, STORAGE[param.dtype])
    for gather in plan.gathers[slice(*plan.part_gathers[number : number + 2])]:
        low, high = gather["start"][:dims] - start, gather["stop"][:dims] - start
        memory = source[int(gather["trainer"])]
        strides = tuple(gather["strides"][:dims].tolist())
        piece = np.ndarray(high - low, gathered.dtype, memory, int(gather["offset"]), strides)
        gathered[_slices(zip(low, high, strict=True))] = piece
    block = part["block"][:dims]
    if part["block"].any():
        values, scales = quantise(gathered, block)
    else:
        values, scales = gathered.astype(STORAGE[DTYPES[part["dtype"]]]), None
    for output in plan.outputs[slice(*plan.part_outputs[number : number + 2])]:
        array, origin = (scales, start // np.maximum(block, 1)) if output["scales"] else (values, start)
        low, high = output["start"][:dims] - origin, output["stop"][:dims] - origin
        packed = np.ascontiguousarray(array[_slices(zip(low, high, strict=True))]).reshape(-1).view(np.uint8)
        assert len(packed) == output["nbytes"]
        buffer[int(output["offset"]) :][: len(packed)] = packed


def _slices(box: object) -> tuple[slice, ...]:
    return tuple(slice(int(start), int(stop)) for start, stop in box)

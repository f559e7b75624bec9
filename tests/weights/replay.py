"""Runs ready tasks in plain memory, without engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from crossrail.weights.preparer import NumpyPreparer, Preparer
from crossrail.weights.task import ReadyTask

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
    preparer.prepare([(task, base)])
    preparer.close()
    assert (arena[:base] == 0xA5).all() and (arena[base + task.piece_bytes :] == 0xA5).all()
    source, begin = (arena, base) if task.own_region is None else (own[task.own_region], task.own_offset)
    for batch in task.batches:
        for source_at, offset_at in zip(batch.source_index.tolist(), batch.offset_index.tolist(), strict=True):
            at = begin + batch.source + batch.source_step * source_at
            to = batch.offset + batch.offset_step * offset_at
            targets[batch.target][batch.region][to : to + batch.nbytes] = source[at : at + batch.nbytes]

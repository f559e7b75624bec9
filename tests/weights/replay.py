"""Runs ready tasks in plain memory, without engines."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from crossrail.weights.task import ReadyTask, Tools

Bytes = npt.NDArray[np.uint8]


def run_task(
    task: ReadyTask, own: list[Bytes], trainers: dict[int, list[Bytes]], targets: dict[int, list[Bytes]]
) -> None:
    """What a Step does, one thing after another, in plain memory. The arena is full of other things before."""
    base = 512
    arena = np.full(base + task.piece_bytes + 512, 0xA5, np.uint8)
    for read in task.reads:
        piece = trainers[read.trainer][read.region][read.source : read.source + read.nbytes]
        arena[base + read.piece : base + read.piece + read.nbytes] = piece
    task.prepare(own.__getitem__, arena, base, Tools())
    assert (arena[:base] == 0xA5).all() and (arena[base + task.piece_bytes :] == 0xA5).all()
    source, begin = (arena, base) if task.own_region is None else (own[task.own_region], task.own_offset)
    for batch in task.batches:
        for source_at, offset_at in zip(batch.source_index.tolist(), batch.offset_index.tolist(), strict=True):
            at = begin + batch.source + batch.source_step * source_at
            to = batch.offset + batch.offset_step * offset_at
            targets[batch.target][batch.region][to : to + batch.nbytes] = source[at : at + batch.nbytes]

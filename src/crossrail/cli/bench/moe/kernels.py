"""`crossrail bench moe --kernels`: times one rank's kernels alone, in this process, next to memcpy."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from crossrail import _core
from crossrail.cli.bench.moe.work import MoeShape, RankWork, expert_output, routes
from crossrail.cli.bench.spec import Bar, Line, Result, Sample
from crossrail.errors import CrossrailError
from crossrail.moe.kernels import CpuKernels, cpu_levels

_COPIES_MAX = 1.1
_ROW_UNIT = 16

Array = npt.NDArray[Any]


def measure_kernels(shape: MoeShape, ranks: int, runs: int, rounds: int) -> Iterator[Result]:
    """A result for each kernel, sums also by each set of instructions. All ranks' data are made here; rank 0 works."""
    stage = _Stage(shape, ranks)
    for name, title, nbytes, act in stage.steps():
        line = Line(
            name=f"{shape.name}-{ranks}-kernel-{name}",
            title=title,
            unit="us",
            limit="memcpy of the same bytes",
            bar=Bar("ratio", "<=", _COPIES_MAX) if name in ("pack", "pull", "reduce") else None,
        )
        result = Result(line)
        for _ in range(runs):
            result.samples.append(stage.sample(nbytes, act, rounds))
        yield result


class _Stage:
    """Boards of all ranks in shared memory, as near ranks map them, and the output of rank 0."""

    def __init__(self, shape: MoeShape, ranks: int) -> None:
        self._shape, self._kernels = shape, CpuKernels()
        stride = -(-shape.row_bytes // _ROW_UNIT) * _ROW_UNIT
        counts = np.zeros((ranks, shape.experts), np.int32)
        self._indices = [routes(shape, rank) for rank in range(ranks)]
        slots = [np.empty_like(indices) for indices in self._indices]
        for indices, count, slot in zip(self._indices, counts, slots, strict=True):
            self._kernels.count(indices, shape.experts, count, slot)
        self._orders = [_core.moe.sort_routes(*of) for of in zip(self._indices, slots, counts, strict=True)]
        layout = _core.moe.Layout(world=ranks, experts=shape.experts, top_k=shape.top_k, max_tokens=shape.tokens)
        self._layout = layout
        self._placement = _core.moe.Placement(layout, counts)
        self._where = self._placement.places(0, self._indices[0], slots[0])
        self._work = [RankWork(shape, rank) for rank in range(ranks)]
        self._boards = [_shared((shape.tokens, stride), np.uint8) for _ in range(ranks)]
        rows = self._placement.rows_needed(0)
        self._x = np.ones((rows, shape.hidden), np.uint8)
        self._scales = np.ones((rows, shape.blocks), np.float32)
        self._y = [_shared((self._placement.rows_needed(rank), shape.hidden), np.uint16) for rank in range(ranks)]
        self._out = np.ones((shape.tokens, shape.hidden), np.uint16)
        most = shape.tokens * shape.top_k * shape.back_bytes
        self._scratch = np.ones(2 * max(most, rows * shape.row_bytes), np.uint8)
        self._prepare()

    def steps(self) -> Iterator[tuple[str, str, int, Callable[[], object]]]:
        """Name, title, how many bytes memcpy moves beside it, and the act."""
        shape, summed = self._shape, self._shape.tokens * self._shape.top_k * self._shape.back_bytes
        yield "pack", "rows and scales onto a board", shape.tokens * shape.row_bytes, self._pack
        yield "pull", "rows of all boards, with their places", len(self._x) * shape.row_bytes, self._pull
        yield "reduce", "weighted sums, beside the rows read", summed, self._sums(self._kernels)
        for level in cpu_levels():
            yield f"reduce-{level}", f"the same with {level}", summed, self._sums(CpuKernels(level))
        numbers = self._out.nbytes
        yield "quantize", "bfloat16 to float8 with scales", numbers, lambda: self._kernels.quantize(self._out)

    def sample(self, nbytes: int, act: Callable[[], object], rounds: int) -> Sample:
        """Medians of rounds, memcpy just before each."""
        took, copies = [], []
        half = len(self._scratch) // 2
        for _ in range(rounds):
            dst, src = self._scratch[:nbytes], self._scratch[half : half + nbytes]
            copies.append(_core.bench.copy_in_calls(dst, src, nbytes) / 1e3)
            began_ns = time.perf_counter_ns()
            act()
            took.append((time.perf_counter_ns() - began_ns) / 1e3)
        return Sample(median(took), median(copies))

    def _prepare(self) -> None:
        """Fills boards and outputs of experts, and compares what the kernels make of them."""
        for board, work in zip(self._boards, self._work, strict=True):
            self._kernels.pack(board, work.x, work.scales, None)
        self._pull()
        for rank, y in enumerate(self._y):
            first, at = self._layout.first_expert(rank), 0
            for expert in range(first, first + self._layout.expert_count(rank)):
                for work in self._work:
                    x = work.x[np.nonzero(work.indices == expert)[0]]
                    if rank == 0 and not np.array_equal(self._x[at : at + len(x)], x):
                        raise CrossrailError(f"pulled rows of expert {expert} are not those that were packed")
                    y[at : at + len(x)] = expert_output(x)
                    at += len(x)
        for level in cpu_levels():
            self._out[:] = 0
            self._sums(CpuKernels(level))()
            if not np.array_equal(self._out, expert_output(self._work[0].x)):
                raise CrossrailError(f"sums by {level} are not what the experts made")

    def _pack(self) -> None:
        self._kernels.pack(self._boards[0], self._work[0].x, self._work[0].scales, None)

    def _pull(self) -> None:
        for rank, (board, order) in enumerate(zip(self._boards, self._orders, strict=True)):
            self._kernels.pull(self._x, self._scales, board, self._placement.pull_near(rank, 0, order))

    def _sums(self, kernels: CpuKernels) -> Callable[[], None]:
        return lambda: kernels.reduce(self._out, self._y, self._where, self._work[0].weights)


def _shared(shape: tuple[int, int], dtype: type) -> Array:
    """Shared memory, which has small pages where the kernel gives it no others; touched."""
    nbytes = max(int(np.prod(shape)) * np.dtype(dtype).itemsize, 1)
    array: Array = np.frombuffer(mmap.mmap(-1, nbytes), dtype, int(np.prod(shape))).reshape(shape)
    array[:] = 1
    return array

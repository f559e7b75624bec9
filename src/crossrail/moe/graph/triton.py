"""GraphKernels in Triton, for a GPU; slowly in host memory, with TRITON_INTERPRET=1 set before this is imported."""

from __future__ import annotations

import math
from typing import Any

from crossrail._extras import needs
from crossrail.moe.graph import triton_code as code
from crossrail.moe.graph.board import GraphBoard
from crossrail.moe.graph.kernels import Own, Routes
from crossrail.moe.graph.memory import GraphMemory, Rows
from crossrail.moe.kernels import triton_code as rows_code
from crossrail.moe.kernels.triton import TritonKernels

with needs(__name__, "'crossrail[triton]'"):
    import torch
    import triton

_COPY_BLOCK = 1024  # elements of a row that one program moves
_COUNT_BLOCK = 1024
_PROGRAMS = 528  # that share the rows of a table whose length only they know: four for each SM of an H100
_TYPES = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class TritonGraphKernels:
    """See GraphKernels. Calls only launch; the first of each shape compiles, and so is not to be captured."""

    name = "triton"

    def __init__(self) -> None:
        self._kernels = TritonKernels(checked=False)

    def share(self, board: GraphBoard, kept: Any, indices: Any, tokens: Any | None, number: Any) -> None:
        code.share_routes[(triton.cdiv(board.routes_max, _COUNT_BLOCK),)](
            board.routes, kept, indices, kept if tokens is None else tokens, number, kept.numel(), board.routes_max,
            board.stride, TOP_K=kept.shape[1], HAS_TOKENS=tokens is not None, BLOCK=_COUNT_BLOCK,
        )  # fmt: skip

    def send(self, memory: GraphMemory, own: Own, x: Any, scales: Any | None, routes: Routes, number: Any) -> None:
        kept = routes.kept
        if kept.numel() == 0:
            return
        rows_code.count_routes[(own.experts,)](kept, routes.counts, routes.slots, kept.numel(), BLOCK=_COUNT_BLOCK)
        targets = memory.row_targets
        dtype = _widest(memory.rows_out, *targets.known, tensors=(x, scales))
        number_of, scale_of = _seen(x, dtype), _seen(x[:, :0] if scales is None else scales, dtype)
        stride = memory.rows_out.width // dtype.itemsize
        code.send_rows[(kept.numel(), triton.cdiv(stride, _COPY_BLOCK))](
            _all(memory.rows_out, dtype), targets.addresses, targets.counts, routes.where, number_of, scale_of, kept,
            routes.counts, routes.slots, number, memory.rows_out.stride // dtype.itemsize, len(targets.rows), own.first,
            own.end, own.experts, own.ranks, own.per_rank or 0, own.rank % own.dp_size, number_of.shape[1],
            scale_of.shape[1], stride, TOP_K=kept.shape[1], IS_EVEN=own.per_rank is not None, DP_SIZE=own.dp_size,
            EXPERTS=triton.next_power_of_2(own.experts), BLOCK=_COPY_BLOCK,
        )  # fmt: skip

    def take(
        self, memory: GraphMemory, board: GraphBoard, x: Any, scales: Any | None, counts: Any, offsets: Any, number: Any
    ) -> None:
        dtype = _widest(memory.rows_in, memory.own_rows, tensors=(x, scales))
        number_of, scale_of = _seen(x, dtype), _seen(x[:, :0] if scales is None else scales, dtype)
        width, extra = number_of.shape[1], scale_of.shape[1]
        tables, near = board.tables, board.near
        code.fetch_tables[(triton.cdiv(max(3 * board.returns_max, 1), _COUNT_BLOCK),)](
            near.numbers, near.moves, near.returns, tables.numbers, tables.moves, tables.returns, tables.expert_rows,
            tables.expert_offsets, counts, offsets, number, board.stride, len(counts),
            EXPERTS=triton.next_power_of_2(len(counts) + 1), BLOCK=_COUNT_BLOCK,
        )  # fmt: skip
        grid = (min(max(board.rows_max, 1), _PROGRAMS), triton.cdiv(width + extra, _COPY_BLOCK))
        code.take_rows[grid](
            number_of, scale_of, _all(memory.rows_in, dtype), _all(memory.own_rows, dtype), near.numbers, near.moves,
            number, board.stride,
            memory.rows_in.stride // dtype.itemsize, memory.own_rows.stride // dtype.itemsize, memory.rows_in.count,
            memory.own_rows.count, len(x), width, extra, memory.rows_in.width // dtype.itemsize, BLOCK=_COPY_BLOCK,
        )  # fmt: skip

    def give(self, memory: GraphMemory, board: GraphBoard, y: Any, number: Any) -> None:
        if len(y) == 0:
            return
        targets = memory.result_targets
        dtype = _widest(*targets.known, tensors=(y,))
        given = _seen(y, dtype)
        width = given.shape[1]
        code.give_rows[(min(board.returns_max, _PROGRAMS), triton.cdiv(width, _COPY_BLOCK))](
            targets.addresses, targets.counts, given, board.near.numbers, board.near.returns, number, board.stride,
            len(targets.rows), len(y), width, BLOCK=_COPY_BLOCK,
        )  # fmt: skip

    def sum(self, memory: GraphMemory, out: Any, where: Any, weights: Any, accumulate: bool, number: Any) -> None:
        self._kernels.reduce_unless_ended(out, memory.sources, where, weights, accumulate, number)


def _widest(*rows: Rows, tensors: tuple[Any | None, ...]) -> Any:
    """The widest integer type whose size divides the rows' sizes and alignment."""
    parts = [part for part in tensors if part is not None]
    sizes = [part.shape[1] * part.element_size() for part in parts]
    unit = math.gcd(
        8, *sizes, *(part.data_ptr() for part in parts), *(one.width for one in rows), *(one.stride for one in rows),
        *(one.first.data_ptr() for one in rows),
    )  # fmt: skip
    return _TYPES[unit]


def _seen(tensor: Any, dtype: Any) -> Any:
    return tensor.view(torch.uint8).view(dtype)


def _all(rows: Rows, dtype: Any) -> Any:
    """The parts of both parities."""
    return rows.first[: len(rows.first) // dtype.itemsize * dtype.itemsize].view(dtype)

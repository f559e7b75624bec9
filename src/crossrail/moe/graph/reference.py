"""GraphKernels as torch operations in host memory, done when they return: for tests, and to try it without a GPU."""

from __future__ import annotations

import math
from typing import Any

import torch

from crossrail.moe.graph.board import GraphBoard
from crossrail.moe.graph.kernels import Own, Routes
from crossrail.moe.graph.memory import GraphMemory, Rows
from crossrail.moe.kernels.reference import ReferenceKernels

_INDEX_MAX = (1 << 31) - 1


class ReferenceGraphKernels:
    """See GraphKernels."""

    name = "reference"

    def __init__(self) -> None:
        self._kernels = ReferenceKernels()

    def share(self, board: GraphBoard, kept: Any, indices: Any, tokens: Any | None, number: Any) -> None:
        count = len(indices) if tokens is None else min(max(int(tokens), 0), len(indices))
        kept.fill_(-1)
        fits = (indices[:count] >= -_INDEX_MAX) & (indices[:count] <= _INDEX_MAX)
        kept[:count] = torch.where(fits, indices[:count], _INDEX_MAX)
        begin = _parity(number) * board.stride
        shared = board.routes[begin : begin + board.routes_max]
        shared.fill_(-1)
        shared[: kept.numel()] = kept.flatten()

    def send(self, memory: GraphMemory, own: Own, x: Any, scales: Any | None, routes: Routes, number: Any) -> None:
        parity, top_k = _parity(number), routes.kept.shape[1]
        flat = routes.where.view(-1, 2)
        flat.fill_(-1)
        if int(number) < 0:
            return
        kept = routes.kept.flatten()
        valid = torch.nonzero((kept >= 0) & (kept < own.experts)).flatten()
        order = valid[torch.argsort(kept[valid], stable=True)]
        experts = kept[order]
        ranks = own.ranks[experts.long(), 0]
        is_own = (experts >= own.first) & (experts < own.end)
        position = torch.arange(len(order))
        own_row = position - int((experts < own.first).sum())
        flat[order] = torch.stack([2 * parity + (~is_own).int(), torch.where(is_own, own_row, position)], 1).int()
        tokens = (order // top_k).int()
        packed = 0  # of rows_out
        for rank, target in enumerate(memory.row_targets.rows):
            if rank % own.dp_size != own.rank % own.dp_size:
                continue
            chosen = tokens[ranks == rank]
            room = 0 if target is None else min(target.count, len(chosen))
            if target is not None and room > 0:
                self._kernels.pack(_of(target, parity)[:room], x, scales, chosen[:room])
            if rank != own.rank:
                if room < len(chosen):
                    self._kernels.pack(_of(memory.rows_out, parity)[packed + room :], x, scales, chosen[room:])
                packed += len(chosen)

    def take(
        self, memory: GraphMemory, board: GraphBoard, x: Any, scales: Any | None, counts: Any, offsets: Any, number: Any
    ) -> None:
        if int(number) < 0:
            counts.zero_()
            offsets.zero_()
            return
        parity = _parity(number)
        begin = parity * board.stride
        moves = board.tables.moves[begin : begin + 2 * int(board.tables.numbers[begin])].view(-1, 2)
        is_own = moves[:, 0] < 0
        own = torch.stack([-1 - moves[:, 0], moves[:, 1]], 1)[is_own]
        for rows, table in ((memory.rows_in, moves[~is_own]), (memory.own_rows, own)):
            if len(table) > 0:
                self._kernels.pull(x, scales, _of(rows, parity), table.contiguous())
        counts.copy_(board.tables.expert_rows[begin : begin + len(counts)])
        offsets.copy_(board.tables.expert_offsets[begin : begin + len(offsets)])

    def give(self, memory: GraphMemory, board: GraphBoard, y: Any, number: Any) -> None:
        if int(number) < 0:
            return
        parity = _parity(number)
        begin = parity * board.stride
        returns = board.tables.returns[begin : begin + 3 * int(board.tables.numbers[begin + 1])].view(-1, 3)
        for target, rows in enumerate(memory.result_targets.rows):
            table = returns[returns[:, 1] == target]
            if rows is not None and len(table) > 0:
                _of(rows, parity)[table[:, 2]] = y.view(torch.uint8)[table[:, 0]]

    def sum(self, memory: GraphMemory, out: Any, where: Any, weights: Any, accumulate: bool, number: Any) -> None:
        if int(number) < 0:
            out.fill_(math.nan)
        elif len(out) > 0:
            self._kernels.reduce(out, memory.sources, where, weights, accumulate)


def _parity(number: Any) -> int:
    return int(number) % 2


def _of(rows: Rows, parity: int) -> Any:
    return rows.typed(parity, "uint8")

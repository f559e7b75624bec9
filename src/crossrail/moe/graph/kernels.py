"""The kernels that the halves of a round launch. Two implementations: Triton's, and torch operations in host memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from crossrail.moe.experts import ExpertSplit
from crossrail.moe.graph.board import GraphBoard
from crossrail.moe.graph.memory import GraphMemory


@dataclass(frozen=True)
class Own:
    """Experts of this rank, [first, end) of so many. ranks: int32 [experts, 2], on the device: which rank has each, and
    that rank's first. per_rank: of each rank but perhaps the last ones; None: `ranks` alone says it. dp_size: rows go
    only to ranks of the same index in their groups of so many.
    """

    rank: int
    first: int
    end: int
    experts: int
    ranks: Any
    per_rank: int | None
    dp_size: int

    @classmethod
    def of(cls, split: ExpertSplit, rank: int, dp_size: int, device: Any) -> Own:
        own, experts = split.of(rank), sum(split.counts)
        table = [(at, split.of(at).start) for at, count in enumerate(split.counts) for _ in range(count)]
        ranks = torch.tensor(table, dtype=torch.int32, device=device)
        return cls(rank, own.start, own.stop, experts, ranks, split.most if split.is_even else None, dp_size)


@dataclass(frozen=True)
class Routes:
    """For a round's T tokens, on the device; int32. kept: [T, K], the experts; -1: none. where: [T, K, 2], source and
    row where each result will be; -1: none. counts, slots: [E] and [T, K], used by kernels only.
    """

    kept: Any
    where: Any
    counts: Any
    slots: Any


class GraphKernels(Protocol):
    """Each reads the round's number, int64 [1] on the device, when it runs: -1 if the rounds had ended before the GPU
    was told what it needs. Then nothing is sent, and sums are NaN throughout. No call waits or allocates.

    Indices that are no expert's make no row; the posting thread refuses them. It sees 32 bits of each: values that do
    not fit are reported as the largest number.
    """

    name: str

    def share(self, board: GraphBoard, kept: Any, indices: Any, tokens: Any | None, number: Any) -> None:
        """kept, int32 [T, K], and the board's routes become indices, int32 or int64 [T, K]; -1 behind the first
        `tokens`, an int [1] on the device; None: all T.
        """

    def send(self, memory: GraphMemory, own: Own, x: Any, scales: Any | None, routes: Routes, number: Any) -> None:
        """Each rank's rows, by (expert, token, k), go to memory.row_targets, as many as it has room for there; what is
        left of other ranks' to rows_out, where each has the place that it would have if all went there. Sets
        routes.where; -1 when the rounds have ended.
        """

    def take(
        self, memory: GraphMemory, board: GraphBoard, x: Any, scales: Any | None, counts: Any, offsets: Any, number: Any
    ) -> None:
        """Rows that have come, to where the board's moves say. counts, offsets: int32, likewise; 0 when the rounds have
        ended.
        """

    def give(self, memory: GraphMemory, board: GraphBoard, y: Any, number: Any) -> None:
        """Rows of y, to memory.result_targets as the board's returns say."""

    def sum(self, memory: GraphMemory, out: Any, where: Any, weights: Any, accumulate: bool, number: Any) -> None:
        """Like Kernels.reduce, but NaN throughout once the rounds have ended."""

"""Rows of a rank whose rounds are kernels on a stream: two of everything, for rounds of even and of odd number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from crossrail.moe.board import PARITIES
from crossrail.moe.config import Config
from crossrail.moe.far import Far


@dataclass(frozen=True)
class Rows:
    """Rows of one width: uint8 [count, width] of even rounds; those of odd ones begin `stride` bytes behind."""

    first: Any
    count: int
    width: int
    stride: int

    def typed(self, parity: int, dtype: str) -> Any:
        """[count, ...] of that type."""
        begin = parity * self.stride
        kind = getattr(torch, dtype)
        part = self.first[begin : begin + self.count * self.width]
        return part.view(kind).view(self.count, self.width // kind.itemsize)


class GraphMemory:
    """rows_in, results_in, rows_out, results_out: for far ranks, as moe/proxy.h has them. own_rows, own_results: what a
    rank's tokens have to do with its own experts.
    """

    def __init__(self, config: Config, far: Far, device: Any) -> None:
        memory = far.memory.rows
        far_bytes = _tensor(far.bytes)

        def far_rows(name: str, width: int) -> Rows:
            return Rows(far_bytes[memory.offsets[name] :], memory.sizes[name] // width, width, memory.parity_bytes)

        def own_rows(width: int) -> Rows:
            count = config.routes_to_rank_max
            return Rows(
                torch.empty(PARITIES * count * width, dtype=torch.uint8, device=device), count, width, count * width
            )

        self.rows_in, self.rows_out = (far_rows(name, config.stride_bytes) for name in ("rows_in", "rows_out"))
        self.results_in, self.results_out = (far_rows(name, config.y_bytes) for name in ("results_in", "results_out"))
        self.own_rows, self.own_results = own_rows(config.stride_bytes), own_rows(config.y_bytes)
        self.own_nbytes = len(self.own_rows.first) + len(self.own_results.first)
        # As sums take them: source 2 * parity has a rank's own, the one behind it those of far ranks.
        self.sources = [
            rows.typed(parity, config.out_dtype)
            for parity in range(PARITIES)
            for rows in (self.own_results, self.results_in)
        ]


def _tensor(array: Any) -> Any:
    return array if isinstance(array, torch.Tensor) else torch.from_numpy(array)

"""Row buffers of a rank whose rounds are kernels on a stream: two of each, for even and odd rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from crossrail.moe.config import Config
from crossrail.moe.links.board import PARITIES
from crossrail.moe.links.far import Far


@dataclass(frozen=True)
class Rows:
    """Rows of one width: uint8 [count, width] of even rounds; those of odd rounds begin `stride` bytes later."""

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


@dataclass(frozen=True)
class Targets:
    """Where kernels may write rows, by number. rows: None for empty entries. addresses: int64 [2, numbers], on the
    device, of even and of odd rounds; 0: empty. counts: int32 [numbers], the rows that each has.
    """

    rows: Sequence[Rows | None]
    addresses: Any
    counts: Any

    @classmethod
    def of(cls, rows: Sequence[Rows | None], device: Any) -> Targets:
        addresses = [
            [0 if one is None else one.first.data_ptr() + parity * one.stride for one in rows]
            for parity in range(PARITIES)
        ]
        counts = [0 if one is None else one.count for one in rows]
        return cls(
            rows,
            torch.tensor(addresses, dtype=torch.int64, device=device),
            torch.tensor(counts, dtype=torch.int32, device=device),
        )

    @property
    def known(self) -> list[Rows]:
        return [one for one in self.rows if one is not None]


class GraphMemory:
    """rows_in, results_in, rows_out, results_out: for far ranks, as moe/proxy.h has them. own_rows, own_results: what a
    rank's tokens have to do with its own experts. row_targets: by rank, our slot in the memory of those that we reach
    and send rows to, and own_rows. result_targets: likewise, and results_out at the end.
    """

    def __init__(self, config: Config, far: Far, rank: int, device: Any) -> None:
        memory = far.memory.rows

        def rows_of(whole: Any, name: str, width: int, skipped: int = 0) -> Rows:
            """That part of a rank's memory of rows, without the first ones."""
            count = memory.sizes[name] // width - skipped
            return Rows(to_tensor(whole)[memory.offsets[name] + skipped * width :], count, width, memory.parity_bytes)

        def far_rows(name: str, width: int) -> Rows:
            return rows_of(far.rows_bytes, name, width)

        def slot_at(other: int) -> Rows:
            rows = rows_of(far.reached[other], "rows_in", config.stride_bytes, far.slot_at(other))
            return replace(rows, count=far.private_rows)

        def own_rows(width: int) -> Rows:
            count = config.routes_to_rank_max
            return Rows(
                torch.empty(PARITIES * count * width, dtype=torch.uint8, device=device), count, width, count * width
            )

        self.rows_in, self.rows_out = (far_rows(name, config.stride_bytes) for name in ("rows_in", "rows_out"))
        self.results_in, self.results_out = (far_rows(name, config.y_bytes) for name in ("results_in", "results_out"))
        self.own_rows, self.own_results = own_rows(config.stride_bytes), own_rows(config.y_bytes)
        self.own_nbytes = len(self.own_rows.first) + len(self.own_results.first)
        slots: list[Rows | None] = [None] * config.world
        results: list[Rows | None] = [None] * config.world
        for other, whole in far.reached.items():
            results[other] = rows_of(whole, "results_in", config.y_bytes)
            if config.sends_rows(rank, other):
                slots[other] = slot_at(other)
        slots[rank], results[rank] = self.own_rows, self.own_results
        self.row_targets = Targets.of(slots, device)
        self.result_targets = Targets.of([*results, self.results_out], device)
        # In the order that sums expect: source 2 * parity has a rank's own results, the next one those of far ranks.
        self.sources = [
            rows.typed(parity, config.out_dtype)
            for parity in range(PARITIES)
            for rows in (self.own_results, self.results_in)
        ]


def to_tensor(array: Any) -> Any:
    return array if isinstance(array, torch.Tensor) else torch.from_numpy(array)

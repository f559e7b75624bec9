"""Words through which kernels of ranks that reach each other's memory report their progress, without the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from crossrail.moe.config import Config
from crossrail.moe.graph.memory import to_tensor
from crossrail.moe.links.board import PARITIES
from crossrail.moe.links.far import Far
from crossrail.moe.links.far_memory import SIGNALS


@dataclass(frozen=True)
class SignalTable:
    """addresses: int64 [2, count] on the device, of even and of odd rounds; see native/device/round_words.h."""

    addresses: Any

    @property
    def count(self) -> int:
        return int(self.addresses.shape[1])

    @property
    def at(self) -> int:
        return int(self.addresses.data_ptr()) if self.count > 0 else 0


class Signals:
    """By step, "rows" and "results". sent: to ranks that we reach. awaited: from ranks that reach us. needs_words:
    whether the thread has to report something too, such as where other ranks' rows belong, or that they have arrived.
    """

    def __init__(self, config: Config, far: Far, rank: int, device: Any) -> None:
        memory = far.memory.rows

        def table(step: str, words: Sequence[tuple[Any, int]]) -> SignalTable:
            """words: in which rank's memory of rows, and whose."""
            begin = memory.offsets["signals"] + 8 * SIGNALS.index(step) * config.world
            addresses = [
                [
                    to_tensor(whole).data_ptr() + parity * memory.parity_bytes + begin + 8 * whose
                    for whole, whose in words
                ]
                for parity in range(PARITIES)
            ]
            return SignalTable(torch.tensor(addresses, dtype=torch.int64, device=device).view(PARITIES, len(words)))

        def are_told(step: str, other: int) -> bool:
            """A rank awaits rows only from ranks that send it some: the thread counts no others, so none is late."""
            return step != "rows" or config.sends_rows(rank, other)

        def sent(step: str) -> SignalTable:
            return table(step, [(whole, rank) for other, whole in far.reached.items() if are_told(step, other)])

        def awaited(step: str) -> SignalTable:
            return table(step, [(far.rows_bytes, source) for source in far.heard if are_told(step, source)])

        self.sent = {step: sent(step) for step in SIGNALS}
        self.awaited = {step: awaited(step) for step in SIGNALS}
        self.needs_words = {"rows": True, "results": len(far.heard) < len(far.ranks)}

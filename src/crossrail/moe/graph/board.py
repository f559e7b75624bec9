"""Pinned memory through which a GPU and the thread that posts for it exchange news of rounds: see stream_proxy.h."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from crossrail import _core
from crossrail.moe.config import Config
from crossrail.moe.links.board import PARITIES
from crossrail.moe.links.far_memory import FarPart

_LINE = 64


@dataclass(frozen=True)
class Tables:
    """What the thread tells kernels, for even rounds; see native/moe/stream_proxy.h. int32."""

    numbers: Any
    moves: Any
    returns: Any
    expert_rows: Any
    expert_offsets: Any


class GraphBoard:
    """routes, int32, and tables begin with the part for even rounds; that for odd rounds is `stride` elements later.
    They are in host memory that kernels read and write in place, with room for routes_max routes, rows_max moves and
    returns_max returns. native/moe/stream_proxy.h documents the contents. near: copies of the tables on the device, for
    kernels that read each of them many times.
    """

    def __init__(self, config: Config, experts: int, device: Any) -> None:
        """experts: of this rank."""
        self.routes_max = config.max_tokens * config.top_k
        self.rows_max = config.groups * config.routes_to_rank_max
        self.returns_max = config.dp_size * self.rows_max  # to each member of a group
        sizes = {
            "numbers": 8,
            "routes": 4 * self.routes_max,
            "expert_rows": 4 * experts,
            "expert_offsets": 4 * (experts + 1),
            "moves": 8 * self.rows_max,
            "returns": 12 * self.returns_max,
        }
        part = FarPart.of(sizes)
        words = _core.moe.STREAM_WORDS_BYTES
        nbytes = words + PARITIES * part.parity_bytes
        whole = torch.empty(nbytes + _LINE, dtype=torch.uint8, pin_memory=device.type != "cpu")
        begin = -whole.data_ptr() % _LINE
        self._bytes = whole[begin : begin + nbytes].zero_()
        self.stride = part.parity_bytes // 4
        # The native half counts from the board's start.
        offsets = {name: words + offset for name, offset in part.offsets.items()}
        self.as_native = _core.moe.StreamBoard(**offsets, parity_bytes=part.parity_bytes)
        numbers = self._bytes.view(torch.int32)
        arrays = {name: numbers[offset // 4 :] for name, offset in offsets.items()}
        self.routes = arrays.pop("routes")
        self.tables = Tables(**arrays)
        copied = torch.zeros(PARITIES * self.stride, dtype=torch.int32, device=device)
        self.near = Tables(**{name: copied[part.offsets[name] // 4 :] for name in arrays})

    @property
    def memory(self) -> Any:
        """All of the board, for the native module: uint8 of numpy."""
        return self._bytes.numpy()

    @property
    def nbytes(self) -> int:
        return len(self._bytes)

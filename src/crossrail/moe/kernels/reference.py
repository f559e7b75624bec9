"""Kernels in plain torch, as short as possible: the oracle for the others, and for devices without anything better.

Threads: any. Nothing is fused by torch when it runs eagerly, so products and sums are rounded one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from crossrail._extras import needs
from crossrail.moe.kernels import checks

with needs(__name__, "'crossrail[torch]'"):
    import torch

_LARGEST = 448.0
_MAGNITUDE_MIN = 1e-4


class ReferenceKernels:
    """See Kernels. Arrays are torch tensors of one device."""

    name = "reference"

    def count(self, indices: Any, experts: int, counts: Any, slots: Any) -> None:
        checks.count(indices, experts, counts, slots)
        routes = indices.reshape(-1, 1) == torch.arange(experts, device=indices.device)  # [T * K, E]
        earlier = routes.cumsum(0) - routes.long()
        counts.copy_(routes.sum(0))
        slots.copy_(torch.where(routes, earlier, 0).sum(1).reshape(slots.shape).masked_fill(indices < 0, -1))

    def pack(self, target: Any, x: Any, scales: Any | None, table: Any | None) -> None:
        checks.pack(target, x, scales, table)
        rows = torch.arange(len(x), device=x.device) if table is None else table.long()
        parts = [checks.as_bytes(part)[rows] for part in (x, scales) if part is not None]
        row = torch.cat(parts, dim=1)
        target[: len(rows), : row.shape[1]] = row
        target[: len(rows), row.shape[1] :] = 0

    def pull(self, x: Any, scales: Any | None, source: Any, table: Any) -> None:
        checks.pull(x, scales, source, table)
        rows, outputs = table.long().unbind(1)
        begin = 0
        for part in (x, scales):
            if part is not None:
                out = checks.as_bytes(part)
                out[outputs] = source[rows, begin : begin + out.shape[1]]
                begin += out.shape[1]

    def reduce(
        self, out: Any, sources: Sequence[Any], where: Any, weights: Any | None, accumulate: bool = False
    ) -> None:
        checks.reduce(out, sources, where, weights)
        total = out.float() if accumulate else torch.zeros_like(out, dtype=torch.float32)
        for k in range(where.shape[1]):
            for number, source in enumerate(sources):
                tokens = ((where[:, k, 0] == number) & (where[:, k, 1] >= 0)).nonzero()[:, 0]
                terms = source[where[tokens, k, 1].long()].float()
                if weights is not None:
                    terms = weights[tokens, k, None] * terms
                total[tokens] = total[tokens] + terms
        out.copy_(total)

    def quantize(self, x: Any, block: int = 128) -> tuple[Any, Any]:
        checks.quantize(x, block)
        values = x.float()
        tokens, hidden = values.shape
        blocks = -(-hidden // block)
        padded = torch.nn.functional.pad(values, (0, blocks * block - hidden)).reshape(tokens, blocks, block)
        magnitude = padded.abs().amax(dim=2).clamp(min=_MAGNITUDE_MIN)
        largest = torch.full_like(magnitude, _LARGEST)  # a tensor: by a number, torch divides with two roundings
        scaled = (padded * (largest / magnitude)[..., None]).clamp(-_LARGEST, _LARGEST)
        codes = scaled.reshape(tokens, blocks * block)[:, :hidden].contiguous().to(torch.float8_e4m3fn)
        return codes.view(torch.uint8), magnitude / largest

    def dequantize(self, codes: Any, scales: Any, block: int = 128, dtype: str = "bfloat16") -> Any:
        checks.dequantize(codes, scales, block, dtype)
        values = codes.view(torch.float8_e4m3fn).float()
        return (values * scales.repeat_interleave(block, dim=1)[:, : codes.shape[1]]).to(getattr(torch, dtype))

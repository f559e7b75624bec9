"""Kernels in Triton, for rows in GPU memory; slowly on any CPU, with TRITON_INTERPRET=1 set before this is imported."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from crossrail._extras import needs
from crossrail.errors import UsageError
from crossrail.moe.kernels import checks
from crossrail.moe.kernels import triton_code as code

with needs(__name__, "'crossrail[triton]'"):
    import torch
    import triton
    from triton.runtime.interpreter import InterpretedFunction

_FORMATS = {torch.bfloat16: code.BFLOAT16, torch.float16: code.FLOAT16, torch.float32: code.FLOAT32}
_COPY_BLOCK = 2048  # elements of a row that one program moves
_SUM_BLOCK = 1024
_COUNT_BLOCK = 1024
_SCALED_BLOCKS = 8  # with scales of their own, of one program


class TritonKernels:
    """See Kernels. Arrays are torch tensors of one GPU (of the host where Triton interprets).

    checked: look at tables before a call, which waits for the GPU. Without it calls only launch, as a CUDA graph needs;
    what a table should not hold is then left out: a row of zeros by pack, no move by pull, no term by reduce, and no
    slot by count. Graphs: call once before the capture, for the compiler, and for the list of reduce's sources, which
    is kept.

    Threads: one at a time.
    """

    name = "triton"

    def __init__(self, checked: bool = True) -> None:
        if not torch.cuda.is_available() and not isinstance(code.count_routes, InterpretedFunction):
            raise UsageError(
                "kernels are 'triton': there is no GPU, and TRITON_INTERPRET=1 was not set before the import"
            )
        self._checked = checked
        self._sources: dict[tuple[tuple[int, int], ...], tuple[Any, Any]] = {}

    def count(self, indices: Any, experts: int, counts: Any, slots: Any) -> None:
        checks.count(indices, experts, counts, slots, self._checked)
        slots.fill_(-1)
        code.count_routes[(experts,)](indices, counts, slots, indices.numel(), BLOCK=_COUNT_BLOCK)

    def pack(self, target: Any, x: Any, scales: Any | None, table: Any | None) -> None:
        checks.pack(target, x, scales, table, self._checked)
        rows = len(x) if table is None else len(table)
        to, number, scale = _as_elements(target, x, scales)
        width, extra, stride = number.shape[1], scale.shape[1], to.shape[1]
        if rows == 0:
            return
        grid = (rows, triton.cdiv(stride, _COPY_BLOCK))
        given = to if table is None else table
        code.pack_rows[grid](
            to, number, scale, given, len(x), width, extra, stride, HAS_TABLE=table is not None, BLOCK=_COPY_BLOCK
        )

    def pull(self, x: Any, scales: Any | None, source: Any, table: Any) -> None:
        checks.pull(x, scales, source, table, self._checked)
        rows, number, scale = _as_elements(source, x, scales)
        width, extra, stride = number.shape[1], scale.shape[1], rows.shape[1]
        if len(table) == 0:
            return
        grid = (len(table), triton.cdiv(width + extra, _COPY_BLOCK))
        code.pull_rows[grid](number, scale, rows, table, len(source), len(x), width, extra, stride, BLOCK=_COPY_BLOCK)

    def reduce(
        self, out: Any, sources: Sequence[Any], where: Any, weights: Any | None, accumulate: bool = False
    ) -> None:
        self.reduce_unless_ended(out, sources, where, weights, accumulate, None)

    def reduce_unless_ended(
        self, out: Any, sources: Sequence[Any], where: Any, weights: Any | None, accumulate: bool, number: Any | None
    ) -> None:
        """reduce(), but NaN throughout where the number, int64 [1] on the device, is negative when the kernel runs."""
        checks.reduce(out, sources, where, weights, self._checked)
        tokens, hidden = out.shape
        if tokens == 0 or hidden == 0:
            return
        addresses, lengths = self._addresses(sources, out.device)
        code.reduce_rows[(tokens, triton.cdiv(hidden, _SUM_BLOCK))](
            _stored(out),
            addresses,
            lengths,
            where,
            out if weights is None else weights,
            addresses if number is None else number,
            len(sources),
            hidden,
            TOP_K=where.shape[1],
            FORMAT=_FORMATS[sources[0].dtype if sources else out.dtype],
            OUT_FORMAT=_FORMATS[out.dtype],
            HAS_WEIGHTS=weights is not None,
            HAS_NUMBER=number is not None,
            ACCUMULATE=accumulate,
            BLOCK=_SUM_BLOCK,
            enable_fp_fusion=False,  # a fused product and sum has other bits than the other implementations'
        )

    def quantize(self, x: Any, block: int = 128) -> tuple[Any, Any]:
        checks.quantize(x, block)
        rows, hidden = x.shape
        blocks = triton.cdiv(hidden, block)
        codes = torch.empty((rows, hidden), dtype=torch.uint8, device=x.device)
        scales = torch.empty((rows, blocks), dtype=torch.float32, device=x.device)
        if codes.numel():
            width = triton.next_power_of_2(min(block, hidden))
            code.quantize_rows[(rows, triton.cdiv(blocks, _SCALED_BLOCKS))](
                codes, scales, _stored(x), hidden, block, blocks, FORMAT=_FORMATS[x.dtype], BLOCK=width,
                GROUP=_SCALED_BLOCKS,
            )  # fmt: skip
        return codes, scales

    def dequantize(self, codes: Any, scales: Any, block: int = 128, dtype: str = "bfloat16") -> Any:
        checks.dequantize(codes, scales, block, dtype)
        rows, hidden = codes.shape
        out = torch.empty((rows, hidden), dtype=getattr(torch, dtype), device=codes.device)
        if codes.numel():
            width = triton.next_power_of_2(min(block, hidden))
            blocks = scales.shape[1]
            code.dequantize_rows[(rows, triton.cdiv(blocks, _SCALED_BLOCKS))](
                _stored(out), codes, scales, hidden, block, blocks, FORMAT=_FORMATS[out.dtype], BLOCK=width,
                GROUP=_SCALED_BLOCKS,
            )  # fmt: skip
        return out

    def _addresses(self, sources: Sequence[Any], device: Any) -> tuple[Any, Any]:
        """Addresses and row counts of the sources, on the device; made once for the same sources."""
        key = tuple((source.data_ptr(), len(source)) for source in sources)
        if key not in self._sources:
            pairs = torch.tensor(key or [(0, 0)], dtype=torch.int64, device=device)
            self._sources[key] = (pairs[:, 0].contiguous(), pairs[:, 1].contiguous())
        return self._sources[key]


def _stored(tensor: Any) -> Any:
    """In the form that the device code takes."""
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor


def _as_elements(rows: Any, x: Any, scales: Any | None) -> tuple[Any, Any, Any]:
    """All three seen as the widest whole numbers that their rows consist of. No scales: none of them in a row."""
    parts = [checks.as_bytes(part) for part in (rows, x, x[:, :0] if scales is None else scales)]
    unit = math.gcd(8, *(part.shape[1] for part in parts), *(part.data_ptr() for part in parts))
    dtype = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[unit]
    wide, number, scale = (part.view(dtype) for part in parts)
    return wide, number, scale

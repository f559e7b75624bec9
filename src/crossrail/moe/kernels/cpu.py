"""Kernels on the caller's thread, for rows in host memory: numpy arrays, torch tensors, anything that speaks DLPack."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from crossrail import _core
from crossrail.errors import UsageError

_NUMPY_TYPES = {"float32": "float32", "float16": "float16", "bfloat16": "uint16"}


class CpuKernels:
    """See Kernels. level: the instructions to use, one of cpu_levels(); "auto" is the first of them."""

    def __init__(self, level: str = "auto") -> None:
        self._native = _core.moe.Kernels(level)
        self.name = f"cpu:{self._native.level}"

    def count(self, indices: Any, experts: int, counts: Any, slots: Any) -> None:
        _core.moe.count(indices, experts, counts, slots)

    def pack(self, target: Any, x: Any, scales: Any | None, table: Any | None) -> None:
        _core.moe.pack(target, x, scales, table)

    def pull(self, x: Any, scales: Any | None, source: Any, table: Any) -> None:
        _core.moe.pull(x, scales, source, table)

    def reduce(
        self, out: Any, sources: Sequence[Any], where: Any, weights: Any | None, accumulate: bool = False
    ) -> None:
        self._native.reduce(out, sources, where, weights, accumulate)

    def quantize(self, x: Any, block: int = 128) -> tuple[Any, Any]:
        tokens, hidden = _shape(x, "x")
        codes = _empty_like(x, (tokens, hidden), "uint8")
        scales = _empty_like(x, (tokens, -(-hidden // block) if block > 0 else 0), "float32")
        self._native.quantize(codes, scales, x, block)
        return codes, scales

    def dequantize(self, codes: Any, scales: Any, block: int = 128, dtype: str = "bfloat16") -> Any:
        if dtype not in _NUMPY_TYPES:
            raise UsageError(f"dtype is {dtype!r}, must be one of {', '.join(_NUMPY_TYPES)}")
        out = _empty_like(codes, _shape(codes, "codes"), dtype)
        _core.moe.dequantize(out, codes, scales, block)
        return out


def cpu_levels() -> list[str]:
    """The instruction sets that this processor supports, fastest first; the last is "portable"."""
    return _core.moe.levels()


def _shape(array: Any, argument: str) -> tuple[int, int]:
    shape = tuple(array.shape)
    if len(shape) != 2:
        raise UsageError(f"{argument} has shape {shape}, must have 2 dimensions")
    return shape


def _empty_like(array: Any, shape: tuple[int, int], dtype: str) -> Any:
    """An array of the same library."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return torch.empty(shape, dtype=getattr(torch, dtype))
    return np.empty(shape, _NUMPY_TYPES.get(dtype, dtype))

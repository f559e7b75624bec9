"""Checks of kernels on torch tensors, before anything is written. Looking at a table on a GPU waits for the GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from crossrail._extras import needs
from crossrail.errors import UsageError

with needs(__name__, "'crossrail[torch]'"):
    import torch

NUMBERS = (torch.float32, torch.float16, torch.bfloat16)


def as_bytes(tensor: Any) -> Any:
    """A view of rows as uint8."""
    return tensor.view(torch.uint8)


def count(indices: Any, experts: int, counts: Any, slots: Any, tables: bool = True) -> None:
    _together(indices, counts, slots)
    _tensor(indices, "indices", 2, torch.int32, torch.int64)
    _tensor(counts, "counts", 1, torch.int32)
    _tensor(slots, "slots", 2, torch.int32)
    _shape(counts, "counts", (experts,))
    _shape(slots, "slots", tuple(indices.shape))
    if not tables:
        return
    bad = ((indices < -1) | (indices >= experts)).nonzero()
    if len(bad):
        token, k = bad[0].tolist()
        raise UsageError(
            f"indices: token {token}, k {k} goes to expert {int(indices[token, k])}, "
            f"must be in [0, {experts}), or -1 for none"
        )


def pack(target: Any, x: Any, scales: Any | None, table: Any | None, tables: bool = True) -> None:
    _together(target, x, scales, table)
    _tensor(target, "target", 2, torch.uint8)
    _tensor(x, "x", 2)
    _with_scales(x, scales, target, "target")
    rows = len(x)
    if table is not None:
        _tensor(table, "table", 1, torch.int32)
        if tables:
            _rows(table, "table", len(x))
        rows = len(table)
    if rows > len(target):
        raise UsageError(f"target has {len(target)} rows, must have {rows}")


def pull(x: Any, scales: Any | None, source: Any, table: Any, tables: bool = True) -> None:
    _together(x, scales, source, table)
    _tensor(source, "source", 2, torch.uint8)
    _tensor(x, "x", 2)
    _with_scales(x, scales, source, "source")
    _tensor(table, "table", 2, torch.int32)
    _shape(table, "table", (len(table), 2))
    if tables:
        _rows(table[:, 0], "table (from)", len(source))
        _rows(table[:, 1], "table (to)", len(x))


def reduce(out: Any, sources: Sequence[Any], where: Any, weights: Any | None, tables: bool = True) -> None:
    _together(out, *sources, where, weights)
    _tensor(out, "out", 2, *NUMBERS)
    _tensor(where, "where", 3, torch.int32)
    _shape(where, "where", (len(out), where.shape[1], 2))
    if weights is not None:
        _tensor(weights, "weights", 2, torch.float32)
        _shape(weights, "weights", (len(out), where.shape[1]))
    for source in sources:
        _tensor(source, "sources", 2, *NUMBERS)
        _shape(source, "sources", (len(source), out.shape[1]))
        if source.dtype != sources[0].dtype:
            raise UsageError("sources are of different types, must be of one")
    if tables:
        _places(where, sources)


def _places(where: Any, sources: Sequence[Any]) -> None:
    source, row = where.unbind(2)
    known = torch.tensor([*map(len, sources), 0], device=where.device)
    named = (source >= 0) & (source < len(sources))
    rows = known[torch.where(named, source, len(sources)).long()]
    bad = ((row != -1) & ~(named & (row >= 0) & (row < rows))).nonzero()
    if len(bad):
        token, k = bad[0].tolist()
        number, at = where[token, k].tolist()
        raise UsageError(
            f"where[{token}, {k}] is row {at} of source {number}, must be a row of one of the {len(sources)} sources, "
            "or -1 for none"
        )


def quantize(x: Any, block: int) -> None:
    _tensor(x, "x", 2, *NUMBERS)
    _block(block)


def dequantize(codes: Any, scales: Any, block: int, dtype: str) -> None:
    _together(codes, scales)
    _tensor(codes, "codes", 2, torch.uint8)
    _tensor(scales, "scales", 2, torch.float32)
    _block(block)
    _shape(scales, "scales", (len(codes), -(-codes.shape[1] // block)))
    names = [str(number).removeprefix("torch.") for number in NUMBERS]
    if dtype not in names:
        raise UsageError(f"dtype is {dtype!r}, must be one of {', '.join(names)}")


def _together(*tensors: Any) -> None:
    """But for memory of the host that a GPU reaches as its own."""
    given = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]
    devices = {str(tensor.device) for tensor in given if tensor.device.type != "cpu" or not tensor.is_pinned()}
    if len(devices) > 1:
        raise UsageError(f"tensors are on {' and '.join(sorted(devices))}, must be on one device")


def _block(block: int) -> None:
    if block < 1:
        raise UsageError(f"block is {block}, must be 1 or more")


def _tensor(tensor: Any, argument: str, dimensions: int, *types: Any) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise UsageError(f"{argument} must be a torch tensor, not {type(tensor).__name__}")
    if tensor.dim() != dimensions:
        raise UsageError(f"{argument} must have {dimensions} dimensions, has shape {tuple(tensor.shape)}")
    if not tensor.is_contiguous():
        raise UsageError(f"{argument} must be contiguous, has strides {tensor.stride()}")
    if types and tensor.dtype not in types:
        wanted = " or ".join(map(str, types))
        raise UsageError(f"{argument} is of {tensor.dtype}, must be {wanted}")


def _shape(tensor: Any, argument: str, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise UsageError(f"{argument} has shape {tuple(tensor.shape)}, must have {shape}")


def _with_scales(x: Any, scales: Any | None, rows: Any, argument: str) -> None:
    needed = x.shape[1] * x.element_size()
    if scales is not None:
        _tensor(scales, "scales", 2)
        _shape(scales, "scales", (len(x), scales.shape[1]))
        needed += scales.shape[1] * scales.element_size()
    if needed > rows.shape[1]:
        raise UsageError(f"{argument} has rows of {rows.shape[1]} bytes, must have {needed}")


def _rows(table: Any, argument: str, rows: int) -> None:
    bad = ((table < 0) | (table >= rows)).nonzero()
    if len(bad):
        at = int(bad[0])
        raise UsageError(f"{argument}[{at}] is row {int(table[at])}, must be in [0, {rows})")

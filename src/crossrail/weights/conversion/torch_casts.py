"""Casts and float8 in torch, on the tensors' device, with the same bits as casts.py and float8.py produce in numpy.

Where torch's kernels may round differently from numpy, or depending on the device, the arithmetic is spelt out in
integers. Needs torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any, TypeAlias

from crossrail._extras import needs
from crossrail.errors import UsageError
from crossrail.weights.conversion.casts import pieces
from crossrail.weights.conversion.float8 import AMAX_MIN, LARGEST, blocks, index_in_whole
from crossrail.weights.errors import NotFinite

with needs(__name__, "'crossrail[torch]'"):
    import torch

Tensor: TypeAlias = Any  # torch.Tensor
Index = tuple[int, ...]

_PIECE_ELEMENTS = 1 << 23  # converted at once: what that takes besides is a few times 32 MiB

# Integer types for copying the bits of elements of this size: copying as floats could change NaNs.
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def cast(values: Tensor, out: Tensor) -> None:
    """out[...] = values, converted as Caster does; any strides, one device, floats that check_cast lets pass.

    The bits of a NaN are kept for bfloat16 alone: elsewhere they are the device's, as in numpy the processor's.
    """
    if values.dtype == out.dtype:
        bits = BITS[out.element_size()]
        out.view(bits).copy_(values.view(bits))
        return
    for piece, out_piece in pieces(values, out, _PIECE_ELEMENTS):
        if values.dtype == torch.bfloat16:
            out_piece.copy_(_widened(piece))
        elif out.dtype == torch.bfloat16:
            out_piece.view(torch.int16).copy_(_bfloat16_bits(piece.to(torch.float32)))
        elif values.dtype == torch.float64 and out.dtype == torch.float16:
            out_piece.copy_(_to_odd(piece))
        else:
            out_piece.copy_(piece)


class Checks:
    """Values that must be finite; checked once all of them are computed, because each check waits for the GPU.

    Threads: one at a time.
    """

    def __init__(self) -> None:
        self._noted: list[tuple[Tensor, Tensor, str, Index, Index]] = []

    def note(self, is_bad: Tensor, matrix: Tensor, name: str, start: Index, at: Index) -> None:
        """is_bad: one bool, of this matrix, which stays what it is until finish(). start: of the part in its parameter;
        at: which of the part's matrices.
        """
        self._noted.append((is_bad, matrix, name, start, at))

    def finish(self) -> None:
        """Waits for it all. Raises NotFinite for the first element, in the order noted, that is not."""
        noted, self._noted = self._noted, []
        if not noted:
            return
        are_bad = torch.stack([each[0] for each in noted]).tolist()
        for is_bad, (_, matrix, name, start, at) in zip(are_bad, noted, strict=True):
            if is_bad:
                wide = _float32(matrix)
                row, column = torch.nonzero(~torch.isfinite(wide))[0].tolist()
                raise NotFinite(name, index_in_whole(start, (*at, row, column)), float(wide[row, column]))


def quantise(
    values: Tensor,
    out: Tensor,
    scales: Tensor,
    name: str,
    block: tuple[int, ...],
    checks: Checks,
    start: Index | None = None,
) -> None:
    """Like BlockQuantiser, for a matrix, row or number, or for a stack of matrices in the last two dimensions.

    values: float32 or bfloat16. out: uint8, of the same shape. scales: float32, of the blocks. Any strides, one device.
    Values that are not finite are noted in checks; out and scales are then undefined. start: where the values begin in
    their parameter; None: they are all of it.
    """
    start = (0,) * values.ndim if start is None else start
    while values.ndim < 2:
        values, out, scales, block = values[None], out[None], scales[None], (1, *block)
    high, broad = block[-2:]
    rows, columns = values.shape[-2:]
    if scales.shape != (*values.shape[:-2], blocks(rows, high), blocks(columns, broad)):
        raise UsageError(f"{name}: scales {tuple(scales.shape)} for values {tuple(values.shape)} in blocks {block}")
    high, broad = max(min(high, rows), 1), max(min(broad, columns), 1)
    across = max(min(_PIECE_ELEMENTS // (high * broad), scales.shape[-1]), 1)  # blocks that are quantised at once
    bands = max(_PIECE_ELEMENTS // (high * broad * across), 1)
    for index in _indices(values.shape[:-2]):
        matrix, codes, factors = values[index], out[index], scales[index]
        is_bad = []
        for band, first in product(range(0, factors.shape[0], bands), range(0, factors.shape[1], across)):
            some = slice(band * high, (band + bands) * high), slice(first * broad, (first + across) * broad)
            made = factors[band : band + bands, first : first + across]
            if high * broad > _PIECE_ELEMENTS:
                is_bad.append(_quantise_large(matrix[some], codes[some], made))
            else:
                is_bad.append(_quantise(_float32(matrix[some]), codes[some], made, high, broad))
        checks.note(torch.stack(is_bad).any(), matrix, name, start, index)


def _quantise(wide: Tensor, out: Tensor, scales: Tensor, high: int, broad: int) -> Tensor:
    """Whole bands of blocks. wide: float32. Whether some of it is not finite."""
    rows, columns = wide.shape
    bands, across = scales.shape
    if (rows, columns) != (bands * high, across * broad):  # zeros change no largest magnitude
        wide = torch.nn.functional.pad(wide, (0, across * broad - columns, 0, bands * high - rows))
    tiles = wide.reshape(bands, high, across, broad)
    amax = tiles.abs().amax((1, 3))
    made = _scales(amax)
    scales.copy_(made)
    codes = (tiles / made[:, None, :, None]).to(torch.float8_e4m3fn).view(torch.uint8)
    out.copy_(codes.reshape(bands * high, across * broad)[:rows, :columns])
    return ~torch.isfinite(amax).all()


def _quantise_large(values: Tensor, out: Tensor, scales: Tensor) -> Tensor:
    """The same for one block, in two passes over its pieces. values: as they are. scales: of shape (1, 1)."""
    amax = torch.zeros((1, 1), dtype=torch.float32, device=values.device)
    for piece, _ in pieces(values, out, _PIECE_ELEMENTS):
        amax = torch.maximum(amax, _float32(piece).abs().amax())  # NaN, if either is
    made = _scales(amax)
    scales.copy_(made)
    for piece, out_piece in pieces(values, out, _PIECE_ELEMENTS):
        codes = (_float32(piece) / made).to(torch.float8_e4m3fn).view(torch.uint8)
        out_piece.copy_(codes.reshape(out_piece.shape))
    return ~torch.isfinite(amax).all()


def _scales(amax: Tensor) -> Tensor:
    # Divided by a tensor: by a number, GPUs multiply with its reciprocal, which is rounded twice.
    return amax.clamp(min=float(AMAX_MIN)) / torch.full((1,), LARGEST, dtype=torch.float32, device=amax.device)


def _float32(values: Tensor) -> Tensor:
    return _widened(values) if values.dtype == torch.bfloat16 else values


def _widened(values: Tensor) -> Tensor:
    """float32, from bfloat16."""
    return (values.view(torch.int16).to(torch.int32) << 16).view(torch.float32)


def _bfloat16_bits(wide: Tensor) -> Tensor:
    """bfloat16 as int16, from float32; used as Caster says."""
    bits = wide.view(torch.int32)
    # Nearest, ties to even: half a step less one, and one more if the last bit that stays is set.
    rounded = bits + (((bits >> 16) & 1) + 0x7FFF)
    # The bits that say that it is a NaN might be among those cut off.
    return (torch.where(torch.isnan(wide), bits | 0x400000, rounded) >> 16).to(torch.int16)


def _to_odd(values: Tensor) -> Tensor:
    """float64 as float32, what lies between two of them as the one with an odd last bit: rounding that to float16 is
    rounding once (Boldo and Melquiond, 2008).
    """
    near = values.to(torch.float32)
    back = near.to(torch.float64)
    bits = near.view(torch.int32)
    toward_zero = bits - (back.abs() > values.abs()).to(torch.int32)
    is_between = (back != values) & ~torch.isnan(values)
    return torch.where(is_between, toward_zero | 1, bits).view(torch.float32)


def _indices(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """All indices, in C order; for no dimensions a single one, ()."""
    yield from ((),) if not shape else ((i, *rest) for i in range(shape[0]) for rest in _indices(shape[1:]))

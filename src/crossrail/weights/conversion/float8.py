"""float8 e4m3 with a scale per block of 128 x 128, the format in which DeepSeek-V3 and similar models keep weights.

scale = max(largest magnitude of the block, 448 * 2**-126) / 448, as float32; each element is then x / scale as float32,
rounded to the nearest e4m3, ties to even. So the largest magnitude becomes 448, the format's largest, zeros stay zeros,
and x is about e4m3 * scale: the scale is what checkpoints call `weight_scale_inv`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from crossrail._core import weights as native
from crossrail.errors import UsageError
from crossrail.weights.conversion.casts import pieces
from crossrail.weights.errors import NotFinite

BLOCK = 128
LARGEST = 448.0

_PIECE_ELEMENTS = 1 << 20  # quantised at once
_INFINITY = 0x7F800000  # float32's bits; whatever is above it is no number
_SMALLEST_NORMAL = 0x3C800000  # bits of 2**-6: below it e4m3 has steps of 2**-9
_STEPS = np.float32(2**14)  # float32 has steps of 2**-9 there: adding it rounds to them, ties to even
_STEPS_BITS = 0x46800000
_BIAS = (127 - 7) << 3  # of float32's exponent over e4m3's, where its three bits of fraction end
AMAX_MIN = np.float32(LARGEST * 2.0**-126)  # of a block: its scale is then float32 with all its bits

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint32]


def blocks(length: int, block: int = BLOCK) -> int:
    """How many blocks a dimension of so many elements has; the last may be short."""
    return -(-length // block)


def index_in_whole(start: tuple[int, ...], at: tuple[int, ...]) -> tuple[int, ...]:
    """An element's index in the parameter of which a part begins at `start`. at: its index in the part, with leading
    ones if the part was a vector or a number and was made a matrix.
    """
    return tuple(begin + index for begin, index in zip(start, at[len(at) - len(start) :], strict=True))


class BlockQuantiser:
    """Quantises matrices. Those whose rows have no gaps go through native code (native/weights/float8.h), with the GIL
    released; others through numpy, piece by piece, with at most 9 MiB of scratch memory, which is kept. The bits are
    equal.

    Threads: one at a time.
    """

    def __init__(self) -> None:
        self._elements = 0
        self._make_scratch(0)

    def quantise(
        self,
        values: npt.NDArray[Any],
        out: Bytes,
        scales: Floats,
        name: str = "the matrix",
        block: tuple[int, int] = (BLOCK, BLOCK),
    ) -> None:
        """Fills `out` with e4m3 bytes and `scales` with those of its blocks.

        values: (n, k) of float32, or of bfloat16 as uint16 bits; any strides. out: (n, k) uint8, any strides.
        block: rows and columns that share a scale; they begin at (0, 0). scales: (blocks(n), blocks(k)).
        Raises NotFinite, naming `name` and the element, for infinities and NaN: out and scales are then partly filled.
        UsageError for other shapes and types.
        """
        if values.ndim != 2 or out.shape != values.shape or out.dtype != np.uint8:
            raise UsageError(f"{name}: values {values.shape} into out {out.shape} of {out.dtype}")
        rows, columns = values.shape
        high, broad = block
        if scales.shape != (blocks(rows, high), blocks(columns, broad)) or scales.dtype != np.float32:
            raise UsageError(f"{name}: scales {scales.shape} of {scales.dtype} for a matrix {values.shape}")
        if values.dtype not in (np.dtype(np.float32), np.dtype(np.uint16)):
            raise UsageError(f"{name}: values of {values.dtype}, must be float32, or uint16 for the bits of bfloat16")
        needed = min(min(rows, high) * columns, _PIECE_ELEMENTS)
        if all(map(_has_plain_rows, (values, out, scales))):
            if not native.quantise(values, out, scales, high, broad):
                self._make_scratch(max(needed, self._elements))
                raise self._not_finite(values, name)
            return
        if needed > self._elements:
            self._make_scratch(needed)
        if min(rows, high) * min(columns, broad) > _PIECE_ELEMENTS:
            for band, at in np.ndindex(*scales.shape):
                some = np.s_[band * high : (band + 1) * high, at * broad : (at + 1) * broad]
                if not self._large_block(values[some], out[some], scales[band, at : at + 1]):
                    raise self._not_finite(values, name)
            return
        step = max(_PIECE_ELEMENTS // (min(rows, high) * broad), 1) * broad
        for begin in range(0, columns, step):
            end = min(begin + step, columns)
            starts = np.arange(0, end - begin, broad)
            widths = np.diff(np.append(starts, end - begin))
            for band, row in enumerate(range(0, rows, high)):
                wide = self._widened(values[row : row + high, begin:end])
                factors = scales[band, begin // broad : begin // broad + len(starts)]
                if not _set_scales(np.maximum.reduceat(self._magnitudes(wide).max(axis=0), starts), factors):
                    raise self._not_finite(values, name)
                np.divide(wide, np.repeat(factors, widths), out=wide)
                self._round(wide, out[row : row + high, begin:end])

    def _large_block(self, values: npt.NDArray[Any], out: Bytes, scales: Floats) -> bool:
        """One block that is longer than a piece, in two passes. scales: its one. False if something is not finite."""
        largest = [self._magnitudes(self._widened(piece)).max() for piece, _ in pieces(values, out, _PIECE_ELEMENTS)]
        if not _set_scales(np.array([max(largest)], np.uint32), scales):
            return False
        for piece, piece_out in pieces(values, out, _PIECE_ELEMENTS):
            wide = self._widened(piece)
            np.divide(wide, scales[0], out=wide)
            self._round(wide, piece_out)
        return True

    def _magnitudes(self, wide: Floats) -> Words:
        """The magnitudes' bits, in our scratch memory. They sort like the magnitudes; NaN and infinities are above all
        others.
        """
        bits: Words = self._part(self._bits, wide.shape)
        return np.bitwise_and(wide.view(np.uint32), 0x7FFFFFFF, out=bits)

    def _not_finite(self, values: npt.NDArray[Any], name: str) -> NotFinite:
        """The error for the first value that is not finite, row by row."""
        for row, line in enumerate(values):
            for begin in range(0, len(line), self._elements):
                wide = self._widened(line[begin : begin + self._elements])
                for at in np.flatnonzero(~np.isfinite(wide))[:1].tolist():
                    return NotFinite(name, (row, begin + at), float(wide[at]))
        raise AssertionError("all of it is finite")

    def _round(self, values: Floats, out: Bytes) -> None:
        """Rounds to the nearest e4m3. values: at most slightly above 448, which rounds to 448; they are overwritten."""
        shape = values.shape
        bits = values.view(np.uint32)
        sign = np.right_shift(bits, 24, out=self._part(self._bits, shape))
        np.bitwise_and(sign, 0x80, out=out, casting="unsafe")
        np.bitwise_and(bits, 0x7FFFFFFF, out=bits)
        is_small = np.less(bits, _SMALLEST_NORMAL, out=self._part(self._small, shape))
        # Nearest, ties to even, for those with an exponent: half a step less one, and one more if the last bit is set.
        normal = np.right_shift(bits, 20, out=self._part(self._bits, shape))
        np.bitwise_and(normal, 1, out=normal)
        np.add(normal, 0x7FFFF, out=normal)
        np.add(normal, bits, out=normal)
        np.right_shift(normal, 20, out=normal)
        np.subtract(normal, _BIAS, out=normal)
        np.add(values, _STEPS, out=values)
        np.subtract(bits, _STEPS_BITS, out=bits)
        np.copyto(normal, bits, where=is_small)
        np.bitwise_or(out, normal, out=out, casting="unsafe")

    def _widened(self, values: npt.NDArray[Any]) -> Floats:
        """float32 in our scratch."""
        wide = self._part(self._wide, values.shape)
        if values.dtype == np.uint16:
            np.left_shift(values, 16, out=wide.view(np.uint32), dtype=np.uint32)
        else:
            np.copyto(wide, values)
        return wide

    def _make_scratch(self, elements: int) -> None:
        self._elements = elements
        self._wide: Floats = np.empty(elements, np.float32)
        self._bits: Words = np.empty(elements, np.uint32)
        self._small: npt.NDArray[np.bool_] = np.empty(elements, np.bool_)

    @staticmethod
    def _part(scratch: npt.NDArray[Any], shape: tuple[int, ...]) -> npt.NDArray[Any]:
        return scratch[: math.prod(shape)].reshape(shape)


def _has_plain_rows(matrix: npt.NDArray[Any]) -> bool:
    """Whether its rows have no gaps, as in nearly all weights: native code accepts only those."""
    return matrix.strides[1] == matrix.itemsize and matrix.strides[0] % matrix.itemsize == 0


def _set_scales(largest: Words, scales: Floats) -> bool:
    """Sets scales from the magnitudes of blocks, as bits. False if one is not finite."""
    if largest.max() >= _INFINITY:
        return False
    np.divide(np.maximum(largest.view(np.float32), AMAX_MIN), np.float32(LARGEST), out=scales)
    return True

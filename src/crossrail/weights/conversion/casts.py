"""Casts between element types, rounding to the nearest, ties to even.

bfloat16 is stored as uint16 and float8 as uint8: numpy has neither. Conversions go through float32, piece by piece, in
scratch memory that is allocated once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from crossrail.errors import UsageError
from crossrail.weights.dtypes import CASTS

Array = npt.NDArray[Any]

_PIECE_ELEMENTS = 1 << 17  # their scratch stays in the caches
_KEPT_AS = {"bfloat16": np.uint16, "float8_e4m3fn": np.uint8, "float8_e5m2": np.uint8}


def storage(dtype: str) -> np.dtype[Any]:
    """The numpy dtype in which elements of this type lie."""
    return np.dtype(_KEPT_AS.get(dtype, dtype))


def check_cast(source: str, target: str, name: str) -> None:
    """UsageError, naming the parameter, when elements of one type do not become the other here."""
    if source != target and not (source in CASTS and target in CASTS):
        raise UsageError(
            f"{name}: {source} does not become {target}: only {', '.join(CASTS)} are cast into each other, and "
            f"float8_e4m3fn is made with scales"
        )


class Caster:
    """Converts arrays. Threads: one at a time."""

    def __init__(self) -> None:
        self._wide = np.empty(_PIECE_ELEMENTS, np.float32)
        self._bits = np.empty(_PIECE_ELEMENTS, np.uint32)

    def cast(self, values: Array, source: str, out: Array, target: str) -> None:
        """out[...] = values, converted. Both are of their type's storage() and of one shape; any strides.

        From float64 to bfloat16 it is rounded to float32 on the way. Too large becomes infinite, NaN stays NaN.
        """
        if source == target:
            np.copyto(out, values)
            return
        with np.errstate(over="ignore", invalid="ignore"):
            for piece, out_piece in pieces(values, out, _PIECE_ELEMENTS):
                if "bfloat16" not in (source, target):
                    np.copyto(out_piece, piece, casting="same_kind")
                elif target == "bfloat16":
                    self._to_bfloat16(piece, out_piece)
                else:
                    np.copyto(out_piece, self._from_bfloat16(piece), casting="same_kind")

    def _from_bfloat16(self, values: Array) -> Array:
        wide = self._wide[: values.size].reshape(values.shape)
        np.left_shift(values, 16, out=wide.view(np.uint32), dtype=np.uint32)
        return wide

    def _to_bfloat16(self, values: Array, out: Array) -> None:
        wide = self._wide[: values.size].reshape(values.shape)
        np.copyto(wide, values, casting="same_kind")
        is_nan = np.isnan(wide)
        has_nan = bool(is_nan.any())
        bits = wide.view(np.uint32)
        # Nearest, ties to even: half a step less one, and one more if the last bit that stays is set.
        rounding = np.right_shift(bits, 16, out=self._bits[: values.size].reshape(values.shape))
        np.bitwise_and(rounding, 1, out=rounding)
        np.add(rounding, 0x7FFF, out=rounding)
        np.add(bits, rounding, out=bits, where=~is_nan if has_nan else True)
        if has_nan:  # the bits that say so might be among those cut off
            np.bitwise_or(bits, 0x400000, out=bits, where=is_nan)
        np.right_shift(bits, 16, out=out, casting="unsafe")


def pieces(values: Any, out: Any, elements_max: int) -> Iterator[tuple[Any, Any]]:
    """Both in the same pieces, of so many elements at most: arrays of numpy or tensors of torch."""
    if values.ndim == 0:
        values, out = values.reshape(1), out.reshape(1)
    elements = math.prod(values.shape)
    if elements <= elements_max:
        yield values, out
        return
    row_elements = elements // len(values)
    if row_elements > elements_max:
        for row, out_row in zip(values, out, strict=True):
            yield from pieces(row, out_row, elements_max)
    else:
        step = elements_max // row_elements
        for at in range(0, len(values), step):
            yield values[at : at + step], out[at : at + step]

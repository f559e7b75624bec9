"""The formats of numbers by their definitions, in float64 and without a bit of the code under test."""

import functools

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]
Floats = npt.NDArray[np.float32]

TYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}


def decoded(array: Array, dtype: str) -> Floats:
    """float32 of rows as they are stored."""
    if dtype == "bfloat16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32)


def encoded(values: Floats, dtype: str) -> Array:
    """Rows as they are stored, to nearest, ties to even. numpy knows float16; bfloat16 is looked up."""
    if dtype == "bfloat16":
        return nearest(values, bfloat16_magnitudes(), infinity=0x7F80, nan=0x7FC0, sign=0x8000).astype(np.uint16)
    with np.errstate(over="ignore"):
        return values.astype(TYPES[dtype])


def e4m3(values: Floats) -> npt.NDArray[np.uint8]:
    """float8 e4m3fn, to nearest, ties to even, at most 448."""
    clipped = np.clip(values, -448, 448)
    return nearest(clipped, e4m3_magnitudes(), infinity=0x7F, nan=0x7F, sign=0x80).astype(np.uint8)


def e4m3_decoded(codes: npt.NDArray[np.uint8]) -> Floats:
    table = np.append(e4m3_magnitudes(), np.nan)
    return (table[codes & 0x7F] * np.where(codes & 0x80, -1, 1)).astype(np.float32)


def nearest(values: Floats, magnitudes: Floats, infinity: int, nan: int, sign: int) -> npt.NDArray[np.int64]:
    """The code, an index into ascending magnitudes, of each value's nearest; past the last half step it is infinity."""
    exact = np.abs(values.astype(np.float64))
    known = magnitudes.astype(np.float64)
    top = 2 * known[-1] - known[-2]  # what would come next, were there room
    known = np.append(known, top)
    above = np.clip(np.searchsorted(known, exact), 1, len(known) - 1)
    low, high = exact - known[above - 1], known[above] - exact
    code = np.where((high < low) | ((high == low) & (above % 2 == 0)), above, above - 1)
    code = np.where(exact >= top, len(magnitudes), code)
    code = np.where(code == len(magnitudes), infinity, code)
    code = np.where(np.isnan(values), nan, code)
    return code | np.where(np.signbit(values) & ~np.isnan(values), sign, 0)


@functools.cache
def bfloat16_magnitudes() -> Floats:
    return (np.arange(0x7F80, dtype=np.uint32) << 16).view(np.float32)


@functools.cache
def e4m3_magnitudes() -> Floats:
    codes = np.arange(0x7F)
    exponent, fraction = codes >> 3, codes & 7
    return np.where(
        exponent == 0, fraction / 8 * 2.0**-6, (1 + fraction / 8) * 2.0 ** (exponent.astype(float) - 7)
    ).astype(np.float32)


def telling_values(dtype: str) -> Floats:
    """float32 numbers where rounding to dtype has something to decide: its own, what lies halfway, and neighbours."""
    if dtype == "float16":
        known = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float64)
    elif dtype == "bfloat16":
        known = bfloat16_magnitudes()[::37].astype(np.float64)
        known = np.concatenate([known, bfloat16_magnitudes()[:300], bfloat16_magnitudes()[-300:]])
        known.sort()
    else:
        known = e4m3_magnitudes().astype(np.float64)
    ties = ((known[1:] + known[:-1]) / 2).astype(np.float32)
    near = [np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(np.inf))]
    odd = np.array([0, 2.0**-149, 2.0**-25, 65519.9, 65520, 3.4e38, np.inf, np.nan], np.float32)
    everything = np.concatenate([known.astype(np.float32), ties, *near, odd])
    return np.concatenate([everything, -everything])


def same(given: Array, wanted: Array, dtype: str) -> bool:
    """Bit by bit, but for which NaN a NaN is."""
    bits = {1: np.uint8, 2: np.uint16, 4: np.uint32}[given.itemsize]
    both_nan = np.isnan(decoded(given, dtype)) & np.isnan(decoded(wanted, dtype))
    return bool(np.all((given.view(bits) == wanted.view(bits)) | both_nan))

"""The numbers that e4m3 bytes stand for, by a table of all 256; 0x7f and 0xff are NaN."""

import numpy as np


def decoded(values: np.ndarray) -> np.ndarray:
    return _TABLE[values]


def _table() -> np.ndarray:
    codes = np.arange(256)
    exponent, fraction = (codes >> 3) & 15, codes & 7
    magnitude = np.where(exponent == 0, fraction * 2.0**-9, (8 + fraction) * 2.0 ** (exponent - 10.0))
    magnitude[(exponent == 15) & (fraction == 7)] = np.nan
    return np.where(codes & 0x80, -magnitude, magnitude).astype(np.float32)


_TABLE = _table()

"""Element types: their names on the wire and in plans, and their sizes in bytes."""

from __future__ import annotations

import numpy as np

from crossrail.errors import UsageError

# A plan holds an index into this: append only.
DTYPES: tuple[str, ...] = (
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "bool",
)
ITEM_BYTES = np.array([8, 4, 2, 2, 1, 1, 8, 4, 2, 1, 1, 1])
FP8 = DTYPES.index("float8_e4m3fn")
FLOAT32 = DTYPES.index("float32")
BFLOAT16 = DTYPES.index("bfloat16")
CASTS = ("float64", "float32", "float16", "bfloat16")  # into each other
QUANTISED = ("float32", "bfloat16")  # into float8_e4m3fn with scales


def dtype_code(dtype: object) -> int:
    """The index in DTYPES of a name, or of a numpy or torch dtype. UsageError for any other."""
    name = dtype.name if isinstance(dtype, np.dtype) else getattr(dtype, "__name__", None) or str(dtype)
    name = name.removeprefix("torch.")
    if name not in DTYPES:
        raise UsageError(f"dtype {dtype!r} must be one of {', '.join(DTYPES)}")
    return DTYPES.index(name)

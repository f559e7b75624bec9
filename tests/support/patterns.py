"""Bytes that both sides can make from a number, and the value that fills memory nobody may touch."""

from typing import Any

import numpy as np
import numpy.typing as npt

ByteArray = npt.NDArray[np.uint8]

CANARY = 0xA5


def pattern(seed: int, nbytes: int) -> ByteArray:
    """`nbytes` random bytes, the same for the same seed in every process."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def not_aligned(numbers: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The same numbers, one byte past an aligned address, as within packed records."""
    return np.frombuffer(b"\0" + numbers.tobytes(), numbers.dtype, offset=1)


def assert_same_bytes(got: ByteArray, expected: ByteArray, what: str = "bytes") -> None:
    """Fails with the first differing offset, not with a page of numbers."""
    assert got.shape == expected.shape, f"{what}: {got.shape} instead of {expected.shape}"
    wrong = np.flatnonzero(got != expected)
    if wrong.size:
        at = int(wrong[0])
        raise AssertionError(
            f"{what}: {wrong.size} of {got.size} differ, first at {at} (got {got[at]:#x}, expected {expected[at]:#x}), "
            f"last at {int(wrong[-1])}"
        )

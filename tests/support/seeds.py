"""Randomness of tests: one number per session, another stream for each test, replayable from the command line."""

import zlib

import numpy as np


class Seed:
    """The session's seed as one test sees it. `repr` is the number to replay with."""

    def __init__(self, value: int, test_id: str) -> None:
        self.value = value
        self._test = zlib.crc32(test_id.encode())

    def __repr__(self) -> str:
        return str(self.value)

    def rng(self, *stream: int) -> np.random.Generator:
        """A separate generator for each `stream`."""
        return np.random.default_rng([self.value, self._test, *stream])

    def number(self, *stream: int) -> int:
        """A number to hand to `pattern` or to a child."""
        return int(self.rng(*stream).integers(0, 2**31))

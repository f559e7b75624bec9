"""Time in which nobody but the caller runs Python, though the caller only waits: as while a library holds the GIL."""

import ctypes
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.support.limits import WAIT_S

_PAUSE_US = 1000


@contextmanager
def nobody_else_in_python() -> Iterator[Callable[[Callable[[], object], str], None]]:
    """Yields what waits for a condition (condition, what) and fails when it takes longer than WAIT_S.

    It sleeps with the GIL held, and between bytecodes no other thread gets it either.
    """
    usleep = ctypes.PyDLL(None).usleep
    before = sys.getswitchinterval()

    def eventually(condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(f"not without Python within {WAIT_S} s: {what}")
            usleep(_PAUSE_US)

    sys.setswitchinterval(1000.0)
    try:
        yield eventually
    finally:
        sys.setswitchinterval(before)

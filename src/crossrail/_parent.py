"""A process of ours that goes on for its parent alone."""

from __future__ import annotations

import ctypes
import signal

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """From now on the kernel kills this process when its parent ends, whatever either is doing.

    The end of standard input says so too, but only to who reads it then: one that computes, or waits for others in a
    library, goes on for as long, and complains of their ends. Its parent is the thread that started it: call it only
    where that one lives as long as its process.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

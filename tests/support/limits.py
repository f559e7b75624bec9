"""How long a test may wait. Upper bounds against a hang, never a statement about speed."""

import os
import time
from collections.abc import Callable

SLOWNESS = 3.0 if "CROSSRAIL_SANITIZER" in os.environ else 1.0  # of instrumented code

WAIT_S = 20.0 * SLOWNESS  # any single wait that is expected to end well
PROGRAM_S = 60.0 * SLOWNESS  # a program from its start to its end: on a loaded machine its imports alone take 20 s
DEATH_S = 2.0 * SLOWNESS  # a peer's death must be seen by then (the requirement is 0.1 s; shared machines are noisy)
NEVER_S = 0.3  # how long we look before we believe that something does not happen

between_looks: list[Callable[[], object]] = []  # called while waiting, so that a simulated world advances


def eventually(condition: Callable[[], object], what: str, timeout_s: float = WAIT_S, pause_s: float = 0.002) -> None:
    """Returns once `condition()` is true; fails naming `what` when that takes longer than `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s} s: {what}")
        _pause(pause_s)


def _pause(pause_s: float) -> None:
    for call in between_looks:
        call()
    time.sleep(pause_s)


def never(condition: Callable[[], object], what: str, for_s: float = NEVER_S) -> None:
    """Fails when `condition()` becomes true within `for_s`."""
    deadline = time.monotonic() + for_s
    while time.monotonic() < deadline:
        assert not condition(), what
        _pause(0.005)

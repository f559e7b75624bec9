"""A stream of a GPU that a test runs by hand: what is launched happens when the test says so, in its order."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from tests.support.fake_gpu import FakeGpu
from tests.support.limits import WAIT_S


class Event:
    """As of torch.cuda, with a deadline. error: what the GPU has failed with."""

    def __init__(self) -> None:
        self.error = ""
        self._passed = threading.Event()

    def synchronize(self) -> None:
        if not self._passed.wait(2 * WAIT_S):
            raise TimeoutError("the test never ran the kernels before this event")
        if self.error:
            raise RuntimeError(self.error)

    def done(self, error: str = "") -> None:
        self.error = error
        self._passed.set()


class Stream:
    """Any thread."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu
        self.error = ""  # from now on each event fails with it, also one that is recorded
        self._launched: deque[Callable[[], None] | Event] = deque()

    def launch(self, kernel: Callable[..., None], *arguments: Any) -> None:
        self._launched.append(lambda: kernel(*arguments))

    def record(self) -> Event:
        if self.error:
            raise RuntimeError(self.error)
        event = Event()
        self._launched.append(event)
        return event

    def run(self, kernels: int | None = None) -> None:
        """So many kernels of those launched so far, and the events behind them. None: all."""
        while self._launched:
            if isinstance(self._launched[0], Event):
                self._launched[0].done(self.error)
            elif kernels == 0:
                return
            else:
                self._launched[0]()
                kernels = None if kernels is None else kernels - 1
            self._launched.popleft()

    def fail(self, error: str) -> None:
        """No kernel runs any more."""
        self.error = error
        while self._launched:
            if isinstance(launched := self._launched.popleft(), Event):
                launched.done(error)

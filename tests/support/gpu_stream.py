"""A GPU stream that a test runs by hand: launches execute in order, when the test says so."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import deque
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

from tests.support.fake_gpu import FakeGpu
from tests.support.limits import WAIT_S


class Event:
    """Like torch.cuda's, with a deadline. error: the GPU's failure."""

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


class Graph:
    """The captured operations."""

    def __init__(self, kernels: list[Callable[[], object]]) -> None:
        self._kernels = kernels

    def replay(self, stream: Stream) -> None:
        for kernel in self._kernels:
            stream.launch(kernel)


class _Launch(ctypes.Structure):
    """FakeKernels::Launch."""

    _fields_ = (
        ("address", ctypes.c_uint64),
        ("delta", ctypes.c_uint64),
        ("round", ctypes.c_void_p),
        ("arguments", ctypes.c_uint64 * 5),
    )


class Stream:
    """Any thread. The engine's launches through `cuda_stream` are queued among the test's kernels."""

    def __init__(self, gpu: FakeGpu, device_index: int = 0) -> None:
        self.gpu = gpu
        self.device_index = device_index
        self.error = ""  # from now on each event fails with it, also one that is recorded
        self._launched: deque[Callable[[], object] | Event] = deque()
        self._captured: list[Callable[[], object]] | None = None

    @cached_property
    def cuda_stream(self) -> int:
        """The driver's name of it."""
        handle = int(self.gpu.driver.fake_make_stream(self.device_index))
        weakref.finalize(self, self.gpu.driver.fake_end_stream, handle)
        return handle

    def launch(self, kernel: Callable[..., object], *arguments: Any) -> None:
        self._take_launches()
        self._append(partial(kernel, *arguments))

    def begin_capture(self) -> None:
        """From now on launches do not run, but become part of the graph."""
        self._take_launches()
        self._captured = []
        self.gpu.driver.fake_begin_capture()

    def end_capture(self) -> Graph:
        self._take_launches()
        assert self.gpu.driver.fake_end_capture(), "a call that CUDA forbids meanwhile broke the capture"
        captured, self._captured = self._captured, None
        assert captured is not None
        return Graph(captured)

    def _append(self, kernel: Callable[[], object]) -> None:
        (self._launched if self._captured is None else self._captured).append(kernel)

    def _take_launches(self) -> None:
        """The engine's, since we looked last."""
        launch = _Launch()
        while self.gpu.driver.fake_take_launch(self.cuda_stream, ctypes.byref(launch)):
            self._append(partial(self._run_launch, launch))
            launch = _Launch()

    def _run_launch(self, launch: _Launch) -> bool:
        """False: it waits for a word."""
        return bool(self.gpu.driver.fake_run_launch(ctypes.byref(launch)))

    def record(self) -> Event:
        if self.error:
            raise RuntimeError(self.error)
        self._take_launches()
        event = Event()
        self._launched.append(event)
        return event

    def run(self, kernels: int | None = None) -> None:
        """So many kernels of those launched so far, and the events behind them, up to one that waits. None: all."""
        self._take_launches()
        while self._launched:
            if isinstance(self._launched[0], Event):
                self._launched[0].done(self.error)
            elif kernels == 0 or self._launched[0]() is False:
                return
            else:
                kernels = None if kernels is None else kernels - 1
            self._launched.popleft()

    def fail(self, error: str) -> None:
        """No kernel runs any more."""
        self.error = error
        while self._launched:
            if isinstance(launched := self._launched.popleft(), Event):
                launched.done(error)

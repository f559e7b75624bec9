"""Rows on a GPU that is played by the double of its driver. Imports torch, so it is for test_torch_*.py alone.

Engines get addresses that end the process when a CPU touches them; tensors here are torch's over what kernels of such a
GPU would see. What is launched happens when its stream is waited for, as late as a GPU may do it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import crossrail as xr
from crossrail.moe.kernels.reference import ReferenceKernels
from crossrail.moe.rows.device import DeviceRows
from tests.support.fake_gpu import FakeGpu, GpuMemory

_ONE_AT_A_TIME = threading.Lock()  # Triton's interpreter is for one thread


class Stream:
    """One rank's."""

    def __init__(self) -> None:
        self._launched: deque[Callable[[], None]] = deque()
        self.error = ""

    def launch(self, kernel: Callable[..., Any], *arguments: Any) -> None:
        self._launched.append(lambda: kernel(*arguments))

    def synchronize(self) -> None:
        if self.error:
            raise RuntimeError(self.error)
        while self._launched:
            with _ONE_AT_A_TIME:
                self._launched.popleft()()


class PlayedRows(DeviceRows):
    """gpu: set by the test before any is made."""

    gpu: FakeGpu

    def __init__(self, engine: xr.Engine, device: Any, kernels: Any) -> None:
        super().__init__(engine, device, ReferenceKernels() if kernels is None else kernels)
        self.name = f"memory of {device}"
        self._gpu = "cuda:0"
        self.stream = Stream()
        self._memories: dict[int, GpuMemory] = {}
        self._kept: list[Any] = []

    def registered(self, tensor: Any) -> xr.Region:
        return self._engine.register(self._memories[tensor.data_ptr()])

    def _found(self, device: torch.device) -> torch.device:
        return torch.device("cpu")  # of the tensors that are seen

    def _empty_bytes(self, nbytes: int) -> Any:
        return self._seen_of(self.gpu.allocate(nbytes))

    def _seen(self, memory: xr.Region | xr.GpuMapping) -> Any:
        self._kept.append(memory)  # as a tensor of it would
        return self._seen_of(self.gpu.memory_of(memory))

    def _seen_of(self, memory: GpuMemory) -> Any:
        seen = torch.from_numpy(memory.bytes)
        self._memories[seen.data_ptr()] = memory
        return seen

    def _launch(self, kernel: Callable[..., Any], *arguments: Any) -> None:
        self._busy.add(self.stream)
        self.stream.launch(kernel, *arguments)

    def _table(self, table: Any) -> Any:
        return torch.from_numpy(np.array(table))

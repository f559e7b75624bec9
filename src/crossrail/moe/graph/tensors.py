"""The tensors of a rank whose rounds are kernels on a stream, and that stream."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from crossrail._torch import is_tensor, told
from crossrail.moe.arrays import INDEX_TYPES, check_tensor, tensor_on, to_count
from crossrail.moe.graph.rounds import GraphRound


class Tensors:
    """The tensors of one device: callers' tensors, which are checked, and new ones."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def is_gpu(self) -> bool:
        """Whether the device is a GPU; otherwise it is the host."""
        return str(self.device.type) != "cpu"

    @property
    def is_capturing(self) -> bool:
        """Whether what is launched on the current stream is captured, and does not run."""
        return self.is_gpu and torch.cuda.is_current_stream_capturing()

    @contextlib.contextmanager
    def launching(self, opened: GraphRound | None = None) -> Iterator[int]:
        """The current stream; 0 in host memory. opened: the round whose tensors are used on it."""
        if not self.is_gpu:
            yield 0
            return
        with told(f"a kernel on {self.device}"), torch.cuda.device(self.device):
            stream = torch.cuda.current_stream()
            if opened is not None and opened.stream != stream.cuda_stream:  # torch gives memory out by streams
                for tensor in (opened.number, opened.routes.where, opened.weights, *(opened.outputs or ())):
                    if tensor is not None:
                        tensor.record_stream(stream)
            yield stream.cuda_stream

    def given(self, tensor: Any, name: str, dtypes: tuple[str, ...], shape: tuple[int | None, ...]) -> Any:
        """See RowMemory."""
        return tensor_on(self.device, tensor, name, dtypes, shape)

    def count_given(self, count: Any | None, tokens: int) -> Any | None:
        """A caller's number of tokens: a tensor on the device, a number, or None for all."""
        if count is None:
            return None
        if is_tensor(count) and count.device == self.device and count.numel() == 1:
            check_tensor(count, "num_tokens", INDEX_TYPES)
            return count
        return to_count(count, tokens)

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        """See RowMemory."""
        with told(f"a result on {self.device}"):
            return torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)

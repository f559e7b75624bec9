"""Rows in GPU memory: torch tensors, and kernels launched on their streams."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import crossrail as xr
from crossrail import _core
from crossrail._extras import needs
from crossrail._torch import is_tensor, told, wait_for_kernels
from crossrail.errors import TransportError, UsageError
from crossrail.moe.arrays import INDEX_TYPES, Array, tensor_on, to_host
from crossrail.moe.kernels import Kernels

with needs(__name__, "'crossrail[torch]'"):
    import torch


class DeviceRows:
    """A RowMemory of one GPU. Kernels run on the stream that is current when they are asked for."""

    def __init__(self, engine: xr.Engine, device: Any, kernels: Kernels | None) -> None:
        """kernels: of tensors; None: Triton's. UsageError where there is no such GPU, or no Triton."""
        self._engine = engine
        self.device = self._found(torch.device(device))
        self._gpu = str(self.device)  # whose memory it is; in tests the tensors are elsewhere
        self._kernels = kernels_of_a_gpu() if kernels is None else kernels
        self.name = f"memory of {self.device}"
        self.kernels = self._kernels.name
        self._busy: set[Any] = set()  # streams that we launched on since settle()

    def block(self, nbytes: int) -> DeviceBlock:
        return DeviceBlock(self, self._bytes(nbytes), None)

    def shared_block(self, nbytes: int, on_host: bool) -> DeviceBlock:
        """On a GPU the engine's memory, which kernels of other processes can be given; torch's, where the driver has
        none such. Blocks then until all kernels have ended: torch gives memory out again that some may still use. All
        of it is zero: words that kernels wait for may lie there (graph/signals.py).
        """
        if on_host:
            self.name = f"memory of the host, pinned for {self.device}"
            region = self._engine.alloc(max(nbytes, 1))
            pinned = _core.PinnedMemory(region.view(), self.device.index)
            return DeviceBlock(self, torch.from_numpy(region.array()), region, pinned)
        try:
            region = self._engine.alloc(max(nbytes, 1), device=self._gpu)
        except TransportError as error:
            self.name = f"memory of {self.device} that torch gave, which other ranks cannot map: {error}"
            tensor = self._bytes(nbytes)
            wait_for_kernels([str(self.device)])
            self._launch(tensor.zero_)
            self.settle()
            return DeviceBlock(self, tensor, self.registered(tensor))
        return DeviceBlock(self, self._seen(region), region)

    def map(self, descriptor: xr.RegionDescriptor, timeout_s: float) -> Any:
        return self._seen(self._engine.map(descriptor, timeout_s, device=self._gpu))

    def _bytes(self, nbytes: int) -> Any:
        with told(f"{nbytes} bytes of {self.device}"):
            return self._empty_bytes(max(nbytes, 1))

    def registered(self, tensor: Any) -> xr.Region:
        """The region for a block."""
        return self._engine.register(tensor)

    @property
    def is_open(self) -> bool:
        """Whether the engine is: regions are to be closed then."""
        return not self._engine.closed

    def given(self, array: Any, name: str, dtypes: tuple[str, ...], shape: tuple[int | None, ...]) -> Any:
        return tensor_on(self.device, array, name, dtypes, shape)

    def routes(self, indices: Any, shape: tuple[int, int]) -> Array:
        if is_tensor(indices) and indices.device == self.device:
            with told(f"waiting for indices from {self.device}"):
                indices = self.given(indices, "indices", INDEX_TYPES, shape).cpu()
        return to_host(indices, "indices", INDEX_TYPES, shape)

    def shown(self, array: Any, dtype: str, as_tensor: bool) -> Any:
        return array

    def shown_numbers(self, numbers: Array, as_tensor: bool) -> Any:
        return self._table(numbers)

    def empty(self, shape: tuple[int, int], dtype: str) -> Any:
        with told(f"a result on {self.device}"):
            return torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)

    def copy_of(self, array: Any) -> Any:
        copy = torch.empty_like(array)
        self._launch(copy.copy_, array)
        return copy

    def copy(self, target: Any, source: Any) -> None:
        if len(target) > 0 and target.data_ptr() != source.data_ptr():
            self._launch(target.copy_, source)

    def pack(self, target: Any, x: Any, scales: Any | None, table: Array | None) -> None:
        self._launch(self._kernels.pack, target, x, scales, None if table is None else self._table(table))

    def pull(self, x: Any, scales: Any | None, source: Any, table: Array) -> None:
        self._launch(self._kernels.pull, x, scales, source, self._table(table))

    def reduce(
        self, out: Any, sources: Sequence[Any], where: Array, weights: Any | None, accumulate: bool = False
    ) -> None:
        self._launch(self._kernels.reduce, out, sources, self._table(where), weights, accumulate)

    def settle(self) -> None:
        while self._busy:
            with told(f"kernels on {self.device}"):
                self._busy.pop().synchronize()

    # ---- what tests play

    def _seen(self, memory: xr.Region | xr.GpuMapping) -> Any:
        """The memory as a tensor, which keeps it alive."""
        address = memory.__cuda_array_interface__["data"][0]
        if isinstance(memory, xr.GpuMapping):
            # Given an address, torch would start using the GPU that owns the memory, and copy from there.
            tensor = torch.from_dlpack(memory)
        else:
            tensor = torch.as_tensor(memory, device=self.device)
        if (tensor.device, tensor.data_ptr()) != (self.device, address):
            raise UsageError(f"torch sees memory that is mapped for {self.device} as {tensor.device}'s")
        return tensor

    def _found(self, device: torch.device) -> torch.device:
        """The device with its number."""
        if not torch.cuda.is_available():
            raise UsageError(f"device is '{device}', and torch has no GPU here (torch.cuda.is_available() is False)")
        number = torch.cuda.current_device() if device.index is None else device.index
        if number >= torch.cuda.device_count():
            raise UsageError(f"device is '{device}', and there are {torch.cuda.device_count()} GPUs here")
        return torch.device("cuda", number)

    def _empty_bytes(self, nbytes: int) -> Any:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def _launch(self, kernel: Callable[..., Any], *arguments: Any) -> None:
        with told(f"a kernel on {self.device}"), torch.cuda.device(self.device):
            self._busy.add(torch.cuda.current_stream())
            kernel(*arguments)

    def _table(self, table: Array) -> Any:
        """On the GPU, for what is launched next."""
        with told(f"a table for {self.device}"):
            return torch.from_numpy(np.ascontiguousarray(table)).to(self.device)


class DeviceBlock:
    """See Block. Its memory is released with its last array."""

    def __init__(
        self, rows: DeviceRows, tensor: Any, region: xr.Region | None, pinned: _core.PinnedMemory | None = None
    ) -> None:
        """region: of the tensor, where peers write to it. pinned: what lets kernels have it, if it is the host's."""
        self._pinned = pinned
        self._rows = rows
        self._tensor = tensor
        self._region = region
        self.nbytes = len(tensor)

    @property
    def region(self) -> xr.Region:
        assert self._region is not None
        return self._region

    def register(self) -> xr.Region:
        return self._rows.registered(self._tensor)

    def array(self, dtype: str, shape: tuple[int, ...], offset: int) -> Any:
        kind = getattr(torch, dtype)
        nbytes = math.prod(shape) * kind.itemsize
        return self._tensor[offset : offset + nbytes].view(kind).view(shape)

    def close(self, timeout_s: float) -> None:
        if self._region is not None and self._rows.is_open:
            self._region.close(timeout_s)
        self._tensor = self._pinned = None


def kernels_of_a_gpu() -> Kernels:
    """Triton's, which launch and do not wait. UsageError where it is not installed."""
    try:
        from crossrail.moe.kernels.triton import TritonKernels
    except ModuleNotFoundError as error:
        raise UsageError(
            f"with a device the kernels are Triton's, and it is not installed ({error}): pip install triton, or give "
            "kernels=crossrail.moe.kernels.reference.ReferenceKernels(), which is slow"
        ) from None
    return TritonKernels(checked=False)

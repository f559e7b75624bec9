"""Where rows are - x, what experts make of them, sums - and who touches them there.

HostRows is for memory of the host; DeviceRows of device_rows.py for a GPU's. What decides where a row goes - routes,
counts, tables - is in host memory with either, as arrays of numpy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

import crossrail as xr
from crossrail import _core
from crossrail.errors import UsageError
from crossrail.moe.arrays import Array, from_host, to_host
from crossrail.moe.config import NUMPY_TYPES, Config
from crossrail.moe.kernels import CpuKernels, Kernels

INDEX_TYPES = ("int32", "int64")


class Block(Protocol):
    """One range of such memory. Owner: whoever made it; close() it before the engine."""

    nbytes: int

    def array(self, dtype: str, shape: tuple[int, ...], offset: int) -> Any:
        """A view of it, from this byte on. dtype: of config.ITEM_BYTES, or "uint8"."""

    def close(self, timeout_s: float) -> None:
        """Idempotent. WaitTimeout while a peer is in the middle of a write to it."""


class SharedBlock(Block, Protocol):
    """One that peers write to."""

    @property
    def region(self) -> xr.Region:
        """All of it."""

    def register(self) -> xr.Region:
        """Once more: a region of its own, for one peer. The caller closes it."""


class RowMemory(Protocol):
    """Threads: one at a time.

    name: as explain() says it. kernels: likewise.

    pack, pull, reduce: as of Kernels; `x` and `scales`, `out`, `weights` as given() gives them, tables of numpy. They
    may return before it is done. What is done in order: these calls, copy(), and what the caller of AllToAll does with
    the arrays, on the stream that is current in both.
    """

    name: str
    kernels: str

    def block(self, nbytes: int) -> Block: ...

    def shared_block(self, nbytes: int, on_host: bool) -> SharedBlock:
        """on_host: in memory of the host, which kernels reach too, so that an engine needs no driver to touch it."""

    def map(self, descriptor: xr.RegionDescriptor, timeout_s: float) -> Any:
        """Another rank's shared block, uint8, for kernels of ours, for as long as it is held. Raises as Engine.map."""

    def given(self, array: Any, name: str, dtypes: tuple[str, ...], shape: tuple[int | None, ...]) -> Any:
        """What a caller gave as an argument of that name, to be read or written here; shape: None for any length.
        UsageError when it is none of these types, of another shape, has strides, or is elsewhere.
        """

    def routes(self, indices: Any, shape: tuple[int, int]) -> Array:
        """Indices as a caller gave them, for the host. Waits for kernels that make them."""

    def shown(self, array: Any, dtype: str, as_tensor: bool) -> Any:
        """An array of rows for a caller. as_tensor: what he gave were tensors of torch."""

    def shown_numbers(self, numbers: Array, as_tensor: bool) -> Any:
        """int32 for a caller, to where the rows are."""

    def empty(self, shape: tuple[int, int], dtype: str) -> Any: ...

    def copy_of(self, array: Any) -> Any: ...

    def copy(self, target: Any, source: Any) -> None:
        """Nothing, when it is the same memory."""

    def pack(self, target: Any, x: Any, scales: Any | None, table: Array | None) -> None: ...

    def pull(self, x: Any, scales: Any | None, source: Any, table: Array) -> None: ...

    def reduce(
        self, out: Any, sources: Sequence[Any], where: Array, weights: Any | None, accumulate: bool = False
    ) -> None: ...

    def settle(self) -> None:
        """Until all that was asked for is done: what was packed may be sent, what was read be written anew."""


class HostRows:
    """Memory of the host, arrays of numpy. All calls do what they are to before they return."""

    name = "host memory"

    def __init__(self, engine: xr.Engine, kernels: Kernels | None, config: Config) -> None:
        self._engine = engine
        self._is_dense = config.layout == "grouped"
        self._kernels = CpuKernels() if kernels is None else kernels
        self.kernels = self._kernels.name
        self.pack, self.pull, self.reduce = self._kernels.pack, self._kernels.pull, self._kernels.reduce

    def block(self, nbytes: int) -> HostBlock:
        return HostBlock(nbytes, self._is_dense)

    def shared_block(self, nbytes: int, on_host: bool) -> SharedHostBlock:
        return SharedHostBlock(self._engine, nbytes)

    def map(self, descriptor: xr.RegionDescriptor, timeout_s: float) -> Array:
        return np.frombuffer(self._engine.map(descriptor, timeout_s), np.uint8)

    def given(self, array: Any, name: str, dtypes: tuple[str, ...], shape: tuple[int | None, ...]) -> Array:
        return to_host(array, name, dtypes, shape)

    def routes(self, indices: Any, shape: tuple[int, int]) -> Array:
        return to_host(indices, "indices", INDEX_TYPES, shape)

    def shown(self, array: Array, dtype: str, as_tensor: bool) -> Any:
        return from_host(array, dtype, as_tensor)

    def shown_numbers(self, numbers: Array, as_tensor: bool) -> Any:
        return from_host(numbers, "int32", as_tensor)

    def empty(self, shape: tuple[int, int], dtype: str) -> Array:
        return np.empty(shape, NUMPY_TYPES[dtype])

    def copy_of(self, array: Array) -> Array:
        return array.copy()

    def copy(self, target: Array, source: Array) -> None:
        if len(target) > 0 and target.ctypes.data != source.ctypes.data:
            target[:] = source

    def settle(self) -> None:
        pass


class SharedHostBlock:
    """Resident as far as it is used."""

    def __init__(self, engine: xr.Engine, nbytes: int) -> None:
        self._engine = engine
        self.region = engine.alloc(nbytes)
        self.nbytes = nbytes

    def register(self) -> xr.Region:
        return self._engine.register(self.region.view())

    def array(self, dtype: str, shape: tuple[int, ...], offset: int) -> Array:
        kind = np.dtype(NUMPY_TYPES.get(dtype, dtype))
        return np.frombuffer(self.region.view(), kind, math.prod(shape), offset).reshape(shape)

    def close(self, timeout_s: float) -> None:
        if not self._engine.closed:
            self.region.close(timeout_s)


class HostBlock:
    """Resident as far as it is used; given back with the last array of it."""

    def __init__(self, nbytes: int, is_dense: bool) -> None:
        self.nbytes = nbytes
        self._bytes: Array = np.asarray(_core.moe.sparse_pages(max(nbytes, 1), is_dense))

    def array(self, dtype: str, shape: tuple[int, ...], offset: int) -> Array:
        kind = np.dtype(NUMPY_TYPES.get(dtype, dtype))
        return np.frombuffer(self._bytes, kind, math.prod(shape), offset).reshape(shape)

    def close(self, timeout_s: float) -> None:
        pass


def is_gpu(device: Any | None) -> bool:
    """Of AllToAll's argument. UsageError for what is neither a GPU of NVIDIA's nor the host."""
    kind = "cpu" if device is None else str(device).partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise UsageError(f"device is {str(device)!r}, must be one of NVIDIA's GPUs, as 'cuda:0', or None: host memory")
    return kind == "cuda"


def row_memory(engine: xr.Engine, device: Any | None, kernels: Kernels | None, config: Config) -> RowMemory:
    """For AllToAll's arguments of these names."""
    if missing := [name for name in ("pack", "pull", "reduce") if kernels is not None and not hasattr(kernels, name)]:
        raise UsageError(
            f"kernels is {type(kernels).__name__}, must be Kernels or None: it has no {', '.join(missing)}"
        )
    if not is_gpu(device):
        return HostRows(engine, kernels, config)
    if config.node_size != 1:
        raise UsageError(
            f"node_size is {config.node_size}, must be 1 with a device: no rank reads another's GPU memory"
        )
    if config.node_sums:
        raise UsageError("node_sums is True, must be False with a device: no rank reads another's GPU memory")
    from crossrail.moe.device_rows import DeviceRows  # imports torch

    return DeviceRows(engine, device, kernels)

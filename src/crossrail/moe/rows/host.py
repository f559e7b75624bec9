"""Rows in host memory: numpy arrays, and kernels that are done when they return."""

from __future__ import annotations

from typing import Any

import numpy as np

import crossrail as xr
from crossrail import _core
from crossrail.moe.arrays import INDEX_TYPES, Array, from_host, host_array, to_host
from crossrail.moe.config import NUMPY_TYPES, Config
from crossrail.moe.kernels import CpuKernels, Kernels


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
        return host_array(self.region.view(), dtype, shape, offset)

    def close(self, timeout_s: float) -> None:
        if not self._engine.closed:
            self.region.close(timeout_s)


class HostBlock:
    """Resident as far as it is used; released with its last array."""

    def __init__(self, nbytes: int, is_dense: bool) -> None:
        self.nbytes = nbytes
        self._bytes: Array | None = np.asarray(_core.moe.sparse_pages(max(nbytes, 1), is_dense))

    def array(self, dtype: str, shape: tuple[int, ...], offset: int) -> Array:
        return host_array(self._bytes, dtype, shape, offset)

    def close(self, timeout_s: float) -> None:
        self._bytes = None

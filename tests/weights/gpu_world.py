"""Weights in the memory of a GPU that is played by the double of its driver: tests/support/fake_gpu.py.

Arrays here are numpy's over what kernels of such a GPU would see; what crossrail is given is where they are on the GPU,
which end the process when a CPU touches them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

import crossrail as xr
from crossrail.weights.inventory.memory import WeightMemory
from tests.support.fake_gpu import FakeGpu, GpuMemory

Array = npt.NDArray[Any]


@dataclass
class OnGpu:
    """An array that a GPU has, as CuPy would give it. seen: what kernels see."""

    seen: Array
    address: int

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.seen.shape,
            "typestr": self.seen.dtype.str,
            "strides": self.seen.strides,
            "data": (self.address, False),
            "version": 3,
        }


class GpuWorld:
    """Allocations of one GPU, and the way between their addresses and what lies there."""

    def __init__(self, gpu: FakeGpu, ordinal: int = 0) -> None:
        self.gpu, self.ordinal = gpu, ordinal
        self.allocations: list[GpuMemory] = []

    def allocate(self, nbytes: int) -> npt.NDArray[np.uint8]:
        return self._allocate(nbytes).bytes[:nbytes]

    def _allocate(self, nbytes: int) -> GpuMemory:
        """Any thread: trainers make their arenas in threads of their own."""
        memory = self.gpu.allocate(max(nbytes, 1), self.ordinal)
        self.allocations.append(memory)
        return memory

    def on_gpu(self, seen: Array) -> OnGpu:
        """The array that kernels see as this one."""
        for memory in self.allocations:
            offset = seen.ctypes.data - memory.bytes.ctypes.data
            if 0 <= offset < memory.nbytes:
                return OnGpu(seen, memory.address + offset)
        raise AssertionError("not in an allocation of this GPU")

    def seen_at(self, region: xr.Region) -> npt.NDArray[np.uint8]:
        """What kernels see in a region."""
        (memory,) = (one for one in self.allocations if one.address <= region.base < one.address + one.nbytes)
        begin = region.base - memory.address
        return memory.bytes[begin : begin + region.nbytes]

    def memory(self, engine: xr.Engine, role: Any, rank: int) -> tuple[WeightMemory, Callable[[int], Array]]:
        """Of Fleet.memory()."""
        return GpuWeights(self, engine, role, rank), self.allocate

    def alloc(self, engine: xr.Engine, device: str, nbytes: int) -> xr.Region:
        """In place of weights.gpu.alloc()."""
        if device == "cpu":
            return engine.alloc(nbytes)
        assert device == f"cuda:{self.ordinal}"
        return engine.register(self._allocate(nbytes))


class GpuWeights(WeightMemory):
    """Takes what kernels see, gives crossrail the GPU's addresses of it."""

    def __init__(self, world: GpuWorld, engine: xr.Engine, role: Any, rank: int) -> None:
        super().__init__(engine, role, rank)
        self.world = world

    def add(self, name: str, array: Array, **more: Any) -> None:
        super().add(name, self.world.on_gpu(array), **more)

    def add_host(self, name: str, array: Array, **more: Any) -> None:
        """One that the CPU may touch."""
        super().add(name, array, **more)

    def like(self, array: Array, regions: Sequence[xr.Region]) -> Array:
        """A copy of what kernels see there. array: without gaps; some of it may be in no region."""
        begin, found = self.world.on_gpu(array).address, array.copy().reshape(-1).view(np.uint8)
        for own, other in zip(self.regions, regions, strict=True):
            first, last = max(begin, own.base), min(begin + array.nbytes, own.base + own.nbytes)
            if first < last:
                found[first - begin : last - begin] = self.world.seen_at(other)[first - own.base : last - own.base]
        return found.view(array.dtype).reshape(array.shape)

"""Prepares tasks: makes the bytes to be written, in the arena, from a trainer's own and gathered weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

import crossrail as xr
from crossrail.weights import gpu
from crossrail.weights.step.task import Bytes, ReadyTask, Tools


class Preparer(Protocol):
    """Prepares the tasks of one trainer. Threads: one at a time, that of its conversions; load() may run in another.

    bytes_at_once: small tasks are handed over together, until they need so many bytes of the arena.
    """

    bytes_at_once: int

    def alloc(self, engine: xr.Engine, nbytes: int) -> xr.Region:
        """The arena, in which prepare() works: its owner closes it."""

    def far(self, regions: Sequence[xr.Region]) -> frozenset[int]:
        """The trainer's regions, by index, that prepare() does not read directly: load() brings what it
        needs of them.
        """

    def open(self, regions: Sequence[xr.Region], arena: xr.Region | None) -> None:
        """Begins a step. regions: the trainer's, by index in its inventory; arena None: nothing to do."""

    def load(self, tasks: Sequence[tuple[ReadyTask, int]]) -> None:
        """Copies the `loads` of tasks into the arena, at their bases; complete when it returns."""

    def prepare(self, tasks: Sequence[tuple[ReadyTask, int]]) -> None:
        """Fills the buffers of tasks whose reads and loads are done, each in the arena from its base on; complete when
        it returns. Raises NotFinite, naming the parameter.
        """

    def close(self) -> None:
        """Lets go of regions and arena. Idempotent."""


class NumpyPreparer:
    """On the CPU, for memory of the host."""

    bytes_at_once = 1 << 20  # a hand-over costs as much as converting some hundred kilobytes

    def __init__(self) -> None:
        self.tools = Tools()
        self._regions: list[Bytes] = []
        self._arena = np.zeros(0, np.uint8)

    def alloc(self, engine: xr.Engine, nbytes: int) -> xr.Region:
        return engine.alloc(nbytes)

    def far(self, regions: Sequence[xr.Region]) -> frozenset[int]:  # noqa: ARG002 (none of any)
        return frozenset()

    def open(self, regions: Sequence[xr.Region], arena: xr.Region | None) -> None:
        self.close()
        if arena is not None:
            self._regions, self._arena = [region.array() for region in regions], arena.array()

    def load(self, tasks: Sequence[tuple[ReadyTask, int]]) -> None:
        for task, base in tasks:
            for region, view, wanted in task.loads:
                np.copyto(wanted.of(self._arena, base), view.of(self._regions[region]))

    def prepare(self, tasks: Sequence[tuple[ReadyTask, int]]) -> None:
        for task, base in tasks:
            task.prepare(self._regions.__getitem__, self._arena, base, self.tools)

    def close(self) -> None:
        self._regions, self._arena = [], np.zeros(0, np.uint8)


def far_for(preparer: Preparer | None, regions: Sequence[xr.Region]) -> frozenset[int]:
    """Preparer.far(); None: of the one that preparer_for() would give."""
    if preparer is not None:
        return preparer.far(regions)
    return gpu.on_host(regions) if gpu.gpus_of(regions) else frozenset()


def preparer_for(regions: Sequence[xr.Region]) -> Preparer:
    """torch on the GPU that holds most of them, or numpy if none is on a GPU.

    UsageError if one is on a GPU and nobody has imported torch.
    """
    gpus = gpu.gpus_of(regions)
    if not gpus:
        return NumpyPreparer()
    gpu.torch_for(f"preparing weights on {gpus[0]}")
    from crossrail.weights.step.torch_preparer import TorchPreparer

    return TorchPreparer(gpus[0])

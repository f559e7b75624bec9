"""Examples of the documents that take a GPU: the double of the driver, which no wheel has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import crossrail as xr
from tests.documentation.blocks import blocks
from tests.support.fake_gpu import FakeGpu


def test_memory_for_kernels_of_other_processes(gpu: FakeGpu) -> None:
    class Tensor:
        def __init__(self, given: Any, device: str) -> None:
            self.bytes, self.device = gpu.memory_of(given).bytes, device

        def add_(self, value: int) -> None:
            self.bytes += value

    allocates, maps = blocks()["docs/gpu-memory.md"][1].split("\n\n")
    torch = SimpleNamespace(as_tensor=Tensor, from_dlpack=lambda mapping: Tensor(mapping, device=mapping.device))
    with xr.Engine("owner") as owner, xr.Engine("here") as here:
        names: dict[str, Any] = {"engine": owner, "torch": torch}
        exec(allocates, names)
        exec(maps, {"engine": here, "torch": torch, "descriptor": names["region"].descriptor})
        assert set(names["pool"].bytes) == {1} and names["pool"].device == "cuda:0"
        del names

"""Runs checkpoint-engine without a GPU, on the CPU: for trying it out, and for tests.

checkpoint-engine refuses machines without an accelerator. use_cpu() gives it another DeviceManager in this process,
in parameter servers and in workers, theirs and ours. Pinned memory is ordinary memory then, gloo takes the place of
NCCL, and workers map the buffer as shared memory instead of by CUDA's IPC.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from crossrail._extras import needs

with needs(__name__, "'crossrail[checkpoint-engine]'"):
    import checkpoint_engine.pin_memory
    import checkpoint_engine.ps
    import checkpoint_engine.worker
    import torch

_DEVICE_ARGUMENT = 6  # the one that a worker puts the number of its GPU into, in a handle of CUDA's


def use_cpu() -> None:
    """For the whole process, before a ParameterServer is made or a worker begins. RuntimeError where there is a GPU."""
    if torch.cuda.is_available():
        raise RuntimeError("use_cpu() is for machines without a GPU, and torch has one here")
    for module in (checkpoint_engine.ps, checkpoint_engine.worker):
        module.DeviceManager = CpuDeviceManager
    checkpoint_engine.ps.reduce_tensor = reduce_tensor
    checkpoint_engine.pin_memory.torch = _Unpinned()


class _Properties(NamedTuple):
    uuid: str


class _CpuModule:
    """The functions of torch.cuda that checkpoint-engine calls. Each process counts as a device of its own."""

    def __init__(self) -> None:
        self._uuid = str(uuid.uuid4())

    def device_count(self) -> int:
        """The number of processes on this host."""
        return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or 1)

    def get_device_properties(self, _index: int) -> _Properties:
        return _Properties(self._uuid)

    def mem_get_info(self) -> tuple[int, int]:
        """Bytes that may be had, and bytes of the machine."""
        lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
        kib = {line[0]: int(line[1]) for line in lines}
        return kib["MemAvailable:"] * 1024, kib["MemTotal:"] * 1024

    def memory_allocated(self) -> int:
        return 0

    def memory_reserved(self) -> int:
        return 0

    def set_device(self, _index: int) -> None: ...

    def synchronize(self) -> None: ...

    def empty_cache(self) -> None: ...

    def ipc_collect(self) -> None: ...


class CpuDeviceManager:
    """Takes the place of checkpoint_engine.device_utils.DeviceManager."""

    device_type = "cpu"
    backend = "gloo"
    device_module = _CpuModule()


class _Unpinned:
    """torch, as checkpoint_engine.pin_memory sees it: no memory is pinned where there is no GPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *size: int, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        del pin_memory
        return torch.empty(*size, **options)


def reduce_tensor(tensor: torch.Tensor) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
    """A handle by which a worker of the same user maps this memory. One-dimensional, uint8, and moved by this, so that
    it has another address. It can be mapped as long as the tensor lives.
    """
    fd, nbytes = tensor.untyped_storage()._share_fd_cpu_()
    return _map, (f"/proc/{os.getpid()}/fd/{fd}", nbytes, *[None] * (_DEVICE_ARGUMENT - 1))


def _map(path: str, nbytes: int, *_device: Any) -> torch.Tensor:
    return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)

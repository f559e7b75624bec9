"""What weights in GPU memory need from torch: allocating such memory, tensors over it, and waiting for kernels.

torch is not imported here: a caller with GPU tensors has imported it.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import crossrail as xr
from crossrail._buffers import GpuBytes
from crossrail._torch import told as told
from crossrail._torch import torch_for as torch_for
from crossrail._torch import wait_for_kernels as wait_for_kernels

Tensor: TypeAlias = Any  # torch.Tensor


def gpus_of(regions: Iterable[xr.Region]) -> list[str]:
    """Devices, as "cuda:0", of the regions in GPU memory; the one with most bytes first."""
    nbytes: dict[str, int] = {}
    for region in regions:
        if region.device != "cpu":
            nbytes[region.device] = nbytes.get(region.device, 0) + region.nbytes
    return sorted(nbytes, key=lambda device: (-nbytes[device], device))


def on_host(regions: Iterable[xr.Region]) -> frozenset[int]:
    """The indices of the regions that are not in GPU memory."""
    return frozenset(index for index, region in enumerate(regions) if region.device == "cpu")


def alloc(engine: xr.Engine, device: str, nbytes: int) -> xr.Region:
    """Memory that nothing uses: the engine's own on "cpu", torch's on a GPU, of which it is then all zeros or not.

    Blocks until kernels that were launched have ended: torch gives memory out again that they may still be using.
    """
    if device == "cpu":
        return engine.alloc(nbytes)
    torch = torch_for(f"memory of {device}")
    with told(f"{nbytes} bytes of {device}"):
        tensor = torch.empty(nbytes, dtype=torch.uint8, device=device)
    wait_for_kernels([device])
    return engine.register(tensor)


def bytes_of(region: xr.Region, offset: int = 0) -> Tensor:
    """All of a region from this byte on, as a uint8 tensor that shares its memory.

    It keeps host memory alive; a GPU's it does not, that is the region's until it is closed.
    """
    torch = torch_for("preparing weights in torch")
    if region.device == "cpu":
        kept = (ctypes.c_ubyte * region.nbytes).from_address(region.base)  # writable, as torch wants it
        kept.view = region.view()  # type: ignore[attr-defined]  # torch keeps the array, it the view, that the region
        return torch.frombuffer(kept, dtype=torch.uint8, offset=offset)
    return torch.as_tensor(GpuBytes(region.base + offset, region.nbytes - offset), device=region.device)


def tensor_at(region: xr.Region, offset: int, shape: Sequence[int], strides: Sequence[int], dtype: str) -> Tensor:
    """A tensor of torch's type of that name in the region, from this byte on; strides: bytes."""
    kind = getattr(torch_for(f"a tensor in memory of {region.device}"), dtype)
    nbytes = sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) + kind.itemsize
    whole = bytes_of(region, offset)[:nbytes].view(kind)
    return whole.as_strided(tuple(shape), [step // kind.itemsize for step in strides])


def launched(devices: Iterable[str]) -> list[Any]:
    """An event of torch's for each of these GPUs, behind what this thread's current stream of it has been given.

    None where torch has not used a GPU in this process: it has no kernels then.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return []
    events = []
    for device in devices:
        events.append(torch.cuda.Event())
        events[-1].record(torch.cuda.current_stream(device))
    return events


def have_ended(events: Iterable[Any]) -> bool:
    """Whether all that launched() noted is over."""
    with told("kernels launched before publish()"):
        return all(event.query() for event in events)

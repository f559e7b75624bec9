"""Chooses the kind of rows for an AllToAll from its arguments."""

from __future__ import annotations

from typing import Any

import crossrail as xr
from crossrail.errors import UsageError
from crossrail.moe.config import Config
from crossrail.moe.kernels import Kernels
from crossrail.moe.rows.host import HostRows
from crossrail.moe.rows.interface import RowMemory


def is_gpu(device: Any | None) -> bool:
    """Whether AllToAll's argument names a GPU. UsageError for anything but an NVIDIA GPU or the host."""
    kind = "cpu" if device is None else str(device).partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise UsageError(f"device is {str(device)!r}, must be one of NVIDIA's GPUs, as 'cuda:0', or None: host memory")
    return kind == "cuda"


def row_memory(engine: xr.Engine, device: Any | None, kernels: Kernels | None, config: Config) -> RowMemory:
    """The row memory for AllToAll's arguments of these names."""
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
    from crossrail.moe.rows.device import DeviceRows  # imports torch

    return DeviceRows(engine, device, kernels)

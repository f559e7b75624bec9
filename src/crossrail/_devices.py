"""Reads arguments called `device`: the ways to name a GPU."""

from __future__ import annotations

import sys

from crossrail import _core
from crossrail.errors import UsageError

HOST = -1


def gpu_of(device: object) -> int:
    """The ordinal of an NVIDIA GPU given as "cuda:0", "cuda" (torch's current device, else the first), or a
    torch.device.

    HOST for None and "cpu". UsageError for anything else.
    """
    kind, index = _parts_of(device)
    if kind == "cpu":
        return HOST
    if kind == "cuda":
        return _current() if index is None else index
    raise UsageError(f"device is {device!r:.80}, must be a GPU, as 'cuda:0', or None: host memory")


def gpu_at(address: int) -> str | None:
    """The GPU that owns this address, as "cuda:1"; None if it belongs to no GPU that CUDA knows."""
    ordinal = _core._gpu_of_address(address)
    return None if ordinal < 0 else f"cuda:{ordinal}"


def _parts_of(device: object) -> tuple[str, int | None]:
    if device is None:
        return "cpu", None
    if isinstance(device, str):
        kind, colon, number = device.partition(":")
        if not colon:
            return kind, None
        return (kind, int(number)) if number.isascii() and number.isdecimal() and len(number) < 6 else ("", None)
    named, index = getattr(device, "type", None), getattr(device, "index", None)
    if isinstance(named, str) and (index is None or type(index) is int):
        return named, index
    return "", None


def _current() -> int:
    torch = sys.modules.get("torch")
    return int(torch.cuda.current_device()) if torch is not None and torch.cuda.is_initialized() else 0

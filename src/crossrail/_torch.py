"""What crossrail asks of torch where memory is a GPU's. Not imported here: who has tensors of a GPU has imported it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from crossrail.errors import CrossrailError, UsageError


def torch_for(what: str) -> Any:
    """The module. UsageError when nobody has imported it."""
    torch = sys.modules.get("torch")
    if torch is None:
        raise UsageError(f"{what} takes torch, which nobody has imported in this process: import torch")
    return torch


def is_tensor(given: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(given, torch.Tensor)


def wait_for_kernels(devices: Iterable[str]) -> None:
    """Blocks until all that torch's streams of these GPUs have been given has ended."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        for device in devices:
            with told(f"waiting for the kernels of {device}"):
                torch.cuda.synchronize(device)


@contextmanager
def told(what: str) -> Iterator[None]:
    """What torch's calls raise, no memory or a kernel that failed before, as CrossrailError."""
    try:
        yield
    except RuntimeError as error:
        raise CrossrailError(f"{what}: {type(error).__name__}: {str(error).partition(chr(10))[0]}") from error

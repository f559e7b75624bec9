"""What crossrail asks of torch where memory is a GPU's. Not imported here: who has tensors of a GPU has imported it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

from crossrail.errors import CrossrailError, UsageError


def torch_for(what: str) -> Any:
    """The module. UsageError when nobody has imported it."""
    torch = sys.modules.get("torch")
    if torch is None:
        raise UsageError(f"{what} needs torch, which this process has not imported: import torch")
    return torch


def is_tensor(given: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(given, torch.Tensor)


def stream_of(stream: object) -> tuple[int, int]:
    """The cudaStream_t of what names a CUDA stream, and its GPU, -1 where it does not say. See Watcher.add_on.

    UsageError for anything else, and for None where nobody has imported torch.
    """
    if stream is None:
        torch = torch_for("the current stream, which stream=None means,")
        with told("asking for the current stream"):
            stream = torch.cuda.current_stream()
    handle: object = stream
    if not isinstance(stream, int):
        handle = getattr(stream, "cuda_stream", None)
        if handle is None and (protocol := getattr(stream, "__cuda_stream__", None)) is not None:
            handle = _handle_of_protocol(protocol)
    if isinstance(handle, bool) or not isinstance(handle, int) or not 0 <= handle < 1 << 64:
        raise UsageError(
            f"stream must be a torch.cuda.Stream, a cudaStream_t as an int, an object with __cuda_stream__, or None "
            f"for torch's current one, not {stream!r}"
        )
    gpu = getattr(stream, "device_index", -1)
    return handle, gpu if isinstance(gpu, int) else -1


def _handle_of_protocol(protocol: object) -> object:
    """Of __cuda_stream__: a method, in old versions of cuda.core a property, that gives (version, cudaStream_t)."""
    given = protocol() if callable(protocol) else protocol
    version, handle = given if isinstance(given, tuple) and len(given) == 2 else (None, None)
    if version != 0:
        raise UsageError(f"__cuda_stream__ of the stream gives {given!r}: known is (0, cudaStream_t)")
    return cast(object, handle)


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

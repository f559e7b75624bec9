"""All of crossrail's calls into torch. Only over_region() imports it: elsewhere the caller has tensors, hence torch."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar, cast

from crossrail._extras import needs
from crossrail.errors import CrossrailError, UsageError

P = ParamSpec("P")
T = TypeVar("T")


def torch_for(what: str) -> Any:
    """The torch module. UsageError if nobody has imported it."""
    torch = sys.modules.get("torch")
    if torch is None:
        raise UsageError(f"{what} needs torch, which this process has not imported: import torch")
    return torch


def is_tensor(given: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(given, torch.Tensor)


def uncompiled(call: Callable[P, T]) -> Callable[P, T]:
    """Wraps a call so that torch.compile neither traces nor compiles it or its callees: it breaks the graph before it.
    Under tracing, arrays would be torch's fake tensors, which native code does not accept, and the call would fail
    half-way.
    """
    left_alone: Callable[P, T] | None = None

    @functools.wraps(call)
    def entered(*arguments: P.args, **options: P.kwargs) -> T:
        nonlocal left_alone
        if "torch._dynamo" not in sys.modules:  # nothing is compiled, and importing it takes a second
            return call(*arguments, **options)
        if left_alone is None:
            left_alone = sys.modules["torch"].compiler.disable(call)
        return left_alone(*arguments, **options)

    return entered


def stream_of(stream: object) -> tuple[int, int]:
    """The cudaStream_t of anything that names a CUDA stream, and its GPU, or -1 if unknown. See Watcher.add_on.

    UsageError for anything else, and for None if nobody has imported torch.
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
    """The handle from __cuda_stream__: a method (a property in old versions of cuda.core) returning (version,
    cudaStream_t).
    """
    given = protocol() if callable(protocol) else protocol
    version, handle = given if isinstance(given, tuple) and len(given) == 2 else (None, None)
    if version != 0:
        raise UsageError(f"__cuda_stream__ of the stream gives {given!r}: known is (0, cudaStream_t)")
    return cast(object, handle)


def wait_for_kernels(devices: Iterable[str]) -> None:
    """Blocks until all work queued on torch's streams of these GPUs has completed."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        for device in devices:
            with told(f"waiting for the kernels of {device}"):
                torch.cuda.synchronize(device)


@contextmanager
def told(what: str) -> Iterator[None]:
    """Turns torch's exceptions, such as out of memory or an earlier kernel's failure, into CrossrailError. Also the
    AssertionError that a torch without CUDA raises.
    """
    try:
        yield
    except (RuntimeError, AssertionError) as error:
        raise CrossrailError(f"{what}: {type(error).__name__}: {str(error).partition(chr(10))[0]}") from error


def over_region(region: Any, dtype: object, lengths: tuple[int, ...] | None) -> Any:
    """Implements Region.tensor(). region: a Region, whose module is above this one."""
    with needs("Region.tensor()", "'crossrail[torch]'"):
        import torch
    of_type = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(of_type, torch.dtype):
        raise UsageError(f"dtype is {dtype!r:.80}, which is not a dtype of torch, nor the name of one")
    flat = _bytes_of(region, torch)
    if lengths is None:
        if region.nbytes % of_type.itemsize:
            raise UsageError(
                f"region of {region.nbytes} bytes is not a whole number of {of_type} ({of_type.itemsize} bytes)"
            )
        return flat.view(of_type)
    try:
        count = math.prod(lengths)
        # Negative: one dimension is inferred, so the tensor covers all of the memory.
        nbytes = region.nbytes if count < 0 else count * of_type.itemsize
        if nbytes > region.nbytes:
            raise ValueError(f"that takes {nbytes} bytes")
        return flat[:nbytes].view(of_type).reshape(lengths)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"region of {region.nbytes} bytes as {of_type} of shape {lengths}: {error}") from None


def _bytes_of(region: Any, torch: Any) -> Any:
    """All bytes of the region, as a tensor that keeps the memory alive."""
    if region.device == "cpu":
        if region.view().readonly:
            raise UsageError("the memory is read-only, and torch has no tensors of such: use array()")
        return torch.from_numpy(region.array())
    if not region._is_own_gpu_memory:
        raise UsageError(f"the memory is on {region.device}, and was registered: use what was")
    with told(f"making a tensor on {region.device}"):
        return torch.as_tensor(region, device=region.device)

"""The arrays that users pass and get: numpy's, or torch tensors in host memory. Inside, everything is numpy's.

numpy lacks bfloat16 and float8_e4m3fn: there they are uint16 and uint8, as in the rest of crossrail.
"""

from __future__ import annotations

import functools
import math
import operator
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from crossrail._torch import is_tensor
from crossrail.errors import UsageError
from crossrail.moe.config import NUMPY_TYPES

Array = npt.NDArray[Any]
INDEX_TYPES = ("int32", "int64")  # of routes as callers give them


def to_host(given: Any, name: str, dtypes: tuple[str, ...], shape: tuple[int | None, ...]) -> Array:
    """The same memory as an array of numpy. shape: None where any length will do.

    UsageError that names the argument for another shape or type, for strides, for elements that are not at multiples of
    their size, for memory of a device, for a tensor whose elements are in no memory of its own, and for one that
    requires a gradient while those are recorded.
    """
    if isinstance(given, np.ndarray):
        array = given
        if array.dtype not in _numpy_types(dtypes):
            wanted = " or ".join(NUMPY_TYPES.get(one, one) for one in dtypes)
            raise UsageError(f"{name} is of type {array.dtype}, must be of {wanted}")
    elif is_tensor(given):
        array = _of_tensor(given, name, dtypes)
    else:
        raise UsageError(f"{name} is {type(given).__name__}, must be an array of numpy or a tensor of torch")
    check_shape(array.shape, name, shape)
    if not array.flags.c_contiguous:
        raise UsageError(f"{name} has strides {array.strides}, must be C-contiguous")
    if not array.flags.aligned:
        raise UsageError(_misplaced(name, array.ctypes.data, array.itemsize))
    return array


def host_array(memory: Any, dtype: str, shape: Sequence[int], offset: int) -> Array:
    """A part of a buffer in host memory, as numpy has that type."""
    return np.frombuffer(memory, NUMPY_TYPES.get(dtype, dtype), math.prod(shape), offset).reshape(shape)


def from_host(array: Array, dtype: str, as_tensor: bool) -> Any:
    """The same memory as a tensor of that type, if one is wanted."""
    if not as_tensor:
        return array
    torch: Any = sys.modules["torch"]
    signed = {"uint16": np.int16}.get(str(array.dtype))  # torch knows few unsigned types
    return torch.from_numpy(array if signed is None else array.view(signed)).view(getattr(torch, dtype))


def check_shape(given: Sequence[int], name: str, shape: tuple[int | None, ...]) -> None:
    """UsageError that names the argument. shape: None where any length will do."""
    is_right = len(given) == len(shape)
    for length, wanted in zip(given, shape, strict=False):
        is_right = is_right and wanted in (None, length)
    if not is_right:
        texts = ["any" if length is None else str(length) for length in shape]
        raise UsageError(f"{name} has shape {list(given)}, must have [{', '.join(texts)}]")


def check_tensor(given: Any, name: str, dtypes: tuple[str, ...]) -> str:
    """The type of a torch tensor, one of dtypes. UsageError for another one, for strides, if its elements are in no
    memory, and in the cases of to_host() and check_no_gradient().
    """
    check_no_gradient(given, name)
    begin = _begin_of(given, name)
    if not given.is_contiguous():
        raise UsageError(f"{name} has strides {given.stride()}, must be C-contiguous")
    if given.numel() > 0 and begin % given.element_size():
        raise UsageError(_misplaced(name, begin, given.element_size()))
    dtype = str(given.dtype).removeprefix("torch.")
    if dtype not in dtypes:
        raise UsageError(f"{name} is of type {dtype}, must be of {' or '.join(dtypes)}")
    return dtype


def check_no_gradient(tensor: Any, name: str) -> None:
    """UsageError for a tensor that requires a gradient where torch records them: it would silently get none."""
    if tensor.requires_grad and sys.modules["torch"].is_grad_enabled():
        raise UsageError(
            f"{name} requires a gradient, and none passes through dispatch and combine. Next: call them under "
            "torch.no_grad()"
        )


def tensor_on(device: Any, given: Any, name: str, dtypes: tuple[str, ...], shape: tuple[int | None, ...]) -> Any:
    """A caller's torch tensor, on that device. UsageError as in to_host."""
    if not is_tensor(given):
        raise UsageError(f"{name} is {type(given).__name__}, must be a tensor of torch on {device}")
    if given.device != device:
        raise UsageError(f"{name} is on {given.device}, must be on {device}")
    check_tensor(given, name, dtypes)
    check_shape(given.shape, name, shape)
    return given.detach()


def overlap(one: Any, other: Any) -> bool:
    """Whether two arrays of numpy, or two tensors of one device, have bytes in common. Both are C-contiguous."""
    if isinstance(one, np.ndarray):
        return np.may_share_memory(one, other)  # exact for such

    def begin_and_end(tensor: Any) -> tuple[int, int]:
        return tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()

    (begin, end), (from_, to) = begin_and_end(one), begin_and_end(other)
    return max(begin, from_) < min(end, to)


def to_count(given: Any, bound: int) -> int:
    """num_tokens: a number, or an array or tensor that holds one."""
    try:  # item(): numpy takes arrays for numbers only if they have no dimensions
        count = operator.index(given.item() if hasattr(given, "item") else given)
    except (TypeError, ValueError, RuntimeError):  # torch raises the last
        raise UsageError(f"num_tokens is {given!r}, must be one whole number") from None
    if not 0 <= count <= bound:
        raise UsageError(f"num_tokens is {count}, must be in 0..{bound}, the rows of x")
    return count


def _begin_of(given: Any, name: str) -> int:
    """Where a tensor's elements lie, one after the other if it is contiguous. UsageError where memory has others, or
    none: sparse and nested tensors, classes that keep them in other tensors (DTensor), torch's stand-ins (FakeTensor),
    storage that was freed (by FSDP), and what is negated as it is read.
    """
    torch: Any = sys.modules["torch"]
    kind = type(given)
    if (
        given.layout is not torch.strided
        or given.is_nested
        or kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    ):
        raise UsageError(
            f"{name} is a {kind.__name__} of layout {given.layout}, must be a plain tensor, which has its elements in "
            "memory of its own. Next: of a DTensor give to_local()"
        )
    if given.is_neg() or given.is_conj():
        raise UsageError(f"{name} is negated or conjugated as it is read. Next: give {name}.resolve_neg()")
    try:
        begin = int(given.data_ptr())
    except RuntimeError as error:  # under vmap, for one
        raise UsageError(f"{name} is a {kind.__name__} without memory: {str(error).partition(chr(10))[0]}") from None
    if begin == 0 and given.numel() > 0:
        raise UsageError(f"{name} has no memory now: its storage was freed, as FSDP does with parameters it unsharded")
    return begin


def _misplaced(name: str, address: int, itemsize: int) -> str:
    return f"{name} begins at {address:#x}, must be at a multiple of {itemsize} bytes"


@functools.cache
def _numpy_types(dtypes: tuple[str, ...]) -> tuple[np.dtype[Any], ...]:
    return tuple(np.dtype(NUMPY_TYPES.get(one, one)) for one in dtypes)


def _of_tensor(given: Any, name: str, dtypes: tuple[str, ...]) -> Array:
    if given.device.type != "cpu":
        raise UsageError(f"{name} is on {given.device}, must be in host memory")
    dtype = check_tensor(given, name, dtypes)
    torch: Any = sys.modules["torch"]
    carried = {"bfloat16": (torch.int16, np.uint16), "float8_e4m3fn": (torch.uint8, np.uint8)}.get(dtype)
    plain = given.detach()
    if carried is None:
        array: Array = plain.numpy()
    else:
        array = plain.view(carried[0]).numpy().view(carried[1])
    return array

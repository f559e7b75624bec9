"""Where the memory of a Python object lies. Nothing is copied, and no array library but numpy is imported here."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from crossrail import _core
from crossrail.errors import TransportError, UsageError

_ON_A_GPU = "copy to the host first (tensor.cpu()), pinned if you like"
_NOT_MOVED = "engines move memory of hosts and of NVIDIA's GPUs: copy to the host first (tensor.cpu())"

# Of dlpack.h: kDLCPU, kDLCUDA, kDLCUDAHost.
_DLPACK_CPU, _DLPACK_CUDA, _DLPACK_PINNED = 1, 2, 3


class Memory(NamedTuple):
    """One contiguous range. `owner` keeps it where it is; None: the caller sees to that. is_cuda: it is a GPU's."""

    address: int
    nbytes: int
    writable: bool
    owner: object
    is_cuda: bool = False


def memory_of(buffer: Any) -> Memory:
    """The memory of a numpy array, torch tensor, (address, nbytes) pair, or whatever exports a buffer, DLPack or
    `__cuda_array_interface__`.

    Raises UsageError when it is not contiguous or not memory at all, TransportError when it is on another device than
    the host or an NVIDIA GPU.
    """
    if isinstance(buffer, np.ndarray):
        return _of_numpy(buffer)
    if _is_torch(buffer):
        return _of_torch(buffer)
    if isinstance(buffer, tuple):
        return _of_pair(buffer)
    if hasattr(buffer, "__cuda_array_interface__"):
        return _of_cuda_array(buffer, buffer.__cuda_array_interface__)
    _refuse_other_devices(buffer)
    try:
        view = memoryview(buffer)
    except TypeError:
        array = as_numpy(buffer)
        if array is None:
            raise UsageError(
                "buffer must be a numpy array, torch tensor, (address, nbytes) pair, or export the buffer protocol "
                f"or DLPack, not {type(buffer).__name__}"
            ) from None
        return _of_numpy(array)._replace(owner=(buffer, array))
    if not view.c_contiguous:
        raise UsageError(f"buffer must be C-contiguous, has shape {view.shape} and strides {view.strides}")
    # The view is the owner: while it lives, a bytearray does not move and a mmap does not close.
    return Memory(_core._buffer_address(view) if view.nbytes else 0, view.nbytes, not view.readonly, view)


def as_numpy(array: Any) -> npt.NDArray[Any] | None:
    """A numpy view of a torch tensor or of a host array that speaks DLPack; None for anything else."""
    if isinstance(array, (list, tuple, np.ndarray)):
        return None
    if _is_torch(array):
        if array.device.type != "cpu":
            raise TransportError("numpy view", 0, f"the tensor is on {array.device}", _ON_A_GPU)
        view: npt.NDArray[Any] = array.detach().numpy()
        return view
    if hasattr(array, "__cuda_array_interface__"):
        raise TransportError("numpy view", 0, f"{type(array).__name__} is in GPU memory", _ON_A_GPU)
    _refuse_other_devices(array)
    if not hasattr(array, "__dlpack__"):
        return None
    try:
        return np.from_dlpack(array)
    except (BufferError, TypeError, ValueError) as error:
        raise UsageError(f"{type(array).__name__} gives no numpy view of itself through DLPack: {error}") from None


class GpuBytes:
    """A range of a GPU's memory as Numba's protocol has it, for whoever takes such arrays. Keeps the owner."""

    def __init__(self, address: int, nbytes: int, owner: object = None) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3
        }  # fmt: skip


def gpu_allocation(address: int) -> tuple[int, int]:
    """First byte and length of the driver's allocation that an address of a GPU is in.

    UsageError for other memory, TransportError where the driver cannot say.
    """
    return _core._gpu_allocation(address)


def _is_torch(buffer: object) -> bool:
    torch = sys.modules.get("torch")  # who has a tensor has imported it
    return torch is not None and isinstance(buffer, torch.Tensor)


def _of_numpy(array: npt.NDArray[Any]) -> Memory:
    if array.dtype.hasobject:
        raise UsageError(f"buffer of dtype {array.dtype} holds Python objects, not their bytes")
    if not array.flags.c_contiguous:
        raise UsageError(
            f"buffer must be C-contiguous, has shape {array.shape} and strides {array.strides}: "
            "register the whole array and use offsets, or make numpy.ascontiguousarray(buffer)"
        )
    return Memory(array.__array_interface__["data"][0], array.nbytes, bool(array.flags.writeable), array)


def _of_torch(tensor: Any) -> Memory:
    device = tensor.device.type
    if device not in ("cpu", "cuda", "meta"):
        raise TransportError("register", 0, f"the tensor is on {tensor.device}", _NOT_MOVED)
    if device == "meta" or str(tensor.layout) != "torch.strided":
        raise UsageError(f"buffer must be a dense tensor with memory, not {tensor.layout} on {tensor.device}")
    if not tensor.is_contiguous():
        raise UsageError(
            f"buffer must be contiguous, has shape {tuple(tensor.shape)} and strides {tensor.stride()}: "
            "register the whole tensor and use offsets, or make buffer.contiguous()"
        )
    nbytes = tensor.numel() * tensor.element_size()
    return Memory(tensor.data_ptr(), nbytes, True, tensor, is_cuda=device == "cuda")


def _of_pair(pair: tuple[Any, ...]) -> Memory:
    try:
        address, nbytes = map(operator.index, pair)
    except (TypeError, ValueError):
        raise UsageError(f"buffer as a tuple must be (address, nbytes), two ints, not {pair!r:.80}") from None
    if address <= 0 or nbytes < 0 or address + nbytes > 2**64:
        raise UsageError(f"buffer ({address:#x}, {nbytes}) is no range of memory")
    return Memory(address, nbytes, True, None, is_cuda=_core._is_gpu_address(address))


def _of_cuda_array(array: object, interface: Mapping[str, Any]) -> Memory:
    """Numba's protocol, which CuPy, JAX and others speak too: shape, typestr, data (address, read-only), strides."""
    shape, strides = tuple(interface["shape"]), interface.get("strides")
    itemsize = np.dtype(interface["typestr"]).itemsize
    dense = tuple(itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    if strides is not None and tuple(strides) != dense:
        raise UsageError(f"buffer must be C-contiguous, has shape {shape} and strides {tuple(strides)}")
    address, is_read_only = interface["data"]
    return Memory(address, itemsize * math.prod(shape), not is_read_only, array, is_cuda=True)


def _refuse_other_devices(buffer: object) -> None:
    device = getattr(buffer, "__dlpack_device__", None)
    if device is None:
        return
    kind = int(device()[0])
    if kind == _DLPACK_CUDA:  # DLPack alone gives an address only to C
        name = type(buffer).__name__
        raise TransportError(
            "register", 0, f"{name} is on a GPU and has no __cuda_array_interface__", "torch.from_dlpack() makes one"
        )
    if kind not in (_DLPACK_CPU, _DLPACK_PINNED):
        raise TransportError("register", 0, f"{type(buffer).__name__} is on DLPack device {device()}", _NOT_MOVED)

"""Finds the memory behind a Python object. Nothing is copied, and numpy is the only array library imported here."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from crossrail import _core
from crossrail._torch import is_tensor
from crossrail.errors import TransportError, UsageError

if TYPE_CHECKING:
    import numpy.typing as npt

_ON_A_GPU = "copy to the host first (tensor.cpu()), pinned if you like"
_NOT_MOVED = "engines move memory of hosts and of NVIDIA's GPUs: copy to the host first (tensor.cpu())"

_WRAPS = "register what it wraps (DTensor.to_local(), for example)"

_CUDA_ARRAY = "buffer.__cuda_array_interface__"
_T = TypeVar("_T")

# Of dlpack.h: kDLCPU, kDLCUDA, kDLCUDAHost; and its flags.
_DLPACK_CPU, _DLPACK_CUDA, _DLPACK_PINNED = 1, 2, 3
_DLPACK_READ_ONLY, _DLPACK_IS_COPY = 1, 2


class Memory(NamedTuple):
    """A contiguous range of memory. `owner` keeps it alive; None: the caller does. is_cuda: it is GPU memory."""

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
    if is_tensor(buffer):
        return _of_torch(buffer)
    if isinstance(buffer, tuple):
        return _of_pair(buffer)
    if (interface := _cuda_array_interface(buffer)) is not None:
        return _of_cuda_array(buffer, interface)
    device = _dlpack_device(buffer)
    if device == _DLPACK_CUDA:
        return _of_dlpack(buffer)
    try:
        view = memoryview(buffer)
    except (BufferError, ValueError, TypeError) as error:  # closed or released, of a type that Python lacks, no buffer
        if device is not None:
            return _of_dlpack(buffer)
        if isinstance(error, TypeError):
            raise UsageError(
                "buffer must be a numpy array, torch tensor, (address, nbytes) pair, or export the buffer protocol "
                f"or DLPack, not {type(buffer).__name__}"
            ) from None
        raise UsageError(f"buffer, of type {type(buffer).__name__}, gives no view of its memory: {error}") from None
    if "O" in view.format:
        raise UsageError(f"buffer of format {view.format!r} holds Python objects, not their bytes")
    if not view.c_contiguous:
        raise UsageError(f"buffer must be C-contiguous, has shape {view.shape} and strides {view.strides}")
    # The view is the owner: while it lives, a bytearray does not move and a mmap does not close.
    return Memory(_core._buffer_address(view) if view.nbytes else 0, view.nbytes, not view.readonly, view)


def as_numpy(array: Any) -> npt.NDArray[Any] | None:
    """A numpy view of a torch tensor or of a host array that speaks DLPack; None for anything else."""
    if isinstance(array, (list, tuple, np.ndarray)):
        return None
    if is_tensor(array):
        if array.device.type != "cpu":
            raise TransportError("numpy view", 0, f"the tensor is on {array.device}", _ON_A_GPU)
        try:
            view: npt.NDArray[Any] = array.detach().numpy()
        except (RuntimeError, TypeError) as error:  # sparse, or of a dtype that numpy lacks
            raise UsageError(f"the tensor gives no numpy view of itself: {error}") from None
        return view
    if _cuda_array_interface(array) is not None:
        raise TransportError("numpy view", 0, f"{type(array).__name__} is in GPU memory", _ON_A_GPU)
    device = _dlpack_device(array)
    if device is None:
        return None
    if device == _DLPACK_CUDA:
        raise TransportError("numpy view", 0, f"{type(array).__name__} is in GPU memory", _ON_A_GPU)
    try:
        return np.from_dlpack(array)
    except Exception as error:  # the object's own code may raise anything
        raise UsageError(f"{type(array).__name__} gives no numpy view of itself through DLPack: {error}") from None


class GpuBytes:
    """A range of GPU memory, exported by Numba's protocol to libraries that accept such arrays. Keeps its owner."""

    def __init__(self, address: int, nbytes: int, owner: object = None) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3
        }  # fmt: skip


def gpu_allocation(address: int) -> tuple[int, int]:
    """The base address and length of the driver allocation that contains a GPU address.

    Raises UsageError for other memory, TransportError if the driver cannot say.
    """
    return _core._gpu_allocation(address)


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
    if tensor.is_conj() or tensor.is_neg():
        raise UsageError(
            "buffer is a tensor whose values are not those in its memory, but their conjugate or negative: "
            "make buffer.resolve_conj().resolve_neg()"
        )
    nbytes = tensor.numel() * tensor.element_size()
    address, storage = _storage_of(tensor)
    if address == 0 and nbytes > 0:
        raise UsageError(f"buffer is a {type(tensor).__name__} without memory of its own: {_WRAPS}")
    # The storage as well: assigning to tensor.data, as Module.to() does, gives the tensor another one.
    is_cuda = device == "cuda"
    return Memory(address, nbytes, is_cuda or _is_writable(address, nbytes), (tensor, storage), is_cuda)


def _storage_of(tensor: Any) -> tuple[int, Any]:
    """The address of the first element, 0 if there is none, and the storage that holds it."""
    try:
        storage = tensor.untyped_storage()
        if storage.device.type == "meta":  # torch's fake tensors, which warn when asked for an address
            return 0, storage
        return tensor.data_ptr(), storage
    except (RuntimeError, NotImplementedError) as error:  # in torch.vmap and the like
        raise UsageError(f"buffer is a tensor without memory of its own: {error}") from None


def _of_pair(pair: tuple[Any, ...]) -> Memory:
    try:
        address, nbytes = map(operator.index, pair)
    except (TypeError, ValueError):
        raise UsageError(f"buffer as a tuple must be (address, nbytes), two ints, not {pair!r:.80}") from None
    if address <= 0 or nbytes < 0 or address + nbytes > 2**64:
        raise UsageError(f"buffer ({address:#x}, {nbytes}) is not a range of memory")
    is_cuda = _core._is_gpu_address(address)
    return Memory(address, nbytes, is_cuda or _is_writable(address, nbytes), None, is_cuda)


def _is_writable(address: int, nbytes: int) -> bool:
    """For memory whose owner does not say: a tensor may be over a file that is mapped to be read only."""
    return nbytes == 0 or not _core._is_read_only(address, nbytes)


def _of_cuda_array(array: object, interface: Any) -> Memory:
    """Memory described by Numba's protocol (also CuPy's, JAX's, ...): shape, typestr, data (address, read-only),
    strides.
    """
    if not isinstance(interface, Mapping):
        raise UsageError(f"{_CUDA_ARRAY} must be a dict, not {type(interface).__name__}")
    shape = _field(interface, "shape", _lengths, "a tuple of lengths")
    dtype = _field(interface, "typestr", _dtype, "the typestr of a type such as '<f4'")
    address, is_read_only = _field(interface, "data", _address, "a tuple (address, read-only)")
    strides = None
    if interface.get("strides") is not None:
        strides = _field(interface, "strides", _numbers, "None or a tuple of whole numbers")
    if interface.get("mask") is not None:
        raise UsageError(f"{_CUDA_ARRAY} has a mask: register the arrays of data and mask by themselves")
    if not _is_dense(shape, strides, dtype.itemsize):
        raise UsageError(f"buffer must be C-contiguous, has shape {shape} and strides {strides}")
    nbytes = dtype.itemsize * math.prod(shape)
    if address + nbytes > 2**64:
        raise UsageError(f"buffer ({address:#x}, {nbytes}) is not a range of memory")
    return Memory(address, nbytes, not is_read_only, array, is_cuda=True)


def _field(interface: Mapping[str, Any], name: str, read: Callable[[Any], _T], form: str) -> _T:
    if name not in interface:
        raise UsageError(f"{_CUDA_ARRAY} has no {name!r}")
    try:
        return read(interface[name])
    except (TypeError, ValueError):
        raise UsageError(f"{_CUDA_ARRAY}[{name!r}] must be {form}, is {interface[name]!r:.80}") from None


def _numbers(given: Any) -> tuple[int, ...]:
    return tuple(map(operator.index, given))


def _lengths(given: Any) -> tuple[int, ...]:
    if min(lengths := _numbers(given), default=0) < 0:
        raise ValueError
    return lengths


def _dtype(given: Any) -> np.dtype[Any]:
    if not isinstance(given, str) or np.dtype(given).hasobject:
        raise ValueError
    return np.dtype(given)


def _address(given: Any) -> tuple[int, bool]:
    address, is_read_only = given
    return _lengths([address])[0], bool(is_read_only)


def _cuda_array_interface(buffer: object) -> Any:
    """The attribute of that name, which may be computed and fail; None if it is missing."""
    try:
        return getattr(buffer, "__cuda_array_interface__", None)
    except Exception as error:
        name = f"{type(buffer).__name__}.__cuda_array_interface__"
        raise UsageError(f"{name} raised {type(error).__name__}: {error}") from error


def _of_dlpack(array: Any) -> Memory:
    """Memory of any type of elements, such as the bfloat16 of JAX, which neither Python's buffers nor numpy know."""
    name = type(array).__name__
    try:
        try:
            capsule = array.__dlpack__(max_version=(1, 0))
        except TypeError:  # written before there were versions
            capsule = array.__dlpack__()
        address, device, bits, shape, strides, flags = _core._dlpack_tensor(capsule)
    except Exception as error:  # the object's own code may raise anything
        raise UsageError(f"{name} gives no view of its memory through DLPack: {error}") from None
    if flags & _DLPACK_IS_COPY:
        raise UsageError(f"{name} gives a copy of its memory through DLPack: register what it copies")
    if bits % 8:
        raise UsageError(f"{name} has elements of {bits} bits: register a view of its bytes")
    if not _is_dense(shape, strides, 1):
        raise UsageError(f"buffer must be C-contiguous, has shape {shape} and strides {strides}, in elements")
    nbytes = bits // 8 * math.prod(shape)
    if min(shape, default=0) < 0 or address + nbytes > 2**64:
        raise UsageError(f"{name} gives no range of memory through DLPack: shape {shape} at {address:#x}")
    # The capsule frees the tensor when it is dropped.
    return Memory(address, nbytes, not flags & _DLPACK_READ_ONLY, (array, capsule), device == _DLPACK_CUDA)


def _is_dense(shape: Sequence[int], strides: Sequence[int] | None, itemsize: int) -> bool:
    """Whether the elements follow each other in row-major order. strides: in units of which an element has `itemsize`;
    None: they do. Those of axes of length 1 tell nothing.
    """
    if strides is None:
        return True
    dense = [itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return len(strides) == len(shape) and (
        0 in shape or all(n == 1 or given == step for n, given, step in zip(shape, strides, dense, strict=True))
    )


def _dlpack_device(buffer: object) -> int | None:
    """The type of the device that DLPack says it is on: the host's or CUDA's. None: it does not speak DLPack. Raises
    TransportError for other devices.
    """
    if not hasattr(buffer, "__dlpack_device__"):
        return None
    try:
        kind, number = map(operator.index, buffer.__dlpack_device__())
    except Exception as error:  # the property's own code may raise anything
        raise UsageError(
            f"{type(buffer).__name__}.__dlpack_device__() must return (type, number) of a device: {error}"
        ) from error
    if kind not in (_DLPACK_CPU, _DLPACK_PINNED, _DLPACK_CUDA):
        raise TransportError("register", 0, f"{type(buffer).__name__} is on DLPack device {(kind, number)}", _NOT_MOVED)
    return kind

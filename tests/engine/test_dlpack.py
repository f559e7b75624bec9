"""Memory of libraries that export it by DLPack alone: JAX's arrays of bfloat16 are no buffers of Python."""

from __future__ import annotations

import ctypes
import gc
import weakref

import numpy as np
import pytest

import crossrail as xr
from tests.support.fake_gpu import FakeGpu
from tests.support.limits import WAIT_S
from tests.support.patterns import assert_same_bytes, pattern

CPU, CUDA, ROCM = 1, 2, 10
READ_ONLY, IS_COPY = 1, 2
BFLOAT, FLOAT4 = 4, 17
DESTRUCTOR = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Tensor(ctypes.Structure):
    """DLTensor of dlpack.h."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class Versioned(ctypes.Structure):
    """DLManagedTensorVersioned of dlpack.h."""

    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", Tensor),
    ]


def address_of(memory: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class Array:
    """Of another library: what is exported lives until the capsule is dropped."""

    def __init__(
        self,
        memory: bytearray | int,  # an address: of a GPU
        shape: tuple[int, ...],
        *,
        strides: tuple[int, ...] | None = None,
        bits: int = 16,
        lanes: int = 1,
        offset: int = 0,
        device: int = CPU,
        major: int = 1,
        flags: int | None = 0,
    ) -> None:
        self.memory = memory
        self.device = device
        self.flags = flags
        self.dropped = 0  # capsules
        self._shape = (ctypes.c_int64 * len(shape))(*shape)
        self._strides = None if strides is None else (ctypes.c_int64 * len(strides))(*strides)
        address = memory if isinstance(memory, int) else address_of(memory)
        code = FLOAT4 if bits < 8 else BFLOAT
        self._tensor = Tensor(
            address, device, 0, len(shape), code, bits, lanes, self._shape, self._strides, offset
        )  # fmt: skip
        self._managed = Versioned(major, 0, None, None, flags or 0, self._tensor)
        self._drop = DESTRUCTOR(self._dropped)

    def _dropped(self, _: object) -> None:
        self.dropped += 1

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device, 0

    def __dlpack__(self, **how: object) -> object:
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, DESTRUCTOR]
        if self.flags is None:  # before there were versions
            if how:
                raise TypeError("__dlpack__() takes no keyword arguments")
            return new(ctypes.addressof(self._tensor), b"dltensor", self._drop)
        assert how == {"max_version": (1, 0)}
        return new(ctypes.addressof(self._managed), b"dltensor_versioned", self._drop)


def test_bytes_of_a_type_that_python_lacks_are_moved_both_ways(engine: xr.Engine) -> None:
    memory = bytearray(pattern(1, 4096))
    region = engine.register(Array(memory, (32, 64)))
    fresh = engine.alloc(4096)

    engine.submit_write(region, fresh.descriptor).wait(WAIT_S)
    assert_same_bytes(fresh.array(), pattern(1, 4096))
    fresh.array()[:] = pattern(2, 4096)
    engine.submit_write(fresh, region.descriptor).wait(WAIT_S)

    assert (region.nbytes, region.access) == (4096, "write")
    assert_same_bytes(np.frombuffer(memory, np.uint8), pattern(2, 4096))


@pytest.mark.parametrize(
    ("array", "nbytes", "begins"),
    [
        (Array(bytearray(96), (3, 4), strides=(4, 1)), 24, 0),
        (Array(bytearray(96), (3, 4), strides=(4, 1), offset=64), 24, 64),
        (Array(bytearray(96), (1, 4), strides=(77, 1)), 8, 0),  # which nothing is stepped by
        (Array(bytearray(96), ()), 2, 0),
        (Array(bytearray(96), (8,), bits=4, lanes=2), 8, 0),
        (Array(bytearray(96), (5,), bits=8, flags=IS_COPY << 1), 5, 0),  # padded, says the flag
    ],
    ids=["strided", "offset", "one row", "scalar", "pairs", "bytes"],
)
def test_range_is_of_the_elements(engine: xr.Engine, array: Array, nbytes: int, begins: int) -> None:
    region = engine.register(array)

    assert region.nbytes == nbytes
    assert isinstance(array.memory, bytearray)
    assert region.base == address_of(array.memory) + begins


@pytest.mark.parametrize("flags", [READ_ONLY, None], ids=["says so", "cannot say"])
def test_memory_that_is_not_said_to_be_writable_is_read_only(engine: xr.Engine, flags: int | None) -> None:
    array = Array(bytearray(64), (32,), flags=flags)

    assert engine.register(array).access == "read"
    with pytest.raises(xr.UsageError, match="the buffer is read-only"):
        engine.register(array, access="write")


def test_capsule_lives_as_long_as_the_region(engine: xr.Engine) -> None:
    array = Array(bytearray(64), (32,))
    region = engine.register(array)
    gc.collect()
    assert array.dropped == 0

    region.close()
    del region
    gc.collect()

    assert array.dropped == 1


def test_array_lives_as_long_as_the_region(engine: xr.Engine) -> None:
    array = Array(bytearray(64), (32,))
    lives = weakref.ref(array)
    region = engine.register(array)
    del array
    gc.collect()
    assert lives() is not None

    region.close()
    del region
    gc.collect()

    assert lives() is None


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (Array(bytearray(64), (4, 8), strides=(1, 4)), r"C-contiguous, has shape \(4, 8\) and strides \(1, 4\)"),
        (Array(bytearray(64), (32,), flags=IS_COPY), "gives a copy of its memory"),
        (Array(bytearray(64), (32,), bits=4), "elements of 4 bits: register a view of its bytes"),
        (Array(bytearray(64), (0, 8)), "buffer has 0 bytes"),
        (Array(bytearray(64), (-1, -8)), r"no range of memory through DLPack: shape \(-1, -8\)"),
        (Array(bytearray(64), (2**62, 2**62)), "no range of memory through DLPack"),
        (Array(bytearray(64), (32,), major=2), "version 2 of DLPack, where 1 was asked for"),
    ],
    ids=["column-major", "copy", "half bytes", "empty", "negative", "endless", "newer"],
)
def test_what_is_no_range_of_its_own_memory_is_refused(engine: xr.Engine, array: Array, words: str) -> None:
    with pytest.raises(xr.UsageError, match=words):
        engine.register(array)


def test_memory_of_a_gpu_needs_no_other_protocol(gpu: FakeGpu, engine: xr.Engine) -> None:
    memory = gpu.allocate(4096)
    region = engine.register(Array(memory.address, (32, 64), device=CUDA))

    assert (region.device, region.nbytes, region.access) == ("cuda:0", 4096, "write")


def test_memory_of_other_devices_is_refused(engine: xr.Engine) -> None:
    with pytest.raises(xr.TransportError, match="DLPack device"):
        engine.register(Array(bytearray(64), (32,), device=ROCM))

"""What may be registered as memory, and what is refused, in words."""

import array
import ctypes
import mmap
from pathlib import Path

import numpy as np
import pytest

import crossrail as xr
from tests.support.limits import WAIT_S
from tests.support.patterns import assert_same_bytes, pattern


def moved(engine: xr.Engine, src: xr.Region, dst: xr.Region) -> None:
    engine.submit_write(src, dst.descriptor, imm=1).wait(WAIT_S)
    engine.imm_counter(1).wait(1, WAIT_S)


def buffers() -> dict[str, object]:
    return {
        "numpy": np.arange(1000, dtype=np.float32),
        "numpy-3d": np.zeros((4, 5, 6), np.int16),
        "numpy-slice": np.zeros((10, 100), np.uint8)[2:5],
        "bytearray": bytearray(1000),
        "memoryview": memoryview(bytearray(1000)),
        "array": array.array("d", [0.0] * 100),
        "mmap": mmap.mmap(-1, 4096),
    }


@pytest.mark.parametrize("kind", list(buffers()))
def test_any_buffer_can_be_source_and_target(engine: xr.Engine, kind: str) -> None:
    buffer = buffers()[kind]
    nbytes = memoryview(buffer).nbytes
    region = engine.register(buffer)
    fresh = engine.alloc(nbytes)
    fresh.array()[:] = pattern(1, nbytes)

    moved(engine, fresh, region)
    back = engine.alloc(nbytes)
    moved(engine, region, back)

    assert (region.nbytes, region.access, region.closed) == (nbytes, "write", False)
    assert_same_bytes(np.frombuffer(buffer, np.uint8), pattern(1, nbytes))
    assert_same_bytes(back.array(), pattern(1, nbytes))


def test_dlpack_object_can_be_registered(engine: xr.Engine) -> None:
    class OnlyDlpack:
        def __init__(self, owner: np.ndarray) -> None:
            self.owner = owner

        def __dlpack__(self, **how: object) -> object:
            return self.owner.__dlpack__(**how)

        def __dlpack_device__(self) -> tuple[int, int]:
            return self.owner.__dlpack_device__()

    values = np.arange(100, dtype=np.float64)
    region = engine.register(OnlyDlpack(values))

    assert region.nbytes == 800
    assert region.base == values.ctypes.data


def test_pointer_and_length_can_be_registered(engine: xr.Engine) -> None:
    values = np.zeros(100, np.uint8)
    region = engine.register((values.ctypes.data, 100))
    src = engine.register(pattern(1, 100))

    moved(engine, src, region)

    assert region.base == values.ctypes.data
    assert_same_bytes(values, pattern(1, 100))


@pytest.mark.parametrize("buffer", [bytes(100), memoryview(bytes(100))])
def test_read_only_buffer_is_readable_only(engine: xr.Engine, buffer: object) -> None:
    region = engine.register(buffer)

    assert region.access == "read"
    assert region.descriptor.access == "read"
    moved(engine, region, engine.alloc(100))


def test_read_only_memory_by_its_address_is_readable_only(engine: xr.Engine, tmp_path: Path) -> None:
    """A peer's write would end this process with SIGSEGV."""
    file = tmp_path / "values"
    file.write_bytes(pattern(1, 5000))
    values = np.memmap(file, np.uint8, mode="r")

    region = engine.register((values.ctypes.data, 5000))

    assert region.access == "read"
    moved(engine, region, engine.alloc(5000))
    with pytest.raises(xr.UsageError, match="cannot be the target of a read"):
        engine.submit_read(region, engine.alloc(5000).descriptor)
    with pytest.raises(xr.UsageError, match="read-only"):
        engine.register((values.ctypes.data, 5000), access="write")


def test_read_only_buffer_cannot_be_registered_as_target(engine: xr.Engine) -> None:
    values = np.zeros(100, np.uint8)
    values.flags.writeable = False

    with pytest.raises(xr.UsageError, match="read-only"):
        engine.register(values, access="write")


def test_unknown_access_is_refused(engine: xr.Engine) -> None:
    with pytest.raises(xr.UsageError, match=r"access.*execute"):
        engine.register(bytearray(10), access="execute")


@pytest.mark.parametrize(
    "buffer",
    [np.zeros((10, 10))[:, ::2], np.zeros((10, 10)).T, np.zeros(10)[::-1], memoryview(bytearray(10))[::2]],
    ids=["columns", "transposed", "reversed", "memoryview-step"],
)
def test_memory_with_gaps_is_refused(engine: xr.Engine, buffer: object) -> None:
    with pytest.raises(xr.UsageError, match="contiguous"):
        engine.register(buffer)


@pytest.mark.parametrize("buffer", [b"", bytearray(), np.zeros(0), np.zeros((0, 4)), (1234, 0)])
def test_empty_buffer_is_refused(engine: xr.Engine, buffer: object) -> None:
    with pytest.raises(xr.UsageError, match=r"empty|zero|length|0 bytes"):
        engine.register(buffer)


@pytest.mark.parametrize("thing", [None, 17, "text", [1, 2, 3], object(), (1, 2, 3), (-5, 10), (0, 100), ("a", 1)])
def test_what_is_no_memory_is_refused(engine: xr.Engine, thing: object) -> None:
    with pytest.raises(xr.UsageError):
        engine.register(thing)


def test_device_memory_without_a_device_says_what_is_missing(engine: xr.Engine) -> None:
    class OnTheGpu:
        __cuda_array_interface__ = {
            "shape": (10,),
            "typestr": "|u1",
            "data": (0x7F0000000000, False),
            "version": 3,
        }

    with pytest.raises(xr.TransportError, match=r"memory of a GPU needs its driver: .*libcuda\.so\.1"):
        engine.register(OnTheGpu())


def test_strided_device_memory_is_refused(engine: xr.Engine) -> None:
    class Strided:
        __cuda_array_interface__ = {
            "shape": (10, 4),
            "typestr": "<f4",
            "data": (0x7F0000000000, False),
            "strides": (32, 4),
            "version": 3,
        }

    with pytest.raises(xr.UsageError, match="C-contiguous"):
        engine.register(Strided())


@pytest.mark.parametrize(
    "pages", [array.array("i", [2, 0, 1]), memoryview(np.array([2, 0, 1])), (ctypes.c_int32 * 3)(2, 0, 1)]
)
def test_page_indices_may_be_any_buffer(engine: xr.Engine, pages: object) -> None:
    """Those of ctypes say nothing of their strides."""
    source, target = engine.alloc(300), engine.alloc(300)
    source.array()[:] = pattern(1, 300)

    engine.submit_paged_writes(source, pages, target.descriptor, pages, 100, imm=1).wait(WAIT_S)
    engine.imm_counter(1).wait(3, WAIT_S)

    assert_same_bytes(target.array(), pattern(1, 300))


def test_page_indices_of_a_released_view_are_refused(engine: xr.Engine) -> None:
    region = engine.alloc(300)
    with pytest.raises(xr.UsageError, match=r"src_pages must be .*, not memoryview"):
        engine.submit_paged_writes(region, released_view(), region.descriptor, np.zeros(1, int), 100)


FINE = {"shape": (4,), "typestr": "<f4", "data": (0x7F0000000000, False), "version": 3}


@pytest.mark.parametrize(
    ("interface", "words"),
    [
        ([1], "must be a dict, not list"),
        ({}, "has no 'shape'"),
        (FINE | {"shape": 4}, r"\['shape'\] must be a tuple of lengths, is 4"),
        (FINE | {"shape": (-4,)}, r"\['shape'\] must be a tuple of lengths, is \(-4,\)"),
        (FINE | {"shape": (4.0,)}, r"\['shape'\] must be"),
        (FINE | {"shape": (2**70,)}, "is not a range of memory"),
        (FINE | {"typestr": "zz"}, r"\['typestr'\] must be the typestr of a type such as '<f4', is 'zz'"),
        (FINE | {"typestr": None}, r"\['typestr'\] must be"),
        (FINE | {"typestr": "|O"}, r"\['typestr'\] must be"),
        (FINE | {"data": 5}, r"\['data'\] must be a tuple \(address, read-only\), is 5"),
        (FINE | {"data": ("a", False)}, r"\['data'\] must be"),
        (FINE | {"data": (-5, False)}, r"\['data'\] must be"),
        (FINE | {"data": (2**64, False)}, "is not a range of memory"),
        (FINE | {"strides": 5}, r"\['strides'\] must be None or a tuple of whole numbers, is 5"),
        (FINE | {"mask": FINE}, "has a mask"),
    ],
)
def test_device_memory_that_is_described_wrongly_is_refused(engine: xr.Engine, interface: object, words: str) -> None:
    class Strange:
        __cuda_array_interface__ = interface

    with pytest.raises(xr.UsageError, match=words):
        engine.register(Strange())


class Fails:
    """Asked for its memory it raises."""

    def __init__(self, *, by_cuda: bool) -> None:
        self.by_cuda = by_cuda

    @property
    def __cuda_array_interface__(self) -> object:
        if self.by_cuda:
            raise RuntimeError("lost its context")
        raise AttributeError

    def __dlpack_device__(self) -> tuple[int, int]:
        raise RuntimeError("lost its device")


class Dlpack:
    """Says that it is in host memory, and is not."""

    def __init__(self, device: object, trouble: str = "") -> None:
        self.device = device
        self.trouble = trouble

    def __dlpack_device__(self) -> object:
        return self.device

    def __dlpack__(self, **_: object) -> object:
        if self.trouble:
            raise RuntimeError(self.trouble)
        return None


def closed_mmap() -> mmap.mmap:
    memory = mmap.mmap(-1, 4096)
    memory.close()
    return memory


def released_view() -> memoryview:
    view = memoryview(bytearray(8))
    view.release()
    return view


@pytest.mark.parametrize(
    ("thing", "words"),
    [
        (Fails(by_cuda=True), "Fails.__cuda_array_interface__ raised RuntimeError: lost its context"),
        (Fails(by_cuda=False), r"Fails.__dlpack_device__\(\) must return .* of a device: lost its device"),
        (Dlpack(None), r"Dlpack.__dlpack_device__\(\) must return \(type, number\)"),
        (Dlpack(("cpu", 0)), r"Dlpack.__dlpack_device__\(\) must return \(type, number\)"),
        (Dlpack((1, 0)), "Dlpack gives no view of its memory through DLPack: no capsule of DLPack"),
        (Dlpack((1, 0), "no export"), "through DLPack: no export"),
        (np.ndarray, "must return"),
        (closed_mmap(), "of type mmap, gives no view of its memory: .*closed"),
        (released_view(), "of type memoryview, gives no view of its memory: .*released"),
        (memoryview(np.array([None, 1], object)), "holds Python objects, not their bytes"),
        (np.zeros(2, [("a", object)]), "holds Python objects, not their bytes"),
    ],
    ids=lambda value: None if isinstance(value, str) else type(value).__name__,
)
def test_memory_that_its_owner_does_not_give_is_refused(engine: xr.Engine, thing: object, words: str) -> None:
    with pytest.raises(xr.UsageError, match=words):
        engine.register(thing)

"""GPU memory without a GPU, by the fake NVIDIA driver that ./dev builds (tests/native/fake_gpu.h).

Any access by the CPU to such memory kills the process. Only the driver's copies reach it, and they are carried out when
their stream is waited for; tests play the kernels through `bytes`.
"""

from __future__ import annotations

import ctypes
import gc
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import crossrail
from crossrail import _core

ROOT = Path(__file__).resolve().parents[2]
PAGE_BYTES = 4096
SEGMENT_BYTES = 2 << 20


def driver_file() -> Path:
    """The fake driver of the imported build. With its folder on LD_LIBRARY_PATH it becomes the driver of a whole
    process.
    """
    package = Path(crossrail.__file__).parent
    # build/asan/python/crossrail is that build's; src/crossrail is build/release's.
    build = package.parents[1] if package.parent.name == "python" else ROOT / "build" / "release"
    file = build / "tests" / "native" / "driver" / "libcuda.so.1"
    if not file.exists():
        raise FileNotFoundError(f"no double of NVIDIA's driver at {file}: ./dev setup builds it")
    return file


class GpuMemory:
    """One allocation, or a part of one, which keeps it: engines register it, by `__cuda_array_interface__`.

    address: what the driver and engines know it by; nbytes.
    """

    def __init__(self, gpu: FakeGpu, address: int, nbytes: int) -> None:
        self.gpu, self.address, self.nbytes = gpu, address, nbytes

    @property
    def bytes(self) -> npt.NDArray[np.uint8]:
        """The memory as kernels see and write it. Do not use it after the test."""
        seen = self.gpu.driver.fake_bytes_at(self.address)
        return np.ctypeslib.as_array((ctypes.c_uint8 * self.nbytes).from_address(seen))

    def part(self, offset: int, nbytes: int) -> GpuMemory:
        assert 0 <= offset <= offset + nbytes <= self.nbytes
        return GpuMemory(self.gpu, self.address + offset, nbytes)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}


class FakeGpu:
    """Two GPUs of this process, cuda:0 and cuda:1, and their driver. One at a time; close() after all engines."""

    def __init__(self) -> None:
        file = str(driver_file())
        self.driver = ctypes.CDLL(file)  # the one that the core opens: the same file
        self.driver.fake_allocate.argtypes = [ctypes.c_uint64, ctypes.c_int]
        self.driver.fake_free.argtypes = [ctypes.c_uint64]
        self.driver.fake_bytes_at.argtypes = [ctypes.c_uint64]
        self.driver.fake_fail_copies.argtypes = [ctypes.c_int, ctypes.c_uint32]
        self.driver.fake_make_stream.argtypes = [ctypes.c_int]
        self.driver.fake_make_stream.restype = ctypes.c_uint64
        self.driver.fake_end_stream.argtypes = [ctypes.c_uint64]
        self.driver.fake_take_launch.argtypes = [ctypes.c_uint64, ctypes.c_void_p]
        self.driver.fake_run_launch.argtypes = [ctypes.c_void_p]
        self.driver.fake_refuse_kernels.argtypes = [ctypes.c_int] * 2
        self.refuse_kernels()
        self.driver.fake_free_segments.argtypes = [ctypes.c_uint64]
        self.driver.fake_allocate_segments.argtypes = [ctypes.c_uint64, ctypes.c_int]
        for name in ("fake_allocate", "fake_bytes_at", "fake_copies", "fake_waits", "fake_pinned", "fake_imports",
                     "fake_allocate_segments", "fake_mappings", "fake_handles"):  # fmt: skip
            getattr(self.driver, name).restype = ctypes.c_uint64
        self._allocated: list[int] = []
        self._segments: list[int] = []
        _core._replace_gpu_driver(file)

    def allocate(self, nbytes: int, ordinal: int = 0) -> GpuMemory:
        """Zeros, from a page's begin on; what follows them within their last page faults too."""
        assert nbytes > 0 and ordinal in (0, 1)
        address = int(self.driver.fake_allocate(-(-nbytes // PAGE_BYTES) * PAGE_BYTES, ordinal))
        self._allocated.append(address)
        return GpuMemory(self, address, nbytes)

    def array(self, array: npt.NDArray[Any], ordinal: int = 0) -> GpuMemory:
        """A copy of it."""
        memory = self.allocate(array.nbytes, ordinal)
        memory.bytes[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return memory

    @property
    def copies(self) -> int:
        """The copies between GPU and host that the driver was asked for so far."""
        return int(self.driver.fake_copies())

    def fail_copies(self, code: int, good: int = 0) -> None:
        """After so many waits for a stream that go well, each fails with that CUDA error; code 0: none any more."""
        self.driver.fake_fail_copies(code, good)

    @property
    def imports(self) -> int:
        """Allocations of other processes that are mapped here, by CUDA's IPC."""
        return int(self.driver.fake_imports())

    def fail_ipc(self, code: int) -> None:
        """Memory is neither given to other processes nor mapped from them, with that CUDA error; 0: it is again."""
        self.driver.fake_fail_ipc(code)

    def segments(self, count: int, *, is_shareable: bool = True) -> GpuMemory:
        """Like torch's expandable segments: pieces of physical memory of SEGMENT_BYTES each, mapped one after the
        other.
        """
        address = int(self.driver.fake_allocate_segments(count, int(is_shareable)))
        self._segments.append(address)
        return GpuMemory(self, address, count * SEGMENT_BYTES)

    def free_segments(self, memory: GpuMemory) -> None:
        self._segments.remove(memory.address)
        self.driver.fake_free_segments(memory.address)

    def memory_of(self, array: Any) -> GpuMemory:
        """The memory of an array of Numba's protocol: a region of Engine.alloc's, or a GpuMapping."""
        interface = array.__cuda_array_interface__
        assert (interface["typestr"], interface["data"][1]) == ("|u1", False)
        return GpuMemory(self, interface["data"][0], interface["shape"][0])

    @property
    def pinned(self) -> int:
        """Ranges of the host's memory that are pinned."""
        return int(self.driver.fake_pinned())

    @property
    def mappings(self) -> int:
        """Mappings of physical memory made by engines: of their own, and of other processes'."""
        return int(self.driver.fake_mappings())

    def set_vmm(self, *, has_vmm: bool = True, gives_fds: bool = True) -> None:
        """Sets which features of virtual memory management the driver has."""
        self.driver.fake_set_vmm(int(has_vmm), int(gives_fds))

    def fail_vmm(self, *, create: int = 0, export: int = 0, import_: int = 0) -> None:
        """CUDA errors of the calls that create, export and import physical memory; 0: none."""
        self.driver.fake_fail_vmm(create, export, import_)

    def put_out_of_reach(self, ordinal: int) -> None:
        """This GPU cannot reach the memory of others, nor they its own; -1: all can."""
        self.driver.fake_put_out_of_reach(ordinal)

    def run_kernels(self, do_run: bool) -> None:
        """Kernels of the user's run, for which contexts are waited for, or none do."""
        self.driver.fake_run_kernels(int(do_run))

    def refuse_kernels(self, *, pin: int = 0, launch: int = 0) -> None:
        """CUDA errors of the calls that pin memory and that launch; 0: none."""
        self.driver.fake_refuse_kernels(pin, launch)

    def close(self, *, is_checked: bool = True) -> None:
        """The memory is gone, and the true driver is the driver again. is_checked: engines must have left nothing."""
        self.fail_copies(0)
        self.fail_ipc(0)
        self.fail_vmm()
        self.set_vmm()
        self.put_out_of_reach(-1)
        self.run_kernels(False)
        _core._replace_gpu_driver("")
        while self._segments:
            self.driver.fake_free_segments(self._segments.pop())
        while self._allocated:
            self.driver.fake_free(self._allocated.pop())
        assert not is_checked or not (kept := self._kept()), f"engines keep {kept}: is one not closed?"

    def _kept(self, timeout_s: float = 3.0) -> str:
        """What engines still hold of the driver, after garbage collection and some patience; empty: nothing."""
        deadline = time.monotonic() + timeout_s
        while True:
            kept = {
                "streams": int(self.driver.fake_streams()),
                "pinned ranges": int(self.driver.fake_pinned()),
                "imports": self.imports,
                "mappings": self.mappings,
                "handles": int(self.driver.fake_handles()),
            }
            if not any(kept.values()) or time.monotonic() > deadline:
                return ", ".join(f"{count} {what}" for what, count in kept.items() if count)
            gc.collect()
            time.sleep(0.01)

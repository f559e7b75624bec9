"""GPU memory of CUDA's virtual memory management: allocated by engines, copied to and mapped between processes. With a
double of the driver.
"""

from __future__ import annotations

import ctypes
import os
import re
import types
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest

import crossrail as xr
from crossrail import _core
from crossrail._devices import HOST, gpu_of
from tests.conftest import EngineFactory
from tests.support.fake_gpu import FakeGpu, GpuMemory
from tests.support.gpu_owner import Owner, crc, owner_of, path_of
from tests.support.leaks import open_fds
from tests.support.limits import WAIT_S, eventually
from tests.support.seeds import Seed

NBYTES = 3 << 20

# Has memory of its engine on a GPU, and does what it is told line by line.
OWNER = """
import sys, time, zlib
import crossrail as xr
from tests.support.fake_gpu import FakeGpu, SEGMENT_BYTES
from tests.support.leaks import open_fds

gpu = FakeGpu()
kind, export_error = sys.argv[1], int(sys.argv[2])
def serve():
    with xr.Engine("owner", transport="shm") as engine:
        if kind == "alloc":
            region = engine.alloc(3 << 20, device="cuda:0")
            memory = gpu.memory_of(region)
        elif kind == "malloc":
            region = engine.register(memory := gpu.allocate(3 << 20))
        else:
            segments = gpu.segments(2, is_shareable=kind != "closed")
            memory = segments.part(SEGMENT_BYTES + 4096, 8192)
            region = engine.register(memory)
        gpu.fail_vmm(export=export_error)
        print(region.descriptor.to_bytes().hex(), flush=True)
        for line in sys.stdin:
            word, number = line.split()
            if word == "count":
                engine.imm_counter(int(number)).wait(1, 30)
                print(zlib.crc32(memory.bytes), flush=True)
            elif word == "sum":
                print(zlib.crc32(memory.bytes), flush=True)
            elif word == "fill":
                memory.bytes[:] = int(number)
                print("filled", flush=True)
            elif word == "close":
                region.close()
                del region
                deadline = time.monotonic() + 20
                while gpu.mappings and time.monotonic() < deadline:
                    time.sleep(0.001)
                print(gpu.mappings, flush=True)
            elif word == "free":
                region.close()
                gpu.free_segments(segments)
                print("freed", flush=True)
            elif word == "revoke":
                region.revoke()
                region.renew()
                print(region.descriptor.to_bytes().hex(), flush=True)
            elif word == "fds":
                print(len(open_fds()), flush=True)
serve()
gpu.close()
"""


def owner(kind: str = "alloc", export_error: int = 0) -> AbstractContextManager[Owner]:
    return owner_of(OWNER, kind, str(export_error))


def noise(seed: Seed, nbytes: int = NBYTES) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return seed.rng().integers(0, 256, nbytes, np.uint8)


def filled(gpu: FakeGpu, region: xr.Region, bytes_: np.ndarray[Any, Any]) -> GpuMemory:
    memory = gpu.memory_of(region)
    memory.bytes[:] = bytes_
    return memory


# --- of our own


def test_memory_is_zero_and_given_back_when_nothing_has_it(gpu: FakeGpu, open_engine: EngineFactory) -> None:
    engine = open_engine()
    region = engine.alloc(NBYTES + 1, device="cuda:1")
    assert (region.nbytes, region.device, region.access) == (NBYTES + 1, "cuda:1", "write")
    assert region.descriptor.device == "cuda" and region.gpudirect.startswith("no: ")
    memory = gpu.memory_of(region)
    assert memory.nbytes == NBYTES + 1 and not memory.bytes.any()
    tensor = types.SimpleNamespace(of=region)  # as torch does: it keeps the object
    region.close()
    del region
    assert gpu.mappings == 1
    memory.bytes[:] = 1
    del tensor
    eventually(lambda: gpu.mappings == 0, "it is given back")


def test_kernels_that_run_keep_it(gpu: FakeGpu, open_engine: EngineFactory) -> None:
    engine = open_engine()
    region = engine.alloc(NBYTES, device="cuda")
    memory = gpu.memory_of(region)
    gpu.run_kernels(True)
    more = engine.alloc(5, device="cuda")  # does not wait for them
    region.close()
    del region, more
    memory.bytes[5] = 7  # a kernel
    assert gpu.mappings == 2
    gpu.run_kernels(False)
    eventually(lambda: gpu.mappings == 0, "it is given back")


def test_it_is_not_the_cpus(gpu: FakeGpu, open_engine: EngineFactory) -> None:
    engine = open_engine()
    own, registered, host = engine.alloc(64, device="cuda:0"), engine.register(gpu.allocate(64)), engine.alloc(64)
    for look in (own.view, own.array, own.poison):
        with pytest.raises(xr.UsageError, match=r"torch\.as_tensor\(region, device='cuda:0'\)"):
            look()
    with pytest.raises(xr.UsageError, match="the tensor that was registered"):
        registered.view()
    for region in (registered, host):
        assert not hasattr(region, "__cuda_array_interface__")
    assert [region.__dlpack_device__() for region in (own, registered, host)] == [(2, 0), (2, 0), (1, 0)]
    part = engine.register(own, access="read")
    assert (part.base, part.nbytes, part.device, part.access) == (own.base, 64, "cuda:0", "read")
    part.close()
    own.close()
    with pytest.raises(xr.UsageError, match="closed"):
        _ = own.__cuda_array_interface__


def test_devices(gpu: FakeGpu, open_engine: EngineFactory) -> None:
    engine = open_engine()
    device = types.SimpleNamespace(type="cuda", index=1)  # as torch.device
    for given, ordinal in (("cuda:1", 1), ("cuda", 0), (device, 1), (None, HOST), ("cpu", HOST)):
        assert gpu_of(given) == ordinal
    for given in (
        "cuda:",
        "cuda:x",
        "cuda:-1",
        "cuda:1:1",
        "cuda:²",
        "cuda:99999999999999999999",
        "meta",
        "",
        0,
        True,
        b"cuda",
        [],
    ):
        with pytest.raises(xr.UsageError, match="device is"):
            engine.alloc(64, device=given)
    with pytest.raises(xr.UsageError, match=r"'cuda:2', and GPUs are numbered from 0, 2 in all"):
        engine.alloc(64, device="cuda:2")
    with pytest.raises(xr.UsageError, match="nbytes = 0"):
        engine.alloc(0, device="cuda:0")


def test_what_is_missing_is_told(gpu: FakeGpu, open_engine: EngineFactory) -> None:
    engine = open_engine()
    gpu.set_vmm(gives_fds=False)
    with pytest.raises(xr.TransportError, match=r"exports no file descriptors .*engine\.register"):
        engine.alloc(64, device="cuda:0")
    gpu.set_vmm(has_vmm=False)
    with pytest.raises(xr.TransportError, match=r"no virtual memory management .*engine\.register"):
        engine.alloc(64, device="cuda:0")
    gpu.set_vmm()
    gpu.fail_vmm(create=2)
    with pytest.raises(xr.TransportError, match=r"cannot allocate 2097152 bytes on GPU 0.*CUDA error 2"):
        engine.alloc(64, device="cuda:0")
    with pytest.raises(xr.TransportError, match="moves host memory only"):
        open_engine(transport="null").alloc(64, device="cuda:0")


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="there is a GPU")
def test_without_a_driver() -> None:
    with xr.Engine("here") as engine, pytest.raises(xr.TransportError, match="needs its driver"):
        engine.alloc(64, device="cuda:0")


# --- between processes


@pytest.mark.parametrize("kind", ["alloc", "segments"])
def test_writes_and_reads(gpu: FakeGpu, open_engine: EngineFactory, seed: Seed, kind: str) -> None:
    here = open_engine(transport="shm")
    with owner(kind) as other:
        nbytes = other.remote.nbytes
        bytes_ = noise(seed, nbytes)
        source, back = here.alloc(nbytes, device="cuda:0"), here.alloc(nbytes, device="cuda:0")
        filled(gpu, source, bytes_)
        here.submit_write(source, other.remote, imm=1).wait(WAIT_S)
        assert other.ask("count", 1) == crc(bytes_)
        assert path_of(here, other.remote)[0] == {"cuda-vmm"}
        fds = len(open_fds()), other.ask("fds")
        host = np.zeros(nbytes, np.uint8)
        for region in (back, here.register(host)):
            here.submit_read(region, other.remote).wait(WAIT_S)
        np.testing.assert_array_equal(gpu.memory_of(back).bytes, bytes_)
        np.testing.assert_array_equal(host, bytes_)
        assert (len(open_fds()), other.ask("fds")) == fds


def test_a_region_that_was_asked_for_before_there_was_a_gpu(
    gpu: FakeGpu, open_engine: EngineFactory, seed: Seed
) -> None:
    here, bytes_ = open_engine(transport="shm"), noise(seed)
    with owner() as other:
        here.submit_write(here.register(bytes_), other.remote, imm=1).wait(WAIT_S)
        assert other.ask("count", 1) == crc(bytes_)
        assert path_of(here, other.remote)[0] == {"staged"}
        source = here.register(gpu.array(bytes_[::-1].copy()))
        here.submit_write(source, other.remote, imm=2).wait(WAIT_S)
        assert other.ask("count", 2) == crc(bytes_[::-1].copy())
        assert path_of(here, other.remote)[0] == {"cuda-vmm"}


@pytest.mark.parametrize(
    ("kind", "export_error", "import_error", "reason"),
    [
        ("closed", 0, 0, "cuMemExportToShareableHandle: a fake error .CUDA error 1."),
        ("alloc", 304, 0, "CUDA error 304"),
        ("alloc", 0, 999, "CUDA error 999"),
    ],
)
def test_where_it_is_refused_bytes_are_staged_and_explain_says_why(
    gpu: FakeGpu,
    open_engine: EngineFactory,
    seed: Seed,
    kind: str,
    export_error: int,
    import_error: int,
    reason: str,
) -> None:
    here = open_engine(transport="shm")
    gpu.fail_vmm(import_=import_error)
    with owner(kind, export_error) as other:
        bytes_ = noise(seed, other.remote.nbytes)
        for imm in (1, 2):
            here.submit_write(here.register(gpu.array(bytes_)), other.remote, imm=imm).wait(WAIT_S)
            assert other.ask("count", imm) == crc(bytes_)
        paths, why = path_of(here, other.remote)
        assert paths == {"staged"}
        assert re.search(reason, why), why


def dlpack_of(array: Any) -> tuple[int, int, int]:
    """Address, kind of device and its number, of a DLTensor."""
    capsule = array.__dlpack__(stream=1, max_version=(1, 0))
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    at = pointer_of(capsule, b"dltensor")
    kind, number = (ctypes.c_int32 * 2).from_address(at + 8)
    return ctypes.c_uint64.from_address(at).value, kind, number


def test_a_peers_memory_is_mapped_for_kernels(gpu: FakeGpu, open_engine: EngineFactory) -> None:
    here = open_engine(transport="shm")
    with owner() as other:
        here.map(other.remote, WAIT_S, device="cuda:1")  # connects
        eventually(lambda: gpu.mappings == 0, "unmapped")
        fds = len(open_fds()), other.ask("fds")
        mapped = here.map(other.remote, WAIT_S, device="cuda:1")
        assert (mapped.nbytes, mapped.device) == (NBYTES, "cuda:1")
        assert repr(mapped) == f"<GpuMapping of {NBYTES} bytes for cuda:1>"
        assert not hasattr(mapped, "__dict__")
        assert mapped.__dlpack_device__() == (2, 1)  # kDLCUDA
        assert dlpack_of(mapped) == (mapped.__cuda_array_interface__["data"][0], 2, 1)
        bytes_ = gpu.memory_of(mapped).bytes
        bytes_[:] = np.arange(NBYTES, dtype=np.uint32).astype(np.uint8)  # a kernel
        assert other.ask("sum") == crc(bytes_)
        assert other.ask("fill", 9) == "filled" and set(bytes_.tolist()) == {9}
        again = here.map(other.remote, WAIT_S, device="cuda:0")
        assert gpu.mappings == 2
        del mapped, again
        eventually(lambda: gpu.mappings == 0, "unmapped")
        assert (len(open_fds()), other.ask("fds")) == fds


@pytest.mark.parametrize("end", ["close", "kill", "revoke"])
def test_a_mapping_outlives_what_its_owner_does(gpu: FakeGpu, open_engine: EngineFactory, end: str) -> None:
    here = open_engine(transport="shm")
    with owner() as other:
        remote = other.remote
        mapped = here.map(remote, WAIT_S, device="cuda:0")
        bytes_ = gpu.memory_of(mapped).bytes
        other.ask("fill", 7)
        if end == "close":
            assert other.ask("close") == "0"  # it has nothing mapped any more
        elif end == "revoke":
            assert here.map(Owner.descriptor(other.ask("revoke")), WAIT_S, device="cuda:0").nbytes == NBYTES
        else:
            other.script.kill()
            other.script.wait(WAIT_S)
        assert set(bytes_.tolist()) == {7}
        bytes_[:] = 8
        refusal = {"close": xr.RemoteRegionClosed, "revoke": xr.RemoteRegionRevoked, "kill": xr.PeerLost}[end]
        eventually(lambda: is_refused(here, remote, refusal), "refused")
        here.close()
        assert set(bytes_.tolist()) == {8}
        del mapped


def is_refused(engine: xr.Engine, remote: xr.RegionDescriptor, kind: type[xr.TransferError]) -> bool:
    try:
        engine.map(remote, WAIT_S, device="cuda:0")
    except kind:
        return True
    return False


def test_memory_that_its_owner_frees_stays_for_who_mapped_it(gpu: FakeGpu, open_engine: EngineFactory) -> None:
    here = open_engine(transport="shm")
    with owner("segments") as other:
        mapped = here.map(other.remote, WAIT_S, device="cuda:0")
        other.ask("fill", 3)
        assert other.ask("free") == "freed"
        assert set(gpu.memory_of(mapped).bytes.tolist()) == {3}


def test_only_what_stays_is_mapped(gpu: FakeGpu, open_engine: EngineFactory, seed: Seed) -> None:
    here = open_engine(transport="shm")
    with owner("malloc") as other:
        here.submit_write(here.register(gpu.array(noise(seed))), other.remote).wait(WAIT_S)
        assert path_of(here, other.remote)[0] == {"cuda-ipc"}
        with pytest.raises(xr.UsageError, match=r"cudaMalloc .*engine\.alloc\(device="):
            here.map(other.remote, WAIT_S, device="cuda:0")
        with pytest.raises(xr.UsageError, match="device is None"):
            here.map(other.remote, WAIT_S)
    with owner("closed") as other, pytest.raises(xr.UsageError, match="cuMemExportToShareableHandle"):
        here.map(other.remote, WAIT_S, device="cuda:0")
    host = open_engine("host", transport="shm").alloc(64)
    with pytest.raises(xr.UsageError, match="device is 'cuda:0', must be None"):
        here.map(host.descriptor, WAIT_S, device="cuda:0")


def test_a_gpu_out_of_reach_is_refused_in_the_drivers_words(gpu: FakeGpu, open_engine: EngineFactory) -> None:
    here = open_engine(transport="shm")
    gpu.put_out_of_reach(1)
    with owner() as other:
        with pytest.raises(xr.TransportError, match=r"out of reach on GPU 1.*CUDA error 217"):
            here.map(other.remote, WAIT_S, device="cuda:1")
        own = open_engine("there", transport="shm").alloc(64, device="cuda:0")
        with pytest.raises(xr.TransportError, match=r"out of reach on GPU 1.*CUDA error 217"):
            here.map(own.descriptor, WAIT_S, device="cuda:1")
        another = open_engine("another", transport="shm")
        gpu.fail_vmm(import_=999)
        with pytest.raises(xr.TransportError, match="CUDA error 999"):
            another.map(other.remote, WAIT_S, device="cuda:0")
        gpu.fail_vmm()
        assert another.map(other.remote, WAIT_S, device="cuda:0").nbytes == NBYTES
        with pytest.raises(xr.UsageError, match="'cuda:2', and GPUs are numbered"):
            another.map(other.remote, WAIT_S, device="cuda:2")


def test_a_network_maps_no_gpu(gpu: FakeGpu, open_engine: EngineFactory) -> None:
    ours, theirs = (open_engine(name, transport="tcp", rails=["127.0.0.1"]) for name in ("ours", "theirs"))
    region = theirs.alloc(64, device="cuda:0")
    with pytest.raises(xr.UsageError, match="be reached by shm"):
        ours.map(region.descriptor, WAIT_S, device="cuda:0")


def test_within_a_process_it_is_the_owners_address(gpu: FakeGpu, open_engine: EngineFactory) -> None:
    here, there = open_engine("here"), open_engine("there")
    region = there.alloc(NBYTES, device="cuda:0")
    mapped = here.map(region.descriptor, WAIT_S, device="cuda:0")
    assert gpu.memory_of(mapped).address == region.base and gpu.mappings == 1
    region.close()
    there.close()
    del region
    gpu.memory_of(mapped).bytes[:] = 4
    del mapped
    eventually(lambda: gpu.mappings == 0, "it is given back")


def test_a_child_leaves_its_parents_memory_alone(gpu: FakeGpu, open_engine: EngineFactory) -> None:
    here = open_engine("here")
    region = here.alloc(NBYTES, device="cuda:0")
    mapped = here.map(region.descriptor, WAIT_S, device="cuda:0")
    child = os.fork()
    if child == 0:
        del mapped, region
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    gpu.memory_of(mapped).bytes[:] = 4


def test_a_child_leaves_what_its_parent_pinned_alone(gpu: FakeGpu, open_engine: EngineFactory) -> None:
    pinned = _core.PinnedMemory(open_engine("here").alloc(4096).view(), 0)
    child = os.fork()
    if child == 0:
        del pinned
        os._exit(gpu.pinned)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == gpu.pinned == 1
    del pinned
    assert gpu.pinned == 0

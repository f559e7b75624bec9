"""GPU memory from Python, by the double of NVIDIA's driver. What engines do with it: tests/native/test_gpu_*."""

import os
import subprocess
import sys

import numpy as np
import pytest

import crossrail as xr
from crossrail import _core
from tests.conftest import EngineFactory
from tests.support.fake_gpu import FakeGpu, driver_file
from tests.support.limits import PROGRAM_S, WAIT_S
from tests.support.seeds import Seed

NBYTES = 300_001


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize(("from_gpu", "to_gpu"), [(True, True), (True, False), (False, True)])
def test_written_bytes_equal(
    gpu: FakeGpu, open_engine: EngineFactory, seed: Seed, transport: str, from_gpu: bool, to_gpu: bool
) -> None:
    options = {"transport": transport} | ({"rails": ["127.0.0.1"]} if transport == "tcp" else {})
    here, there = open_engine("here", **options), open_engine("there", **options)
    noise = seed.rng().integers(0, 256, NBYTES, np.uint8)
    landed = np.zeros(NBYTES, np.uint8)
    source = gpu.array(noise) if from_gpu else noise
    target = gpu.array(landed, 1) if to_gpu else landed
    region, remote = here.register(source), there.register(target)
    assert (region.device, remote.device) == ("cuda:0" if from_gpu else "cpu", "cuda:1" if to_gpu else "cpu")

    here.submit_write(region, remote.descriptor, imm=1)
    there.imm_counter(1).wait(1, WAIT_S)

    np.testing.assert_array_equal(target.bytes if to_gpu else landed, noise)
    assert gpu.copies > 0
    if transport == "shm":
        paths = {path.path for path in here.explain(there.address).paths}
        assert paths == ({"staged"} if from_gpu != to_gpu and to_gpu else {"local"})


def test_a_worker_of_tcp_pins_nothing(gpu: FakeGpu, open_engine: EngineFactory, seed: Seed) -> None:
    """To pin waits for kernels, which may wait for the worker. There are more payloads under way than stages."""
    nbytes = 40 << 20
    options = {"transport": "tcp", "rails": ["127.0.0.1"] * 4}
    here, there = open_engine("here", **options), open_engine("there", **options)
    noise = seed.rng().integers(0, 256, nbytes, np.uint8)
    source, target = gpu.array(noise), gpu.allocate(nbytes)
    region, remote = here.register(source), there.register(target)
    pinned = gpu.pinned
    assert pinned > 0
    for _ in range(2):
        here.submit_write(region, remote.descriptor, imm=1)
        there.imm_counter(1).wait(1, WAIT_S)
        there.submit_read(remote, region.descriptor).wait(WAIT_S)
        assert gpu.pinned == pinned
    np.testing.assert_array_equal(target.bytes, noise)


def test_an_address_is_a_gpus_if_the_driver_knows_it(gpu: FakeGpu, open_engine: EngineFactory) -> None:
    memory, host = gpu.allocate(8192), np.zeros(8192, np.uint8)
    assert _core._is_gpu_address(memory.address + 8191)
    assert not _core._is_gpu_address(host.ctypes.data)
    assert open_engine().register((memory.address, 8192)).device == "cuda:0"


def test_the_cpu_is_refused(gpu: FakeGpu, open_engine: EngineFactory) -> None:
    region = open_engine().register(gpu.allocate(4096))
    for look in (region.view, region.array, region.poison):
        with pytest.raises(xr.UsageError, match="memory of cuda:0"):
            look()


@pytest.mark.no_sanitizer  # which reports the end of a process that is meant to end
def test_touching_it_by_the_cpu_ends_the_process() -> None:
    """What the other tests rest on."""
    program = "import ctypes; from tests.support.fake_gpu import FakeGpu; m = FakeGpu().allocate(1); "
    alive = subprocess.run(
        [sys.executable, "-c", program + "print(m.bytes[0])"], timeout=PROGRAM_S, capture_output=True
    )
    assert (alive.returncode, alive.stdout.split()) == (0, [b"0"])
    read = program + "ctypes.string_at(m.address, 1)"
    assert subprocess.run([sys.executable, "-c", read], timeout=PROGRAM_S, capture_output=True).returncode != 0


def test_found_by_its_name_as_the_true_one_is() -> None:
    program = "from crossrail import _core; print(_core._no_gpu_driver(), [gpu['name'] for gpu in _core._gpus()])"
    env = os.environ | {"LD_LIBRARY_PATH": str(driver_file().parent)}
    found = subprocess.run([sys.executable, "-c", program], env=env, timeout=PROGRAM_S, capture_output=True, text=True)
    assert found.stdout.split() == ["['fake0',", "'fake1']"], found.stderr


def test_no_driver_in_a_file_is_said() -> None:
    with pytest.raises(xr.TransportError, match="cannot open /nowhere"):
        _core._replace_gpu_driver("/nowhere")


@pytest.mark.parametrize(
    ("kind", "out_of_reach", "path"),
    [("cudaMalloc", -1, "local"), ("cudaMalloc", 1, "local"), ("alloc", -1, "local"), ("alloc", 1, "staged"),
     ("segments", -1, "local"), ("segments", 1, "staged"), ("closed segments", -1, "staged")],
)  # fmt: skip
def test_pages_between_two_gpus_of_a_process(
    gpu: FakeGpu, open_engine: EngineFactory, seed: Seed, kind: str, out_of_reach: int, path: str
) -> None:
    """A kernel of one faults on memory of the other, unless it was mapped for both: its GPU is lost to it then."""
    pages, page_bytes = 64, 4096
    nbytes = pages * page_bytes
    gpu.put_out_of_reach(out_of_reach)
    here, there = open_engine("here", transport="shm"), open_engine("there", transport="shm")
    bytes_ = seed.rng().integers(0, 256, nbytes, np.uint8)
    order, numbers = np.arange(pages), seed.rng().permutation(pages)
    source, back = here.register(gpu.array(bytes_, 1)), gpu.allocate(nbytes, 1)
    if kind == "alloc":
        target = there.alloc(nbytes, device="cuda:0")
    elif kind == "cudaMalloc":
        target = there.register(gpu.allocate(nbytes))
    else:
        target = there.register(gpu.segments(1, is_shareable=kind == "segments").part(0, nbytes))

    here.submit_paged_writes(source, order, target.descriptor, numbers, page_bytes, imm=1).wait(WAIT_S)
    there.imm_counter(1).wait(pages, WAIT_S)
    here.submit_read(here.register(back), target.descriptor).wait(WAIT_S)

    np.testing.assert_array_equal(back.bytes.reshape(pages, -1)[numbers], bytes_.reshape(pages, -1))
    assert {each.path for each in here.explain(there.address).paths} == {path}

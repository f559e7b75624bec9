"""GPU memory that another process's GPU copies to, by CUDA's IPC: between processes, with a double of the driver."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest

import crossrail as xr
from tests.conftest import EngineFactory
from tests.support.fake_gpu import FakeGpu
from tests.support.gpu_owner import Owner, crc, owner_of, path_of
from tests.support.limits import WAIT_S, eventually
from tests.support.seeds import Seed

NBYTES = 3 << 20

# Owns memory of a GPU, two regions of one allocation, and does what it is told line by line.
OWNER = """
import sys, zlib
import crossrail as xr
from tests.support.fake_gpu import FakeGpu

gpu = FakeGpu()
gpu.fail_ipc(int(sys.argv[1]))
memory = gpu.allocate(2 * (3 << 20) + 4096)
def serve():
    with xr.Engine("owner", transport="shm") as engine:
        regions = [engine.register(memory.part(256 + at, 3 << 20)) for at in (0, 3 << 20)]
        for region in regions:
            print(region.descriptor.to_bytes().hex(), flush=True)
        for line in sys.stdin:
            word, number = line.split()
            region = regions[int(number)]
            if word == "sum":
                engine.imm_counter(1).wait(1, 30)
                print(zlib.crc32(memory.part(256 + int(number) * (3 << 20), 3 << 20).bytes), flush=True)
            elif word == "close":
                region.close()
                print("closed", flush=True)
            elif word == "revoke":
                region.revoke()
                region.renew()
                print(region.descriptor.to_bytes().hex(), flush=True)
            elif word == "fail":
                gpu.fail_copies(int(number) * 700)
                print("failing", flush=True)
serve()
gpu.close()
"""


def owner(ipc_error: int = 0) -> AbstractContextManager[Owner]:
    return owner_of(OWNER, str(ipc_error), regions=2)


def write_for_ever(engine: xr.Engine, region: xr.Region, remote: xr.RegionDescriptor) -> None:
    for _ in range(1_000_000):
        engine.submit_write(region, remote).wait(WAIT_S)


def noise(seed: Seed) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return seed.rng().integers(0, 256, NBYTES, np.uint8)


def test_writes_pages_and_reads(gpu: FakeGpu, open_engine: EngineFactory, seed: Seed) -> None:
    here, bytes_ = open_engine(transport="shm"), noise(seed)
    source, back = gpu.array(bytes_), gpu.allocate(NBYTES)
    region, again = here.register(source), here.register(back)
    copied = gpu.copies
    with owner() as other:
        for number, remote in enumerate(other.remotes):
            here.submit_write(region, remote, imm=1).wait(WAIT_S)
            assert other.ask("sum", number) == crc(bytes_)
        assert gpu.imports == 1  # regions of one allocation
        assert gpu.copies - copied == 2  # what touches is one copy, however it was cut
        assert path_of(here, other.remotes[0])[0] == {"cuda-ipc"}

        order = seed.rng().permutation(NBYTES // 4096)
        here.submit_paged_writes(region, order, other.remotes[0], np.arange(len(order)), 4096, imm=2).wait(WAIT_S)
        here.submit_read(again, other.remotes[0]).wait(WAIT_S)
        np.testing.assert_array_equal(back.bytes.reshape(-1, 4096), bytes_.reshape(-1, 4096)[order])
        here.submit_read(again, other.remotes[1], 5000, dst_offset=17, src_offset=1234).wait(WAIT_S)
        np.testing.assert_array_equal(back.bytes[17:5017], bytes_[1234:6234])
        host = np.zeros(NBYTES, np.uint8)
        here.submit_read(here.register(host), other.remotes[1]).wait(WAIT_S)  # staged
        np.testing.assert_array_equal(host, bytes_)


@pytest.mark.parametrize(("here_fails", "there_fails"), [(0, 801), (217, 0)])
def test_where_it_is_refused_bytes_are_staged_and_explain_says_why(
    gpu: FakeGpu, open_engine: EngineFactory, seed: Seed, here_fails: int, there_fails: int
) -> None:
    gpu.fail_ipc(here_fails)
    here, bytes_ = open_engine(transport="shm"), noise(seed)
    region = here.register(gpu.array(bytes_))
    with owner(there_fails) as other:
        here.submit_write(region, other.remotes[0], imm=1).wait(WAIT_S)
        assert other.ask("sum", 0) == crc(bytes_)
        paths, reason = path_of(here, other.remotes[0])
        assert paths == {"staged"} and f"CUDA error {here_fails or there_fails}" in reason
        assert gpu.imports == 0


def test_a_copy_that_fails_fails_its_write_and_is_not_counted(
    gpu: FakeGpu, open_engine: EngineFactory, seed: Seed
) -> None:
    here, bytes_ = open_engine(transport="shm"), noise(seed)
    region = here.register(gpu.array(bytes_))
    with owner() as other:
        gpu.fail_copies(700)
        with pytest.raises(xr.TransferError, match="CUDA error 700"):
            here.submit_write(region, other.remotes[0], imm=1).wait(WAIT_S)
        gpu.fail_copies(0)
        here.submit_write(region, other.remotes[1], imm=1).wait(WAIT_S)
        assert other.ask("sum", 1) == crc(bytes_)  # the first count there


def test_closed_and_revoked_regions_are_refused(gpu: FakeGpu, open_engine: EngineFactory, seed: Seed) -> None:
    here, bytes_ = open_engine(transport="shm"), noise(seed)
    region = here.register(gpu.array(bytes_))
    with owner() as other:
        for remote in other.remotes:
            here.submit_write(region, remote).wait(WAIT_S)
        renewed = xr.RegionDescriptor.from_bytes(bytes.fromhex(other.ask("revoke", 0)))
        with pytest.raises(xr.TransferError, match="revoked"):
            here.submit_write(region, other.remotes[0]).wait(WAIT_S)
        here.submit_write(region, renewed, imm=1).wait(WAIT_S)
        assert other.ask("sum", 0) == crc(bytes_)
        for number in (0, 1):
            assert other.ask("close", number) == "closed"
        with pytest.raises(xr.TransferError, match="closed"):
            here.submit_write(region, other.remotes[1]).wait(WAIT_S)
        assert gpu.imports == 0


def test_an_owner_that_dies_takes_its_mappings_along(gpu: FakeGpu, open_engine: EngineFactory, seed: Seed) -> None:
    here = open_engine(transport="shm")
    region = here.register(gpu.array(noise(seed)))
    with owner() as other:
        here.submit_write(region, other.remotes[0]).wait(WAIT_S)
        assert gpu.imports == 1
        other.script.kill()
        with pytest.raises(xr.PeerLost):
            write_for_ever(here, region, other.remotes[0])
        eventually(lambda: gpu.imports == 0, "its mappings are gone")

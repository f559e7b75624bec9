"""Memory of a true GPU by CUDA's virtual memory management: engine.alloc(device=), engine.map(device=), torch's
expandable segments; in a process and between two.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

import crossrail as xr
from tests.conftest import EngineFactory
from tests.support.limits import WAIT_S, eventually

resource_tracker.ensure_running()  # it keeps a descriptor, from the first spawn on

pytestmark = [pytest.mark.hw, pytest.mark.timeout(180)]

BYTES = (16 << 20) + 12_345
PAGE_BYTES = 4096
START_S = 60.0  # of a process that imports torch
SECOND = 1_500_000_000  # cycles of torch.cuda._sleep, a second or less


def noise(nbytes: int) -> Any:
    made = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device="cuda:0")
    torch.cuda.synchronize()
    return made


def tensor_of(memory: Any) -> Any:
    return torch.as_tensor(memory, device="cuda:0")


def free_bytes() -> int:
    """On the whole GPU: such tests have it to themselves."""
    gc.collect()
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info()[0])


def fds() -> int:
    return len(os.listdir("/proc/self/fd"))


# --- in one process


def test_memory_is_a_tensor_zero_and_given_back_with_its_last_use(open_engine: EngineFactory) -> None:
    engine = open_engine()
    free = free_bytes()  # the driver keeps some for good, of kernels that it loads: less than half of ours
    for _ in range(2):  # what the first left there is not seen by the second
        region = engine.alloc(BYTES, device="cuda:0")
        tensor = region.tensor()
        assert tensor.data_ptr() == region.base and tensor.shape == (BYTES,) and tensor.dtype == torch.uint8
        assert int(tensor.sum(dtype=torch.int64)) == 0
        tensor.fill_(3)
        region.close()
        del region
        assert int(tensor.sum(dtype=torch.int64)) == 3 * BYTES
        assert free_bytes() <= free - BYTES
        del tensor
        eventually(lambda: free_bytes() > free - BYTES // 2, "the memory is given back")


def test_what_kernels_use_is_kept_for_them(open_engine: EngineFactory) -> None:
    engine = open_engine()
    side, done, seen = torch.cuda.Stream(), torch.cuda.Event(), torch.zeros(1, dtype=torch.int64, device="cuda:0")

    def work(tensor: Any, cycles: int) -> None:
        with torch.cuda.stream(side):
            torch.cuda._sleep(cycles)
            tensor.add_(1)
            seen.copy_(tensor.sum(dtype=torch.int64))
            done.record()

    work(noise(BYTES), 1)  # torch's streams and the kernels are there from now on: loading one waits for those that run
    torch.cuda.synchronize()
    free = free_bytes()
    region = engine.alloc(BYTES, device="cuda:0")
    tensor = tensor_of(region)
    work(tensor, 2 * SECOND)
    begin = time.monotonic()
    del tensor
    region.close()
    del region
    gc.collect()
    assert time.monotonic() - begin < 0.5 and not done.query()  # who drops it does not wait
    side.synchronize()
    assert int(seen) == BYTES
    eventually(lambda: free_bytes() > free - BYTES // 2, "the memory is given back")


def test_alloc_waits_for_no_kernel(open_engine: EngineFactory) -> None:
    engine = open_engine()
    engine.alloc(1, device="cuda:0").close()
    done = torch.cuda.Event()
    torch.cuda.synchronize()
    torch.cuda._sleep(3 * SECOND)
    done.record()
    begin = time.monotonic()
    region = engine.alloc(BYTES, device="cuda:0")
    assert time.monotonic() - begin < 1 and not done.query()
    begin = time.monotonic()
    region.close()
    del region
    gc.collect()
    print(f"unmapping took {time.monotonic() - begin:.3f} s while a kernel ran, which has ended: {done.query()}")
    torch.cuda.synchronize()


def test_while_a_graph_is_captured(open_engine: EngineFactory) -> None:
    here, there = open_engine("here", transport="shm"), open_engine("there", transport="shm")
    other = torch.zeros(100, device="cuda:0")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        other += 1
        region = there.alloc(BYTES, device="cuda:0")
        mapped = here.map(region.descriptor, WAIT_S, device="cuda:0")
        other += 1
    graph.replay()
    torch.cuda.synchronize()
    assert float(other.sum()) == 200
    assert tensor_of(mapped).data_ptr() == region.base
    region.close()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_engines_of_one_process(open_engine: EngineFactory, transport: str) -> None:
    options = {"transport": transport} | ({"rails": ["127.0.0.1"]} if transport == "tcp" else {})
    here, there = open_engine("here", **options), open_engine("there", **options)
    ours, theirs = here.alloc(BYTES, device="cuda:0"), there.alloc(BYTES, device="cuda:0")
    tensor_of(ours).copy_(noise(BYTES))
    torch.cuda.synchronize()
    here.submit_write(ours, theirs.descriptor, imm=1).wait(WAIT_S)
    there.imm_counter(1).wait(1, WAIT_S)
    assert torch.equal(tensor_of(theirs), tensor_of(ours))
    for region in (ours, theirs):
        region.close()


# --- between processes


def _serve(pipe: Connection, kind: str) -> None:
    """Owns `kind` of memory: "alloc", or so many bytes of torch's, and does what it is told."""
    with xr.Engine("child", transport="shm") as engine:
        region: Any = None
        tensor: Any
        if kind == "alloc":
            region = engine.alloc(BYTES, device="cuda:0")
            tensor = tensor_of(region)
        else:
            before = torch.zeros(
                3 << 20, dtype=torch.uint8, device="cuda:0"
            )  # so that it begins somewhere in a segment
            tensor = torch.zeros(int(kind), dtype=torch.uint8, device="cuda:0")
            torch.cuda.synchronize()
            region = engine.register(tensor)
            del before
        pipe.send(region.descriptor.to_bytes())
        answers: dict[str, Callable[[int], object]] = {
            "count": lambda number: engine.imm_counter(number).wait(1, WAIT_S),
            "bytes": lambda _: tensor.cpu().numpy().tobytes(),
            "fill": lambda number: (tensor.fill_(number), torch.cuda.synchronize(), None)[-1],
            "fds": lambda _: fds(),
        }
        while True:
            word, number = pipe.recv()
            if word == "end":
                break
            if word == "free":
                region.close()
                del region, tensor
                gc.collect()
                torch.cuda.empty_cache()
                pipe.send(None)
            else:
                pipe.send(answers[word](number))


class Child:
    def __init__(self, pipe: Connection, process: Any) -> None:
        self.pipe, self.process = pipe, process
        self.remote = xr.RegionDescriptor.from_bytes(self._answer(START_S))

    def _answer(self, timeout_s: float) -> Any:
        assert self.pipe.poll(timeout_s), "the child does not answer"
        return self.pipe.recv()

    def ask(self, word: str, number: int = 0) -> Any:
        self.pipe.send((word, number))
        return self._answer(2 * WAIT_S)

    def tensor(self) -> Any:
        return torch.frombuffer(bytearray(self.ask("bytes")), dtype=torch.uint8)


@contextmanager
def child_with(kind: str) -> Iterator[Child]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, kind), daemon=True)
    process.start()
    theirs.close()
    try:
        yield Child(ours, process)
        if process.is_alive():
            ours.send(("end", 0))
            process.join(WAIT_S)
            assert process.exitcode == 0
    finally:
        process.kill()
        process.join()
        ours.close()


def paths_of(engine: xr.Engine, remote: xr.RegionDescriptor) -> dict[str, str]:
    return {path.path: path.reason for path in engine.explain(remote.owner).paths}


def write_for_ever(engine: xr.Engine, region: xr.Region, remote: xr.RegionDescriptor) -> None:
    for _ in range(1000):
        engine.submit_write(region, remote).wait(WAIT_S)
        time.sleep(0.01)


def test_writes_pages_and_reads(open_engine: EngineFactory) -> None:
    here = open_engine("here", transport="shm")
    with child_with("alloc") as child:
        region, src = here.alloc(BYTES, device="cuda:0"), noise(BYTES)
        tensor_of(region).copy_(src)
        torch.cuda.synchronize()
        here.submit_write(region, child.remote, imm=1).wait(WAIT_S)
        child.ask("count", 1)
        assert torch.equal(child.tensor(), src.cpu())
        assert set(paths_of(here, child.remote)) == {"cuda-vmm"}

        pages = torch.randperm(BYTES // PAGE_BYTES)
        order = torch.arange(len(pages))
        here.submit_paged_writes(region, order.numpy(), child.remote, pages.numpy(), PAGE_BYTES, imm=2).wait(WAIT_S)
        seen = child.tensor()[: len(pages) * PAGE_BYTES].view(-1, PAGE_BYTES)
        assert torch.equal(seen[pages], src.cpu()[: len(pages) * PAGE_BYTES].view(-1, PAGE_BYTES))

        back, host = noise(BYTES), torch.zeros(BYTES, dtype=torch.uint8)
        for target in (back, host):
            here.submit_read(here.register(target), child.remote).wait(WAIT_S)
            assert torch.equal(target.cpu(), child.tensor())
        host.random_(0, 256)
        here.submit_write(here.register(host), child.remote, imm=3).wait(WAIT_S)
        child.ask("count", 3)
        assert torch.equal(child.tensor(), host)


def test_kernels_on_a_peers_memory(open_engine: EngineFactory) -> None:
    here = open_engine("here", transport="shm")
    with child_with("alloc") as child:
        mapping = here.map(child.remote, WAIT_S, device="cuda:0")
        mapped = torch.from_dlpack(mapping)
        assert (mapped.data_ptr(), mapped.device) == (tensor_of(mapping).data_ptr(), torch.device("cuda:0"))
        del mapping
        child.ask("fill", 6)
        mapped.add_(1)
        torch.cuda.synchronize()
        assert torch.equal(child.tensor(), torch.full((BYTES,), 7, dtype=torch.uint8))
        child.ask("fill", 100)
        assert int(mapped.sum(dtype=torch.int64)) == 100 * BYTES

        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            mapped.add_(1)
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        assert int(child.tensor().sum(dtype=torch.int64)) == 103 * BYTES


@pytest.mark.parametrize("end", ["free", "kill"])
def test_a_mapping_outlives_its_owner(open_engine: EngineFactory, end: str) -> None:
    here = open_engine("here", transport="shm")
    with child_with("alloc") as child:
        source = here.register(noise(BYTES))
        here.submit_write(source, child.remote).wait(WAIT_S)  # the engine has it mapped, too
        mapped = tensor_of(here.map(child.remote, WAIT_S, device="cuda:0"))
        child.ask("fill", 9)
        if end == "free":
            child.ask("free")
        else:
            child.process.kill()
            child.process.join()
        more = torch.full((BYTES,), 1, dtype=torch.uint8, device="cuda:0")  # where it might have been
        assert int(mapped.sum(dtype=torch.int64)) == 9 * BYTES
        mapped.add_(more)
        assert int(mapped.sum(dtype=torch.int64)) == 10 * BYTES
        with pytest.raises(xr.TransferError):
            write_for_ever(here, source, child.remote)


def test_mappings_leave_nothing_behind(open_engine: EngineFactory) -> None:
    here = open_engine("here", transport="shm")
    with child_with("alloc") as child:
        child.ask("fill", 2)

        def some() -> None:
            for _ in range(10):
                mapped = tensor_of(here.map(child.remote, WAIT_S, device="cuda:0"))
                assert int(mapped[:100].sum(dtype=torch.int64)) == 200

        some()
        gc.collect()
        time.sleep(1)
        before = fds(), child.ask("fds")
        some()
        eventually(lambda: fds() <= before[0] and child.ask("fds") <= before[1], "no descriptor is left")


@pytest.mark.parametrize("nbytes", [4096, 1 << 20, 9 << 20, 64 << 20])
def test_expandable_segments(open_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    """By whichever way torch's version and the length allow, and never wrong."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    here = open_engine("here", transport="shm")
    with child_with(str(nbytes)) as child:
        src = noise(nbytes)
        region = here.register(src)
        here.submit_write(region, child.remote, imm=1).wait(WAIT_S)
        child.ask("count", 1)
        assert torch.equal(child.tensor(), src.cpu())
        child.ask("fill", 5)
        here.submit_read(region, child.remote).wait(WAIT_S)
        assert int(src.sum(dtype=torch.int64)) == 5 * nbytes
        ((path, reason),) = paths_of(here, child.remote).items()
        print(f"{nbytes} bytes of an expandable segment: {path}, {reason}")
        assert path in ("cuda-vmm", "staged")
        if path == "staged":
            with pytest.raises(xr.UsageError, match=r"engine\.alloc"):
                here.map(child.remote, WAIT_S, device="cuda:0")
            return
        mapped = tensor_of(here.map(child.remote, WAIT_S, device="cuda:0"))
        mapped.add_(1)
        torch.cuda.synchronize()
        assert int(child.tensor().sum(dtype=torch.int64)) == 6 * nbytes
        child.ask("free")
        assert int(mapped.sum(dtype=torch.int64)) == 6 * nbytes

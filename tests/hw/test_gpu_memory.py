"""Memory of a true GPU over shm and tcp, in a process and between two: where /dev/nvidiactl is, and torch with CUDA."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

import crossrail as xr
from tests.conftest import EngineFactory
from tests.support.limits import WAIT_S

resource_tracker.ensure_running()  # it keeps a descriptor, from the first spawn on

pytestmark = [pytest.mark.hw, pytest.mark.timeout(180)]

BYTES = 16 << 20
PAGE_BYTES = 4096


@pytest.fixture(params=["shm", "tcp"])
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"transport": "shm"} if request.param == "shm" else {"transport": "tcp", "rails": ["127.0.0.1"] * 2}


def noise(nbytes: int, device: str) -> Any:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=device)


@pytest.mark.parametrize(("source", "target"), [("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")])
def test_writes_pages_and_reads(open_engine: EngineFactory, options: dict[str, Any], source: str, target: str) -> None:
    here, there = open_engine("here", **options), open_engine("there", **options)
    src, dst, back = noise(BYTES, source), noise(BYTES, target), noise(BYTES, source)
    torch.cuda.synchronize()
    ours, theirs, again = here.register(src), there.register(dst), here.register(back)

    for nbytes in (1, 4097, BYTES):
        here.submit_write(ours, theirs.descriptor, length=nbytes, imm=1)
        there.imm_counter(1).wait(1, WAIT_S)
        assert torch.equal(dst[:nbytes].cpu(), src[:nbytes].cpu())

    pages = torch.randperm(BYTES // PAGE_BYTES).numpy()
    order = torch.arange(len(pages)).numpy()
    here.submit_paged_writes(ours, order, theirs.descriptor, pages, PAGE_BYTES, imm=2)
    there.imm_counter(2).wait(len(pages), WAIT_S)
    assert torch.equal(dst.view(-1, PAGE_BYTES)[torch.from_numpy(pages)].cpu(), src.view(-1, PAGE_BYTES).cpu())

    here.submit_read(again, theirs.descriptor).wait(WAIT_S)
    assert torch.equal(back.cpu(), dst.cpu())

    for page, apart, offset in ((1, 64, 0), (1000, 1008, 16), (333, 1024, 5), (40_000, 65_536, 0), (3000, 3001, 1)):
        count = (BYTES - offset) // apart
        wanted, numbers = dst.clone(), torch.randperm(count)
        torch.cuda.synchronize()
        dst_rows = torch.as_strided(wanted, (count, page), (apart, 1), offset)
        dst_rows[numbers.to(target)] = torch.as_strided(src, (count, page), (apart, 1), offset).to(target)
        here.submit_paged_writes(
            ours, torch.arange(count).numpy(), theirs.descriptor, numbers.numpy(), page, src_stride=apart,
            dst_stride=apart, src_offset=offset, dst_offset=offset, imm=3,
        )  # fmt: skip
        there.imm_counter(3).wait(count, WAIT_S)
        assert torch.equal(dst.cpu(), wanted.cpu())


def test_what_was_counted_is_seen_by_the_next_kernel(open_engine: EngineFactory, options: dict[str, Any]) -> None:
    here, there = open_engine("here", **options), open_engine("there", **options)
    src, dst = torch.zeros(1 << 18, device="cuda"), torch.zeros(1 << 18, device="cuda")
    torch.cuda.synchronize()
    ours, theirs = here.register(src), there.register(dst)

    for round_ in range(1, 51):
        src.fill_(round_)
        torch.cuda.synchronize()
        here.submit_write(ours, theirs.descriptor, imm=1).wait(WAIT_S)
        there.imm_counter(1).wait(1, WAIT_S)
        assert float((dst + 0).sum()) == round_ * len(dst)


def test_while_a_graph_is_captured(open_engine: EngineFactory, options: dict[str, Any]) -> None:
    here, there = open_engine("here", **options), open_engine("there", **options)
    src, dst, other = noise(BYTES, "cuda"), noise(BYTES, "cuda"), torch.zeros(100, device="cuda")
    torch.cuda.synchronize()
    ours, theirs = here.register(src), there.register(dst)
    graph = torch.cuda.CUDAGraph()

    with torch.cuda.graph(graph):
        other += 1
        here.submit_write(ours, theirs.descriptor, imm=1)
        there.imm_counter(1).wait(1, WAIT_S)
        other += 1
    graph.replay()

    torch.cuda.synchronize()
    assert torch.equal(dst, src) and float(other.sum()) == 200


def _hold(pipe: Connection, options: dict[str, Any]) -> None:
    memory = torch.zeros(BYTES, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    with xr.Engine("child", **options) as engine:
        region = engine.register(memory)
        pipe.send(region.descriptor.to_bytes())
        for _ in range(3):
            engine.imm_counter(1).wait(1, WAIT_S)
            pipe.send(int(memory.sum(dtype=torch.int64)))
        pipe.recv()


@pytest.fixture
def child(options: dict[str, Any]) -> Iterator[Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_hold, args=(theirs, options), daemon=True)
    process.start()
    yield ours
    ours.send(None)
    process.join(WAIT_S)
    assert process.exitcode == 0


def test_between_processes(open_engine: EngineFactory, options: dict[str, Any], child: Connection) -> None:
    here = open_engine("here", **options)
    assert child.poll(60)
    theirs = xr.RegionDescriptor.from_bytes(child.recv())
    src = noise(BYTES, "cuda")
    region = here.register(src)
    for value in (3, 250, 7):
        src.fill_(value)
        torch.cuda.synchronize()
        here.submit_write(region, theirs, imm=1).wait(WAIT_S)
        assert child.poll(WAIT_S) and child.recv() == value * BYTES
    paths = {path.path for path in here.explain(theirs.owner).paths}
    assert ("cuda-ipc" in paths) == (options["transport"] == "shm")


def test_a_peer_is_met_while_a_graph_is_captured(
    open_engine: EngineFactory, options: dict[str, Any], child: Connection
) -> None:
    """What registers memory, maps the peer's and lets it go is none of the graph's, and does not break it."""
    here = open_engine("here", **options)
    assert child.poll(60)
    theirs = xr.RegionDescriptor.from_bytes(child.recv())
    src, other = noise(BYTES, "cuda"), torch.zeros(100, device="cuda")
    wanted = int(src.sum(dtype=torch.int64))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        other += 1
        region = here.register(src)
        for _ in range(3):
            here.submit_write(region, theirs, imm=1).wait(WAIT_S)
        region.close()
        other += 1
    graph.replay()
    torch.cuda.synchronize()
    assert float(other.sum()) == 200
    for _ in range(3):
        assert child.poll(WAIT_S) and child.recv() == wanted

"""Examples of the documents that take a GPU: the double of the driver, which no wheel has."""

from __future__ import annotations

import re
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

import crossrail as xr
from tests.documentation.blocks import blocks
from tests.support.fake_gpu import FakeGpu
from tests.support.gpu_stream import Stream
from tests.support.limits import WAIT_S, eventually


def test_memory_of_a_gpu(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With the transport that the block names for machines without such NICs."""

    def empty(nbytes: int, *, dtype: str, device: str) -> Any:
        assert (dtype, device) == ("uint8", "cuda:0")
        return gpu.allocate(nbytes)

    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(Tensor=(), empty=empty, uint8="uint8"))
    text = blocks()["docs/gpu-memory.md"][0]
    named = 'transport="verbs", '
    assert named in text and 'without such NICs, and within a host: "auto"' in text
    names: dict[str, Any] = {}
    exec(text.replace(named, 'transport="auto", '), names)
    with names["engine"]:
        region, gpudirect = capsys.readouterr().out.splitlines()
    assert f"print(pool)  # {re.sub('at 0x[0-9a-f]+', 'at 0x7f...', region)}\n" in text
    assert gpudirect == "no: no NIC reads or writes it"


def test_memory_for_kernels_of_other_processes(gpu: FakeGpu) -> None:
    class Tensor:
        def __init__(self, given: Any, device: str) -> None:
            self.bytes, self.device = gpu.memory_of(given).bytes, device

        def add_(self, value: int) -> None:
            self.bytes += value

    allocates, maps = blocks()["docs/gpu-memory.md"][1].split("\n\n")
    torch = SimpleNamespace(as_tensor=Tensor, from_dlpack=lambda mapping: Tensor(mapping, device=mapping.device))
    with xr.Engine("owner") as owner, xr.Engine("here") as here:
        names: dict[str, Any] = {"engine": owner, "torch": torch}
        exec(allocates, names)
        exec(maps, {"engine": here, "torch": torch, "descriptor": names["region"].descriptor})
        assert set(names["pool"].bytes) == {1} and names["pool"].device == "cuda:0"
        del names


def test_kernels_that_wait_for_counts(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph is replayed by hand, since what it waits for arrives meanwhile."""
    stream, steps = Stream(gpu), []

    class Captures:
        def __init__(self, graph: Any) -> None:
            self.graph = graph

        def __enter__(self) -> None:
            stream.begin_capture()

        def __exit__(self, *_: object) -> None:
            self.graph.replay = partial(stream.end_capture().replay, stream)

    cuda = SimpleNamespace(graph=Captures, synchronize=stream.run, current_stream=lambda: stream)
    torch = SimpleNamespace(cuda=cuda)
    monkeypatch.setitem(sys.modules, "torch", torch)
    text = next(block for block in blocks()["docs/gpu-memory.md"] if "raise_flag" in block)
    with xr.Engine("here", transport="shm") as engine:
        region = engine.alloc(4096)
        for _ in range(32):
            engine.submit_write(region, region.descriptor, 64, imm=7).wait(WAIT_S)
        names = {
            "engine": engine,
            "torch": torch,
            "graph": SimpleNamespace(),
            "kv": "kv",
            "step": lambda kv: stream.launch(steps.append, kv),
        }
        eventually(lambda: engine.imm_counter(7).poll() == 32, "32 counts")
        exec(text, names)
        assert steps == ["kv"]
        assert (names["flag"].given, names["flag"].taken) == (32, 32)
        del names

"""Watched words that kernels add to, by the double of NVIDIA's driver and streams that a test runs by hand."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

import crossrail as xr
from crossrail import sim
from tests.conftest import EngineFactory
from tests.engine.test_watchers import Changes, assert_a_chain_to
from tests.support.fake_gpu import FakeGpu
from tests.support.gpu_stream import Stream
from tests.support.limits import eventually, never


@pytest.fixture
def engine(gpu: FakeGpu, open_engine: EngineFactory) -> xr.Engine:
    return open_engine("here", transport="shm")


def test_the_word_goes_up_when_the_kernel_runs(gpu: FakeGpu, engine: xr.Engine) -> None:
    changes, stream, done = Changes(), Stream(gpu), []
    watcher = engine.alloc_watcher(changes)

    stream.launch(done.append, "before")
    watcher.add_on(stream, 5)
    stream.launch(done.append, "after")
    stream.run(1)
    never(lambda: changes or watcher.value, "an addition before its kernel")
    stream.run(1)

    eventually(lambda: changes == [(0, 5)], "the kernel's addition")
    assert done == ["before"]
    stream.run()
    assert (done, watcher.value) == (["before", "after"], 5)


def test_a_captured_addition_happens_at_each_replay(gpu: FakeGpu, engine: xr.Engine) -> None:
    """Also the first of an engine, which pins and loads."""
    changes, stream = Changes(), Stream(gpu)
    watcher, other = engine.alloc_watcher(changes), engine.alloc_watcher(Changes())
    stream.begin_capture()
    for _ in range(3):
        watcher.add_on(stream)
    graph = stream.end_capture()
    stream.run()
    assert watcher.value == 0

    for replay in (1, 2):
        graph.replay(stream)
        stream.run()
        eventually(lambda n=replay: changes and changes[-1][1] == 3 * n, "the replayed additions")

    assert_a_chain_to(changes, 6)
    assert other.value == 0


def test_streams_of_two_gpus(gpu: FakeGpu, engine: xr.Engine) -> None:
    streams = [Stream(gpu, 0), Stream(gpu, 1)]
    watchers = [engine.alloc_watcher(Changes()) for _ in streams]
    for delta, (watcher, stream) in enumerate(zip(watchers, streams, strict=True), 1):
        watcher.add_on(stream, delta)
    streams[1].run()
    assert [watcher.value for watcher in watchers] == [0, 2]
    streams[0].run()
    assert [watcher.value for watcher in watchers] == [1, 2]


def test_what_names_a_stream(gpu: FakeGpu, engine: xr.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    stream, watcher = Stream(gpu, 1), engine.alloc_watcher(Changes())
    handle = stream.cuda_stream
    cuda = SimpleNamespace(current_stream=lambda: SimpleNamespace(cuda_stream=handle, device_index=1))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))

    watcher.add_on(handle, 1)
    watcher.add_on(SimpleNamespace(cuda_stream=handle), 10)
    watcher.add_on(SimpleNamespace(__cuda_stream__=lambda: (0, handle)), 100)
    watcher.add_on(SimpleNamespace(__cuda_stream__=(0, handle)), 1000)
    watcher.add_on(None, 10_000)
    watcher.add_on(delta=100_000)

    stream.run()
    assert watcher.value == 111_111


@pytest.mark.parametrize(
    ("stream", "says"),
    [
        ("cuda:0", "torch.cuda.Stream"),
        (True, "torch.cuda.Stream"),
        (-1, "torch.cuda.Stream"),
        (1 << 64, "torch.cuda.Stream"),
        (SimpleNamespace(cuda_stream="0"), "torch.cuda.Stream"),
        (SimpleNamespace(__cuda_stream__=(1, 7)), r"gives \(1, 7\)"),
        (SimpleNamespace(__cuda_stream__=7), "gives 7"),
        (SimpleNamespace(cuda_stream=0, device_index=5), "GPU 5, and this process sees 2"),
    ],
    ids=str,
)
def test_no_stream_of_a_gpu_here_is_refused(gpu: FakeGpu, engine: xr.Engine, stream: object, says: str) -> None:
    with pytest.raises(xr.UsageError, match=says):
        engine.alloc_watcher(Changes()).add_on(stream)


def test_without_torch_none_is_refused(engine: xr.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    with pytest.raises(xr.UsageError, match="import torch"):
        engine.alloc_watcher(Changes()).add_on()


@pytest.mark.parametrize("delta", [-1, 1 << 64, 1.5, None])
def test_no_64_bit_delta_is_refused(gpu: FakeGpu, engine: xr.Engine, delta: Any) -> None:
    with pytest.raises((xr.UsageError, OverflowError)):
        engine.alloc_watcher(Changes()).add_on(Stream(gpu), delta)


@pytest.mark.parametrize(
    ("refuses", "says"),
    [
        ({"pin": 2}, r"cuMemHostRegister: .*CUDA error 2.*ulimit -l"),
        ({"launch": 700}, r"cuLaunchKernel: .*CUDA error 700"),
    ],
    ids=str,
)
def test_what_the_driver_refuses(gpu: FakeGpu, engine: xr.Engine, refuses: dict[str, int], says: str) -> None:
    gpu.refuse_kernels(**refuses)
    stream, watcher = Stream(gpu), engine.alloc_watcher(Changes())
    with pytest.raises(xr.TransportError, match=says):
        watcher.add_on(stream)
    gpu.refuse_kernels()
    watcher.add_on(stream)
    stream.run()
    assert watcher.value == 1


def test_a_closed_watcher_and_engine_leave_the_word(gpu: FakeGpu, engine: xr.Engine) -> None:
    """A graph may be replayed after them, as long as the object lives."""
    changes, stream = Changes(), Stream(gpu)
    watcher = engine.alloc_watcher(changes)
    stream.begin_capture()
    watcher.add_on(stream)
    graph = stream.end_capture()
    watcher.close()
    engine.close()
    graph.replay(stream)
    stream.run()
    never(lambda: changes, "a change of a closed watcher")


def test_a_simulated_engine_refuses() -> None:
    with (
        sim.World(seed=1) as world,
        world.host("h").engine("here") as engine,
        pytest.raises(xr.UsageError, match="real time"),
    ):
        engine.alloc_watcher(Changes()).add_on(7)

"""Kernels that wait for counts, by the double of NVIDIA's driver and streams that a test runs by hand."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np
import pytest

from crossrail import sim
from crossrail.errors import EngineClosed, TransportError, UsageError, WaitTimeout
from tests.conftest import EngineFactory
from tests.support.fake_gpu import FakeGpu
from tests.support.gpu_stream import Stream
from tests.support.limits import WAIT_S, eventually

ENDED = 1 << 63


class Pair:
    """A writer, and an owner whose counter of immediate 7 has a flag."""

    def __init__(self, open_engine: EngineFactory) -> None:
        self.writer, self.owner = open_engine("writer", transport="shm"), open_engine("owner", transport="shm")
        self.source = self.writer.register(np.arange(4096, dtype=np.uint8))
        self.memory = np.zeros(4096, np.uint8)
        self.target = self.owner.register(self.memory)
        self.counter = self.owner.imm_counter(7)
        self.flag = self.counter.raise_flag()

    def write(self, times: int = 1, nbytes: int = 64) -> None:
        for _ in range(times):
            self.writer.submit_write(self.source, self.target.descriptor, nbytes, imm=7).wait(WAIT_S)

    def given(self, count: int) -> None:
        eventually(lambda: self.flag.given == count, f"{count} counts at the flag")


@pytest.fixture
def pair(gpu: FakeGpu, open_engine: EngineFactory) -> Pair:
    return Pair(open_engine)


def test_what_follows_a_wait_runs_once_its_counts_are_there(gpu: FakeGpu, pair: Pair) -> None:
    stream, seen = Stream(gpu), []
    pair.flag.wait_on(stream, 3)
    stream.launch(lambda: seen.append(bytes(pair.memory[:4])))
    pair.write(2)
    pair.given(2)
    stream.run()
    assert (seen, pair.flag.taken) == ([], 0)

    pair.write()
    pair.given(3)
    stream.run()

    assert (seen, pair.flag.taken) == ([bytes(range(4))], 3)
    pair.flag.check()
    assert pair.counter.poll() == 0


def test_each_replay_of_a_graph_takes_counts_of_its_own(gpu: FakeGpu, pair: Pair) -> None:
    stream, steps = Stream(gpu), []
    stream.begin_capture()
    pair.flag.wait_on(stream, 2)
    stream.launch(steps.append, "step")
    graph = stream.end_capture()
    for _ in range(3):
        graph.replay(stream)
    pair.write(5)
    pair.given(5)
    stream.run()
    assert (len(steps), pair.flag.taken) == (2, 4)  # the third wants one more
    pair.write()
    pair.given(6)
    stream.run()
    assert (len(steps), pair.flag.taken) == (3, 6)


def test_what_is_there_and_what_was_waited_for_before(gpu: FakeGpu, open_engine: EngineFactory) -> None:
    """Counts that came before the flag are its own; a wait that queued before is served first."""
    pair = Pair(open_engine)
    pair.flag.close()
    pair.write(3)
    eventually(lambda: pair.counter.poll() == 3, "three counts")
    served = threading.Event()
    pair.counter.on_count(4, served.set)

    with pair.counter.raise_flag() as flag:
        assert flag.given == 0
        pair.write(3)
        assert served.wait(WAIT_S)
        eventually(lambda: flag.given == 2, "what the wait left")
        with pytest.raises(WaitTimeout, match="0 of 1 arrived"):
            pair.counter.wait(1, 0)
    assert flag.closed
    pair.counter.wait(2, 0)  # nobody took them


def test_close_brings_back_what_no_kernel_took(gpu: FakeGpu, pair: Pair) -> None:
    stream = Stream(gpu)
    pair.write(5)
    pair.given(5)
    pair.flag.wait_on(stream, 2)
    stream.run()

    pair.flag.close()
    pair.flag.close()

    assert pair.counter.poll() == 3
    pair.write()
    pair.counter.wait(4, WAIT_S)
    assert pair.flag.given == 5


def test_what_went_back_to_the_counter_no_kernel_takes_any_more(gpu: FakeGpu, pair: Pair) -> None:
    """Neither one that was captured before nor one that is launched after the end: it would be there twice."""
    stream = Stream(gpu)
    stream.begin_capture()
    pair.flag.wait_on(stream, 2)
    graph = stream.end_capture()
    pair.write(5)
    pair.given(5)
    graph.replay(stream)
    stream.run()
    pair.flag.close()
    assert (pair.flag.taken, pair.counter.poll()) == (2, 3)

    for replayed in (True, False):
        if replayed:
            graph.replay(stream)
        else:
            pair.flag.wait_on(stream)
        stream.run()
        with pytest.raises(UsageError, match=f"a kernel waited for {2 if replayed else 1} counts; it took none"):
            pair.flag.check()

    assert (pair.flag.given, pair.flag.taken) == (5, 2)
    pair.counter.wait(3, 0)


def test_one_flag_at_a_time_and_the_number_stays(pair: Pair) -> None:
    with pytest.raises(UsageError, match="immediate 7 has a flag already"):
        pair.counter.raise_flag()
    with pytest.raises(UsageError, match="a flag is raised for it"):
        pair.counter.release()
    pair.flag.close()
    pair.counter.raise_flag().close()
    pair.counter.release()
    with pytest.raises(EngineClosed):
        pair.counter.raise_flag()


def test_a_flag_that_is_collected_is_closed(pair: Pair) -> None:
    pair.write(2)
    pair.given(2)
    del pair.flag
    eventually(lambda: pair.counter.poll() == 2, "its counts")


def test_a_wait_that_is_late_says_so_and_those_behind_it_do_not_wait(gpu: FakeGpu, pair: Pair) -> None:
    stream, steps = Stream(gpu), []
    pair.write()
    pair.given(1)
    pair.flag.wait_on(stream, 3, timeout_s=0)
    stream.launch(steps.append, 1)
    pair.flag.wait_on(stream, 9)
    stream.launch(steps.append, 2)
    stream.run()
    assert steps == [1, 2]

    with pytest.raises(WaitTimeout, match="immediate 7: a kernel waited for 3 counts and took none") as late:
        pair.flag.check()
    assert (late.value.arrived, late.value.expected) == (1, 3)
    pair.flag.check()  # told once

    pair.flag.wait_on(stream)
    stream.run()
    assert pair.flag.taken == 1


@pytest.mark.parametrize("ending", ["engine", "flag"])
def test_a_kernel_that_waits_ends_with(gpu: FakeGpu, pair: Pair, ending: str) -> None:
    stream, steps = Stream(gpu), []
    pair.flag.wait_on(stream, 2)
    stream.launch(steps.append, 1)
    stream.run()
    assert not steps

    (pair.owner if ending == "engine" else pair.flag).close()
    stream.run()

    assert steps == [1]
    assert pair.flag.closed
    with pytest.raises(EngineClosed if ending == "engine" else UsageError, match="closed"):
        pair.flag.check()


def test_kernels_of_ones_own_find_the_word(gpu: FakeGpu, pair: Pair) -> None:
    pair.write(2)
    pair.given(2)
    assert pair.flag.address % 64 == 0
    assert ctypes.c_uint64.from_address(pair.flag.address).value == 2
    addresses = {pair.flag.address_on(ordinal) for ordinal in (0, 1)}
    assert len(addresses) == 1
    assert addresses != {pair.flag.address}  # GPUs of this double see the host's memory elsewhere
    with pytest.raises(UsageError, match="GPU 2, and this process sees 2"):
        pair.flag.address_on(2)
    pair.flag.close()
    assert ctypes.c_uint64.from_address(pair.flag.address).value == 2 | ENDED


def test_counts_of_writes_over_several_rails_are_whole(gpu: FakeGpu, open_engine: EngineFactory) -> None:
    writer, owner = (open_engine(name, transport="shm", rails=3) for name in ("writer", "owner"))
    target, source = owner.alloc(1 << 20), writer.alloc(1 << 20)
    flag = owner.imm_counter(7).raise_flag()
    for _ in range(20):
        writer.submit_write(source, target.descriptor, 1 << 20, imm=7).wait(WAIT_S)
    eventually(lambda: flag.given == 20, "20 counts")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"count": 0}, "count"),
        ({"count": -1}, "count"),
        ({"count": 1.5}, "count"),
        ({"timeout_s": None}, "holds its GPU up for ever"),
        ({"timeout_s": -1}, "timeout_s"),
        ({"timeout_s": float("nan")}, "timeout_s"),
        ({"stream": "cuda"}, "stream"),
    ],
)
def test_bad_waits_are_refused(gpu: FakeGpu, pair: Pair, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        pair.flag.wait_on(**({"stream": Stream(gpu)} | arguments))


def test_refused_launches_say_what_helps(gpu: FakeGpu, pair: Pair) -> None:
    stream = Stream(gpu)
    gpu.refuse_kernels(pin=2)
    with pytest.raises(TransportError, match="ulimit -l"):
        pair.flag.wait_on(stream)
    gpu.refuse_kernels(launch=700)
    with pytest.raises(TransportError, match="cuLaunchKernel"):
        pair.flag.wait_on(stream)


def test_simulated_engines_have_no_kernels() -> None:
    with sim.World(seed=1) as world:
        flag = world.host("host").engine().imm_counter(1).raise_flag()
        with pytest.raises(UsageError, match="simulated"):
            flag.wait_on(123)
        with pytest.raises(UsageError, match="simulated"):
            flag.address_on(0)

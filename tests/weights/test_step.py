"""A step alone: what it waits for, and that one that ends early knows of all that still touches its memory."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import numpy as np
import pytest

import crossrail as xr
from crossrail.weights.step.arena import Arena
from crossrail.weights.step.step import Places, Step
from crossrail.weights.step.task import Batch, Read, ReadyTask


class Reading:
    """A transfer that goes on for ever."""

    done = False
    is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class ClosingEngine:
    """Takes two reads, and then no more."""

    def __init__(self) -> None:
        self.reads: list[Reading] = []

    def submit_read(self, *_: Any, **__: Any) -> Reading:
        if len(self.reads) == 2:
            raise xr.EngineClosed("closed")
        self.reads.append(Reading())
        return self.reads[-1]


async def test_reads_that_were_submitted_before_one_was_refused_are_known() -> None:
    reads = tuple(Read(1, 0, 64 * number, 64 * number, 64) for number in range(3))
    task = ReadyTask("w", 0, None, 0, 256, reads, (), (), 0, 0)
    engine = ClosingEngine()
    places = Places(cast(Any, object()), [], {(1, 0): cast(Any, object())}, {}, 7)
    step = Step(cast(Any, engine), [task], [0], Arena(256), places, cast(Any, None))

    with pytest.raises(xr.EngineClosed):
        await step.run(1.0)

    assert step.pending == engine.reads
    assert all(read.is_cancelled for read in engine.reads)


class Write:
    def __init__(self) -> None:
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def done(self) -> bool:
        return self._ended.done()

    def wait(self, _: float) -> None:
        assert self.done

    def cancel(self) -> None:
        pass

    def end(self) -> None:
        self._ended.set_result(None)

    def __await__(self) -> Generator[Any, None, None]:
        return asyncio.shield(self._ended).__await__()


class WritingEngine:
    def __init__(self) -> None:
        self.writes: list[Write] = []

    def submit_write(self, *_: Any, **__: Any) -> Write:
        self.writes.append(Write())
        return self.writes[-1]


class Alone:
    async def wait(self, _: float) -> None:
        return


class CountedStep(Step):
    waits = 0

    async def _something(self, event: asyncio.Future[None] | None) -> None:
        self.waits += 1
        await super()._something(event)


def writing_step(engine: WritingEngine, count: int) -> CountedStep:
    one = np.zeros(1, np.uint32)
    batch = Batch(0, 0, 64, 0, 1, one, 0, 1, one)
    tasks = [ReadyTask("w", 0, 0, 0, 0, (), (), (batch,), 1, 64)] * count
    places = Places(None, [cast(Any, object())], {}, {(0, 0): cast(Any, object())}, 7)
    return CountedStep(cast(Any, engine), tasks, [0], Arena(0), places, cast(Any, Alone()))


async def end_writes(engine: WritingEngine, count: int, are_these: Callable[[int], bool]) -> None:
    """One after the other, as they come."""
    for number in range(count):
        while number >= len(engine.writes):
            await asyncio.sleep(0)
        if are_these(number):
            engine.writes[number].end()
            for _ in range(5):  # time enough for the step to wake up
                await asyncio.sleep(0)


async def test_step_is_not_woken_for_each_write_that_ends() -> None:
    engine, count = WritingEngine(), 2000
    step = writing_step(engine, count)
    ending = asyncio.ensure_future(end_writes(engine, count, lambda _: True))
    report = await asyncio.wait_for(step.run(60.0), 60.0)
    await ending
    assert report.writes == count
    assert step.waits <= count / 16


async def test_writes_to_a_straggler_do_not_hold_up_the_others() -> None:
    engine, count = WritingEngine(), 900
    step = writing_step(engine, count)
    running = asyncio.ensure_future(step.run(60.0))
    await asyncio.wait_for(end_writes(engine, count, lambda number: number % 2 == 1), 60.0)
    for slow in engine.writes[::2]:
        slow.end()
    assert (await asyncio.wait_for(running, 60.0)).writes == count


class Stages:
    """A preparer that notes what begins and ends, and goes on with it only when it is let."""

    bytes_at_once = 1

    def __init__(self) -> None:
        self.notes: list[str] = []
        self._changed = threading.Condition()
        self._let: set[str] = set()

    def open(self, *_: Any) -> None:
        pass

    def load(self, tasks: Sequence[tuple[ReadyTask, int]]) -> None:
        self._hold("load", tasks)

    def prepare(self, tasks: Sequence[tuple[ReadyTask, int]]) -> None:
        self._hold("prepare", tasks)

    def _hold(self, stage: str, tasks: Sequence[tuple[ReadyTask, int]]) -> None:
        ((task, _),) = tasks
        what = f"{stage} {task.name}"
        with self._changed:
            self._note(what)
            assert self._changed.wait_for(lambda: what in self._let, 60.0)

    def _note(self, what: str) -> None:
        self.notes.append(what)
        self._changed.notify_all()

    def let(self, what: str) -> None:
        with self._changed:
            self._let.add(what)
            self._changed.notify_all()

    def has_come(self, what: str) -> bool:
        """Waits for it. Any thread."""
        with self._changed:
            return self._changed.wait_for(lambda: what in self.notes, 20.0)

    async def until(self, *notes: str) -> None:
        """These have begun, in any order, and nothing else."""
        deadline = time.monotonic() + 60.0
        while sorted(self.notes) != sorted(notes):
            assert len(self.notes) <= len(notes) and time.monotonic() < deadline, self.notes
            await asyncio.sleep(0.001)


def staged_step(
    stages: Stages, threads: Sequence[ThreadPoolExecutor], engine: WritingEngine, room: int, loads: bool = True
) -> Step:
    """Of three tasks, for `room` of which there is room at a time."""
    one = np.zeros(1, np.uint32)
    batch = Batch(0, 0, 64, 0, 1, one, 0, 1, one)
    load = cast(Any, [(0, None, None)] if loads else [])
    tasks = [ReadyTask(name, 0, None, 0, 256, (), (), (batch,), 1, 64, load) for name in "abc"]
    places = Places(cast(Any, object()), [], {}, {(0, 0): cast(Any, object())}, 7)
    return Step(
        cast(Any, engine), tasks, [0], Arena(room * 256), places, cast(Any, Alone()), threads[0], cast(Any, stages),
        loader=threads[1],
    )  # fmt: skip


async def test_next_task_is_loaded_while_one_is_prepared_and_another_is_written() -> None:
    stages, engine = Stages(), WritingEngine()
    with ThreadPoolExecutor(1) as converter, ThreadPoolExecutor(1) as loader:
        running = asyncio.ensure_future(staged_step(stages, [converter, loader], engine, 3).run(60.0))
        await stages.until("load a")
        stages.let("load a")
        await stages.until("load a", "prepare a", "load b")
        stages.let("prepare a")
        stages.let("load b")
        await stages.until("load a", "prepare a", "load b", "prepare b", "load c")
        assert len(engine.writes) == 1 and not running.done()
        for what in ("prepare b", "load c", "prepare c"):
            stages.let(what)
        while len(engine.writes) < 3:
            await asyncio.sleep(0.001)
        for write in engine.writes:
            write.end()
        report = await asyncio.wait_for(running, 60.0)
    assert report.tasks == 3 and report.load_s > 0 and report.peak_bytes == 3 * 256


async def test_task_is_loaded_only_when_there_is_room_for_it() -> None:
    stages, engine = Stages(), WritingEngine()
    with ThreadPoolExecutor(1) as converter, ThreadPoolExecutor(1) as loader:
        running = asyncio.ensure_future(staged_step(stages, [converter, loader], engine, 1).run(60.0))
        begun: list[str] = []
        for number, name in enumerate("abc"):
            for what in (f"load {name}", f"prepare {name}"):
                begun.append(what)
                await stages.until(*begun)
                stages.let(what)
            while len(engine.writes) <= number:
                await asyncio.sleep(0.001)
            assert stages.notes == begun
            engine.writes[number].end()
        report = await asyncio.wait_for(running, 60.0)
    assert report.peak_bytes == 256


async def test_step_that_ends_early_waits_for_what_is_being_loaded() -> None:
    stages, engine = Stages(), WritingEngine()
    with ThreadPoolExecutor(1) as converter, ThreadPoolExecutor(1) as loader:
        running = asyncio.ensure_future(staged_step(stages, [converter, loader], engine, 3).run(60.0))
        await stages.until("load a")
        running.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not running.done()
        stages.let("load a")
        await asyncio.wait([running], timeout=60.0)
    assert running.cancelled()
    assert stages.notes == ["load a"]


class CopyingEngine(WritingEngine):
    """Its submits copy, and so take their time: the first until something has begun meanwhile."""

    def __init__(self, meanwhile: Callable[[], bool]) -> None:
        super().__init__()
        self._meanwhile = meanwhile
        self.has_begun: bool | None = None

    def submit_write(self, *args: Any, **more: Any) -> Write:
        if self.has_begun is None:
            self.has_begun = self._meanwhile()
        super().submit_write(*args, **more).end()
        return self.writes[-1]


async def test_next_task_is_prepared_while_the_submits_of_one_copy() -> None:
    stages = Stages()
    engine = CopyingEngine(lambda: stages.has_come("prepare b"))
    for name in "abc":
        stages.let(f"prepare {name}")
    with ThreadPoolExecutor(1) as converter, ThreadPoolExecutor(1) as loader:
        report = await staged_step(stages, [converter, loader], engine, 3, loads=False).run(60.0)
    assert report.tasks == 3
    assert engine.has_begun

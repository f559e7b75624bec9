"""A step alone: what it waits for, and that one that ends early knows of all that still touches its memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
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

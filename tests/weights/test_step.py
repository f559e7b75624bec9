"""A step that ends early knows of all that still touches its memory."""

from __future__ import annotations

from typing import Any, cast

import pytest

import crossrail as xr
from crossrail.weights.step.arena import Arena
from crossrail.weights.step.step import Places, Step
from crossrail.weights.step.task import Read, ReadyTask


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

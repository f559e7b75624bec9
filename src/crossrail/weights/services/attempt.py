"""One update at an inference rank, from Open until it is committed or its writers are fenced off."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import crossrail as xr


@dataclass
class Attempt:
    """An update under way at this rank."""

    number: int
    version: int
    controller: bytes
    counter: xr.ImmCounter
    expected: int
    deadline_at_s: float  # on the loop's clock
    timer: asyncio.TimerHandle | None = None
    watching: asyncio.Task[None] | None = None  # its controller
    pausing: asyncio.Task[None] | None = None
    is_paused: bool = False  # its pause() has been called
    is_whole: bool = False
    is_failed: bool = False
    is_unwritten: bool = False  # and stays so: its controller has ended it before any trainer was to write
    unfenced: list[xr.Region] | None = None  # of a failed one: what its writers may still get into

    def note_paused(self) -> None:
        self.is_paused = True

    def end(self) -> None:
        """Nothing of it counts any more, and nobody waits for its deadline."""
        for each in (self.timer, self.watching):
            if each is not None:
                each.cancel()
        self.counter.release(force=True)

"""Decode steps of several requests, batched into one pass of the model."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from crossrail._options import check_counts
from crossrail.kv.foreign import exceptions_only

Work = TypeVar("Work")
Result = TypeVar("Result")


@dataclass(eq=False)
class _Step(Generic[Work, Result]):
    """over: set once nothing more is done for this step."""

    work: Work
    over: asyncio.Event = field(default_factory=asyncio.Event)
    result: Result | None = None
    error: BaseException | None = None


class Steps(Generic[Work, Result]):
    """Batches steps that wait at the same time, at most batch_max (1 or more) at once, first come first served.

    run: runs a batch; returns one result per step, or raises, which fails all of them. Threads: one event loop's. A
    caller that is cancelled while its step runs waits for the step's end, because it uses the caller's pages.
    """

    def __init__(self, run: Callable[[Sequence[Work]], Awaitable[Sequence[Result]]], batch_max: int) -> None:
        check_counts(1, batch_max=batch_max)
        self._run = run
        self._batch_max = batch_max
        self._waiting: list[_Step[Work, Result]] = []
        self._task: asyncio.Task[None] | None = None

    async def step(self, work: Work) -> Result:
        """The result, or the exception of the step's batch."""
        step: _Step[Work, Result] = _Step(work)
        self._waiting.append(step)
        if self._task is None:
            self._task = asyncio.create_task(self._work(), name="kv-steps")
        try:
            await step.over.wait()
        except asyncio.CancelledError:
            if step in self._waiting:
                self._waiting.remove(step)
            else:
                await until_over(step.over)
            raise
        if step.error is not None:
            raise step.error
        assert step.result is not None
        return step.result

    async def _work(self) -> None:
        try:
            while self._waiting:
                batch = self._waiting[: self._batch_max]
                del self._waiting[: self._batch_max]
                await self._run_batch(batch)
                # Let those who just got a token ask for the next one before the next batch is taken.
                await asyncio.sleep(0)
        finally:
            self._task = None

    async def _run_batch(self, batch: Sequence[_Step[Work, Result]]) -> None:
        try:
            with exceptions_only(awaits=True):
                results = await self._run([step.work for step in batch])
            for step, result in zip(batch, results, strict=True):
                step.result = result
        except BaseException as error:  # also a future of run's that was cancelled: others wait for steps
            for step in batch:
                step.error = error
            if isinstance(error, GeneratorExit | KeyboardInterrupt):
                raise
        finally:
            for step in batch:
                step.over.set()


async def until_over(event: asyncio.Event) -> None:
    """Waits for the event however often the task is cancelled meanwhile; raises the cancellation afterwards."""
    cancelled: asyncio.CancelledError | None = None
    while not event.is_set():
        try:
            await event.wait()
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled

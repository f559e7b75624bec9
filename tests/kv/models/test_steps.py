"""Decode steps that wait together run together."""

import asyncio
from collections.abc import Sequence

import pytest

import crossrail as xr
from crossrail.kv.models.steps import Steps
from tests.support.limits import WAIT_S


def test_batches_of_nothing_are_refused() -> None:
    with pytest.raises(xr.UsageError, match="batch_max is 0, must be 1 or more"):
        Steps(Recorder(), 0)


class Recorder:
    """Doubles numbers, once it may, and remembers which it was given at once."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.may = asyncio.Event()
        self.may.set()

    async def __call__(self, works: Sequence[int]) -> list[int]:
        self.batches.append(list(works))
        await self.may.wait()
        if 0 in works:
            raise ArithmeticError("zero")
        return [2 * work for work in works]


async def test_those_that_wait_run_together() -> None:
    run = Recorder()
    steps = Steps(run, batch_max=3)

    async def request(first: int, count: int) -> list[int]:
        return [await steps.step(first + index) for index in range(count)]

    results = await asyncio.gather(*(request(first, 3) for first in (10, 20, 30)))
    assert results == [[20, 22, 24], [40, 42, 44], [60, 62, 64]]
    assert run.batches == [[10, 20, 30], [11, 21, 31], [12, 22, 32]]


async def test_no_more_than_the_most_run_together() -> None:
    run = Recorder()
    steps = Steps(run, batch_max=2)
    assert await asyncio.gather(*(steps.step(n) for n in range(1, 6))) == [2, 4, 6, 8, 10]
    assert run.batches == [[1, 2], [3, 4], [5]]


async def test_error_goes_to_all_of_its_batch_and_to_no_other() -> None:
    run = Recorder()
    steps = Steps(run, batch_max=2)
    results = await asyncio.gather(*(steps.step(n) for n in (1, 0, 3)), return_exceptions=True)
    assert isinstance(results[0], ArithmeticError) and results[0] is results[1] and results[2] == 6
    assert await steps.step(4) == 8


@pytest.mark.parametrize(
    "raised", [asyncio.CancelledError, type("Panic", (BaseException,), {}), GeneratorExit, SystemExit]
)
async def test_what_is_no_exception_goes_to_its_batch_and_others_do_not_wait_for_ever(
    raised: type[BaseException],
) -> None:
    """Nobody has cancelled the batch: a future that it awaited was."""

    async def run(works: Sequence[int]) -> Sequence[int]:
        if 1 in works:
            raise raised
        return works

    steps = Steps(run, batch_max=1)
    waiting = [asyncio.create_task(steps.step(n)) for n in (1, 2)]
    assert await asyncio.wait_for(waiting[1], WAIT_S) == 2
    with pytest.raises(raised if raised is asyncio.CancelledError else RuntimeError):
        await waiting[0]


async def test_cancelled_while_it_runs_waits_for_its_end() -> None:
    run = Recorder()
    run.may.clear()
    steps = Steps(run, batch_max=2)
    step = asyncio.create_task(steps.step(1))
    while not run.batches:
        await asyncio.sleep(0)
    for _ in range(2):
        step.cancel()
        await asyncio.sleep(0)
        assert not step.done()
    run.may.set()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(step, WAIT_S)


async def test_cancelled_while_it_waits_never_runs() -> None:
    run = Recorder()
    run.may.clear()
    steps = Steps(run, batch_max=1)
    first, second, third = (asyncio.create_task(steps.step(n)) for n in (1, 2, 3))
    while not run.batches:
        await asyncio.sleep(0)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    run.may.set()
    assert [await first, await third] == [2, 6]
    assert run.batches == [[1], [3]]

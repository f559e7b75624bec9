"""Waits with a deadline: nobody's cancellation is lost, and nothing goes on behind them."""

import asyncio

import pytest

from crossrail.control.deadlines import first_of, in_time, in_words, set_in_time
from tests.support.limits import WAIT_S

SOON_S = 0.01


async def turns(count: int) -> None:
    """So many turns of the event loop."""
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("later", range(6))
async def test_cancelled_at_the_moment_when_the_work_is_done(later: int) -> None:
    event, went_on = asyncio.Event(), False

    async def wait() -> None:
        nonlocal went_on
        await in_time(event.wait(), WAIT_S)
        went_on = True
        await asyncio.sleep(WAIT_S)

    task = asyncio.ensure_future(wait())
    await turns(3)
    event.set()
    await turns(later)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, WAIT_S)
    assert later < 5 or went_on, "the last case cancels behind the wait"


@pytest.mark.parametrize("later", range(6))
async def test_result_of_work_is_undone_when_nobody_gets_it(later: int) -> None:
    made, got, undone = asyncio.Event(), list[str](), list[str]()

    async def make() -> str:
        await made.wait()
        return "connection"

    async def use() -> None:
        got.append(await in_time(make(), WAIT_S, undo=undone.append))

    task = asyncio.ensure_future(use())
    await turns(3)
    made.set()
    await turns(later)
    task.cancel()
    await asyncio.wait([task])
    await turns(2)
    assert got + undone == ["connection"]


async def test_the_result_or_the_error_of_the_work() -> None:
    async def fail() -> None:
        await turns(1)
        raise KeyError("out of luck")

    assert await in_time(asyncio.sleep(0, "there"), WAIT_S) == "there"
    with pytest.raises(KeyError, match="out of luck"):
        await in_time(fail(), WAIT_S)
    # What is there already needs no time.
    queue: asyncio.Queue[int] = asyncio.Queue()
    queue.put_nowait(7)
    assert await in_time(queue.get(), 0.0) == 7


@pytest.mark.parametrize("timeout_s", [SOON_S, 0.0, -1.0])
async def test_overdue_work_is_cancelled_and_has_ended(timeout_s: float) -> None:
    ended = False

    async def work() -> None:
        nonlocal ended
        try:
            await asyncio.sleep(WAIT_S)
        finally:
            await turns(3)
            ended = True

    with pytest.raises(asyncio.TimeoutError):
        await in_time(work(), timeout_s)
    assert ended


async def test_work_that_is_done_while_it_is_cancelled_counts() -> None:
    async def stubborn() -> str:
        try:
            await asyncio.sleep(WAIT_S)
        except asyncio.CancelledError:
            return "done"
        return "overdue"

    assert await in_time(stubborn(), SOON_S) == "done"


async def test_work_that_somebody_else_cancelled_is_not_overdue() -> None:
    work = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(work.cancel)
    with pytest.raises(asyncio.CancelledError):
        await in_time(work, WAIT_S)


async def test_error_of_work_that_nobody_awaits_any_more_is_no_complaint_of_the_loop(
    recwarn: pytest.WarningsRecorder,
) -> None:
    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    event = asyncio.Event()

    async def fail() -> None:
        await event.wait()
        raise KeyError("nobody asks")

    task = asyncio.ensure_future(in_time(fail(), WAIT_S))
    await turns(3)
    event.set()
    await turns(2)  # the work is done, whoever waits for it has not run
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    del task
    await turns(3)
    assert not complaints
    assert not recwarn.list


async def test_set_in_time() -> None:
    event = asyncio.Event()
    assert not await set_in_time(event, SOON_S)
    assert not await set_in_time(event, 0.0)
    event.set()
    assert await set_in_time(event, 0.0)


@pytest.mark.parametrize(
    ("duration_s", "words"),
    [(5.89234, "5.89 s"), (0.0012345, "0.00123 s"), (600, "600 s"), (86400.25, "86400 s"), (0, "0 s")],
)
def test_durations_are_said_in_few_digits(duration_s: float, words: str) -> None:
    assert in_words(duration_s) == words


async def test_of_several_the_first_ends_are_had_and_the_others_have_ended() -> None:
    loop, cleaned_up = asyncio.get_running_loop(), []

    async def slow() -> None:
        try:
            await asyncio.sleep(WAIT_S)
        finally:
            await asyncio.sleep(0)
            cleaned_up.append(True)

    async def fails() -> None:
        raise ArithmeticError

    ends = [asyncio.ensure_future(work) for work in (slow(), fails(), slow())]
    assert await asyncio.wait_for(first_of(ends), WAIT_S) == [ends[1]]
    assert cleaned_up == [True, True] and all(end.done() for end in ends)
    never = loop.create_future()
    assert await first_of([never], 0.0) == [] and never.cancelled()

"""The loop beside a host's threads: whose error is whose, and what closing waits for."""

import asyncio
import threading

import pytest

from crossrail.errors import CrossrailError, WaitTimeout
from crossrail.integrations.loop_thread import LoopThread


async def raise_timeout() -> None:
    raise WaitTimeout("7 of 10 arrived")


async def wait_for_ever(cancelled: threading.Event) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        cancelled.set()


def test_timeout_of_the_work_is_not_taken_for_the_loops() -> None:
    loop = LoopThread("loop")
    try:
        with pytest.raises(WaitTimeout, match="7 of 10 arrived"):
            loop.call(raise_timeout(), timeout_s=30)
    finally:
        loop.close()


def test_work_that_takes_too_long_is_cancelled_and_named() -> None:
    loop, cancelled = LoopThread("loop-7"), threading.Event()
    try:
        with pytest.raises(CrossrailError, match=r"loop-7 did not get it done in 0\.1 s"):
            loop.call(wait_for_ever(cancelled), timeout_s=0.1)
        assert cancelled.wait(10)
    finally:
        loop.close()


def test_calls_run_in_their_order_and_closing_is_idempotent() -> None:
    loop, seen = LoopThread("loop"), list[int]()
    for i in range(100):
        loop.soon(seen.append, i)
    loop.close()
    loop.close()
    assert seen == list(range(100))
    assert not any(thread.name == "loop" for thread in threading.enumerate())

"""Immediate counters: credits, tickets, numbers handed out and given back."""

import asyncio
import threading
import time
from typing import Any

import pytest

import crossrail as xr
from tests.conftest import EngineFactory
from tests.support.limits import NEVER_S, WAIT_S, eventually, never
from tests.support.tcp_wire import RawPeer, write_frame

IMM_MAX = 2**28 - 1


def arrive(engine: xr.Engine, imm: int, count: int = 1) -> None:
    """`count` arrivals of `imm` at `engine`, from itself, all there on return."""
    before = engine.imm_counter(imm).poll()
    group = engine.add_peer_group([engine.address])
    for _ in range(count):
        engine.submit_barrier(group, imm)
    eventually(lambda: engine.imm_counter(imm).poll() == before + count, f"{count} arrivals of {imm}")


def test_fresh_counter_is_empty(engine: xr.Engine) -> None:
    counter = engine.imm_counter(3)

    assert counter.imm == 3
    assert counter.poll() == 0
    assert counter.try_consume() is False


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_checked_write_that_is_done_is_counted(open_engine: EngineFactory, transport: str) -> None:
    """Whoever hears of its end by another way need not wait for the count; of other writes that is not promised."""
    here, there = open_engine("here", transport=transport), open_engine("there", transport=transport)
    source, target = here.alloc(1000), there.alloc(1000)
    counter = there.imm_counter(7)

    for done in range(1, 1001):
        here.submit_write(source, target.descriptor, imm=7, verify=True).wait(WAIT_S)
        assert counter.poll() == done


def test_poll_looks_and_try_consume_takes(engine: xr.Engine) -> None:
    counter = engine.imm_counter(3)
    arrive(engine, 3, 5)

    assert counter.poll() == counter.poll() == 5
    assert counter.try_consume(6) is False
    assert counter.try_consume(2) is True
    assert counter.try_consume() is True
    assert counter.poll() == 2


def test_same_number_is_the_same_counter(engine: xr.Engine) -> None:
    one, two = engine.imm_counter(3), engine.imm_counter(3)
    arrive(engine, 3, 2)

    one.wait(1, WAIT_S)

    assert two.poll() == 1


def test_wait_in_vain_says_how_many_arrived_and_takes_none(engine: xr.Engine) -> None:
    arrive(engine, 3, 7)

    with pytest.raises(xr.WaitTimeout, match="7 of 10 arrived") as failure:
        engine.imm_counter(3).wait(10, 0.05)

    assert (failure.value.arrived, failure.value.expected) == (7, 10)
    assert isinstance(failure.value, TimeoutError)
    assert engine.imm_counter(3).poll() == 7


def test_wait_in_vain_behind_another_says_why_it_got_none_of_what_arrived(engine: xr.Engine) -> None:
    counter = engine.imm_counter(3)
    ticket = counter.on_count(10, lambda: None)
    arrive(engine, 3, 2)

    with pytest.raises(
        xr.WaitTimeout, match=r"2 of 2 arrived .* none was taken: a wait that began earlier takes first"
    ):
        counter.wait(2, 0.05)

    assert ticket.cancel()


def test_wait_that_is_served_later(engine: xr.Engine) -> None:
    arrive(engine, 3, 2)
    waiter = threading.Thread(target=engine.imm_counter(3).wait, args=(5, WAIT_S))
    waiter.start()
    never(lambda: not waiter.is_alive(), "a wait for 5 served by 2")

    arrive_without_looking(engine, 3, 3)

    waiter.join(WAIT_S)
    assert not waiter.is_alive()
    assert engine.imm_counter(3).poll() == 0


def arrive_without_looking(engine: xr.Engine, imm: int, count: int) -> None:
    group = engine.add_peer_group([engine.address])
    for _ in range(count):
        engine.submit_barrier(group, imm).wait(WAIT_S)


def test_waiters_are_served_in_their_order(engine: xr.Engine) -> None:
    served: list[int] = []
    counter = engine.imm_counter(3)
    for i, count in enumerate([4, 1, 2]):
        counter.on_count(count, lambda i=i: served.append(i))

    arrive_without_looking(engine, 3, 3)
    never(lambda: served, "a later waiter served before the first")
    arrive_without_looking(engine, 3, 4)

    eventually(lambda: len(served) == 3, "all waiters served")
    assert served == [0, 1, 2]


def test_blocking_waits_have_their_place_in_the_order_before_they_sleep(open_engine: EngineFactory) -> None:
    engine = open_engine(spin_us=1e6)
    counter = engine.imm_counter(3)
    served: list[str] = []

    def wait() -> None:
        counter.wait(2, WAIT_S)
        served.append("first")

    waiter = threading.Thread(target=wait)
    waiter.start()
    eventually(lambda: "immediate 3: 0 of 2 arrived" in (engine.dump() or ""), "it waits")
    counter.on_count(1, lambda: served.append("second"))

    arrive_without_looking(engine, 3, 1)
    never(lambda: served, "the later one served before the first")
    arrive_without_looking(engine, 3, 2)

    waiter.join(WAIT_S)
    eventually(lambda: len(served) == 2, "both served")


def test_try_consume_does_not_overtake_a_waiter(engine: xr.Engine) -> None:
    counter = engine.imm_counter(3)
    served: list[int] = []
    counter.on_count(2, lambda: served.append(1))
    arrive_without_looking(engine, 3, 1)

    assert counter.try_consume() is False

    arrive_without_looking(engine, 3, 1)
    eventually(lambda: served, "the waiter served")


def test_credits_are_never_doubled_or_lost_between_threads(engine: xr.Engine) -> None:
    counter = engine.imm_counter(3)
    threads = [threading.Thread(target=lambda: [counter.wait(3, WAIT_S) for _ in range(50)]) for _ in range(6)]
    for thread in threads:
        thread.start()

    arrive_without_looking(engine, 3, 6 * 50 * 3 + 2)
    for thread in threads:
        thread.join(WAIT_S)

    assert not any(thread.is_alive() for thread in threads)
    eventually(lambda: counter.poll() == 2, "the two that nobody waited for")


def test_wait_for_zero_returns_at_once(engine: xr.Engine) -> None:
    engine.imm_counter(3).wait(0, 0)


def test_wait_with_timeout_zero_takes_what_is_there(engine: xr.Engine) -> None:
    arrive(engine, 3, 1)

    engine.imm_counter(3).wait(1, 0)

    with pytest.raises(xr.WaitTimeout, match="0 of 1 arrived"):
        engine.imm_counter(3).wait(1, 0)


@pytest.mark.parametrize("count", [-1, 2**60, 2**64])
def test_senseless_count_is_refused(engine: xr.Engine, count: int) -> None:
    with pytest.raises(xr.UsageError, match="count"):
        engine.imm_counter(3).wait(count, 0)


@pytest.mark.parametrize("imm", [-1, IMM_MAX + 1, 2**32 - 1, 2**32, 2**64])
def test_number_past_28_bits_is_refused(engine: xr.Engine, imm: int) -> None:
    with pytest.raises(xr.UsageError, match=rf"imm.*{imm}"):
        engine.imm_counter(imm)


# --- numbers handed out ---


def test_alloc_imm_never_hands_out_a_number_in_use(engine: xr.Engine) -> None:
    counters = [engine.alloc_imm() for _ in range(1000)]

    numbers = [counter.imm for counter in counters]
    assert len(set(numbers)) == 1000
    assert all(2**27 <= number <= IMM_MAX for number in numbers)  # the upper half; the lower is the user's


def test_released_number_starts_from_nothing(engine: xr.Engine) -> None:
    counter = engine.alloc_imm()
    arrive(engine, counter.imm, 3)
    imm = counter.imm

    counter.release()

    assert engine.imm_counter(imm).poll() == 0


def test_release_of_a_plain_number_drops_its_counts(engine: xr.Engine) -> None:
    arrive(engine, 3, 3)

    engine.release_imm(3)

    assert engine.imm_counter(3).poll() == 0


def test_number_that_somebody_waits_for_is_not_released(engine: xr.Engine) -> None:
    counter = engine.alloc_imm()
    ticket = counter.on_count(2, lambda: None)

    with pytest.raises(xr.UsageError, match="waits"):
        counter.release()
    assert ticket.cancel()

    counter.release()


def test_number_with_a_part_of_a_count_is_not_released_unless_forced(open_engine: EngineFactory) -> None:
    """Writes over rails count in shares; one that is fenced off in the middle leaves some."""
    engine = open_engine(transport="tcp", rails=["127.0.0.1"])
    counter = engine.alloc_imm()
    half = 1 << 28  # share code 1
    with RawPeer(engine.address).connected() as connection:
        connection.sendall(write_frame(0, [(0, b"", counter.imm | half)]))
        eventually(lambda: engine.stats()["imm_units_received"] == 24, "half a count")

        with pytest.raises(xr.UsageError, match="24/48 of a count"):
            counter.release()
        assert counter.poll() == 0
        counter.release(force=True)

    assert counter.closed


def test_who_still_has_a_released_counter_is_told_so(engine: xr.Engine) -> None:
    counter = engine.alloc_imm()
    counter.release()

    with pytest.raises(
        xr.EngineClosed, match=rf"immediate {counter.imm}: its number was released.*imm_counter\({counter.imm}\)"
    ):
        counter.wait(1, NEVER_S)
    with pytest.raises(xr.EngineClosed, match="was released"):
        counter.on_count(1, print)


def test_numbers_do_not_run_out_when_released(open_engine: EngineFactory) -> None:
    engine = open_engine(imm_counters_max=64)

    for _ in range(1000):
        counter = engine.alloc_imm()
        arrive_without_looking(engine, counter.imm, 1)
        counter.wait(1, WAIT_S)
        counter.release()


# --- callbacks and asyncio ---


def test_on_count_runs_once_and_consumes(engine: xr.Engine) -> None:
    ran: list[int] = []
    counter = engine.imm_counter(3)
    counter.on_count(3, lambda: ran.append(1))

    arrive_without_looking(engine, 3, 7)

    eventually(lambda: ran, "the callback")
    never(lambda: len(ran) > 1, "a callback that runs twice")
    assert counter.poll() == 4


def test_on_count_of_early_arrivals_runs_at_once(engine: xr.Engine) -> None:
    arrive(engine, 3, 2)
    ran: list[int] = []

    engine.imm_counter(3).on_count(2, lambda: ran.append(1))

    eventually(lambda: ran, "the callback")


def test_withdrawn_ticket_takes_nothing(engine: xr.Engine) -> None:
    counter = engine.imm_counter(3)
    ran: list[int] = []
    ticket = counter.on_count(2, lambda: ran.append(1))

    assert ticket.cancel() is True
    arrive(engine, 3, 2)

    never(lambda: ran, "a callback of a withdrawn ticket")
    assert counter.poll() == 2
    assert ticket.cancel() is False


def test_ticket_served_cannot_be_withdrawn(engine: xr.Engine) -> None:
    arrive(engine, 3, 1)
    ran: list[int] = []
    ticket = engine.imm_counter(3).on_count(1, lambda: ran.append(1))
    eventually(lambda: ran, "the callback")

    assert ticket.cancel() is False


def test_withdrawing_the_first_serves_the_next(engine: xr.Engine) -> None:
    counter = engine.imm_counter(3)
    ran: list[str] = []
    first = counter.on_count(10, lambda: ran.append("first"))
    counter.on_count(2, lambda: ran.append("second"))
    arrive_without_looking(engine, 3, 2)

    first.cancel()

    eventually(lambda: ran == ["second"], "the second waiter served")


def test_what_was_left_of_a_timeout_is_told_as_the_timeout(engine: xr.Engine) -> None:
    counter = engine.imm_counter(4)

    with pytest.raises(xr.WaitTimeout, match=r"0 of 1 arrived within 0\.1 s;"):
        counter.wait(1, timeout_s=0.099998)


async def test_wait_async_times_out_with_the_same_words(engine: xr.Engine) -> None:
    arrive(engine, 3, 7)

    with pytest.raises(xr.WaitTimeout, match="7 of 10 arrived") as failure:
        await engine.imm_counter(3).wait_async(10, 0.05)

    assert (failure.value.arrived, failure.value.expected) == (7, 10)
    assert engine.imm_counter(3).poll() == 7


@pytest.mark.parametrize("timeout_s", [-1, float("nan"), "1", True, 10**400], ids=lambda given: f"{given}"[:4])
async def test_senseless_timeout_is_refused_by_every_wait(engine: xr.Engine, timeout_s: Any) -> None:
    with pytest.raises(xr.UsageError, match="timeout_s"):
        await engine.imm_counter(3).wait_async(1, timeout_s)
    with pytest.raises(xr.UsageError, match="timeout_s"):
        engine.imm_counter(3).wait(1, timeout_s)


async def test_cancelled_wait_async_takes_nothing(engine: xr.Engine) -> None:
    counter = engine.imm_counter(3)
    task = asyncio.create_task(counter.wait_async(2))
    await asyncio.sleep(0.01)

    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(arrive, engine, 3, 2)

    assert counter.poll() == 2


async def test_cancel_that_races_with_arrivals_loses_no_credit(engine: xr.Engine) -> None:
    counter = engine.imm_counter(3)
    group = engine.add_peer_group([engine.address])
    taken, rounds = 0, 300
    for i in range(rounds):
        task = asyncio.create_task(counter.wait_async(1))
        await asyncio.sleep(0)
        engine.submit_barrier(group, 3)
        for _ in range(i % 4):
            await asyncio.sleep(0)
        task.cancel()
        try:
            await task
            taken += 1
        except asyncio.CancelledError:
            pass

    deadline = time.monotonic() + WAIT_S
    while counter.poll() != rounds - taken and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    assert counter.poll() == rounds - taken


async def test_many_tasks_wait_on_many_counters(engine: xr.Engine) -> None:
    group = engine.add_peer_group([engine.address])
    tasks = [asyncio.create_task(engine.imm_counter(imm).wait_async(2, WAIT_S)) for imm in range(200)]
    await asyncio.sleep(0)

    for _ in range(2):
        for imm in range(200):
            engine.submit_barrier(group, imm)

    await asyncio.wait_for(asyncio.gather(*tasks), WAIT_S)


def test_blocking_wait_lets_other_threads_run(engine: xr.Engine) -> None:
    group = engine.add_peer_group([engine.address])

    def tick_and_end_it() -> None:
        eventually(lambda: "immediate 3: 0 of 1 arrived" in (engine.dump() or ""), "it waits")
        for _ in range(10):
            time.sleep(0.001)
        engine.submit_barrier(group, 3)

    ticker = threading.Thread(target=tick_and_end_it)
    ticker.start()

    engine.imm_counter(3).wait(1, WAIT_S)  # one that kept the GIL would never end

    ticker.join(WAIT_S)

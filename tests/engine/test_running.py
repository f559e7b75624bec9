"""Who moves the bytes: worker thread, waiting thread or the user; and many threads on one engine."""

import threading
from collections.abc import Callable

import numpy as np
import pytest

import crossrail as xr
from tests.conftest import EngineFactory
from tests.support.leaks import crossrail_threads
from tests.support.limits import WAIT_S, eventually
from tests.support.patterns import assert_same_bytes, pattern

Call = Callable[[], object]

POLLING = ("adaptive", "spin")


@pytest.mark.parametrize("there", POLLING)
@pytest.mark.parametrize("here", POLLING)
def test_every_kind_of_polling_talks_to_every_other(open_engine: EngineFactory, here: str, there: str) -> None:
    a, b = open_engine("a", polling=here), open_engine("b", polling=there)
    src, dst = a.register(pattern(1, 500_000)), b.register(np.zeros(500_000, np.uint8))

    a.submit_write(src, dst.descriptor, imm=1).wait(WAIT_S)
    b.imm_counter(1).wait(1, WAIT_S)
    a.submit_read(src, dst.descriptor).wait(WAIT_S)

    assert_same_bytes(src.array(), pattern(1, 500_000))


@pytest.mark.parametrize("spin_us", [0.0, 1.0, 10_000.0])
def test_sleeping_engine_wakes_up(open_engine: EngineFactory, spin_us: float) -> None:
    a, b = open_engine("a", spin_us=spin_us), open_engine("b", spin_us=spin_us)
    src, dst = a.alloc(100), b.alloc(100)

    for _ in range(5):
        threading.Event().wait(0.03)  # long enough for both to fall asleep
        a.submit_write(src, dst.descriptor, imm=1).wait(WAIT_S)
        b.imm_counter(1).wait(1, WAIT_S)

    assert a.stats()["worker_sleeps"] + b.stats()["worker_sleeps"] > 0


def test_idle_engine_sleeps(engine: xr.Engine) -> None:
    region = engine.alloc(10)
    engine.submit_write(region, region.descriptor).wait(WAIT_S)

    def rounds_in(seconds: float) -> int:
        before = engine.stats()["worker_rounds"]
        threading.Event().wait(seconds)
        return engine.stats()["worker_rounds"] - before

    eventually(lambda: rounds_in(0.02) == 0, "the worker asleep")  # at first it looks again a dozen times
    assert rounds_in(0.3) < 1000  # a spinning one makes millions


def test_writer_is_not_woken_when_the_target_has_counted(open_engine: EngineFactory) -> None:
    """A write into mapped memory is over at once: there is nothing that its engine would wait for."""
    a, b = open_engine("a", transport="shm", spin_us=0.0), open_engine("b", transport="shm", spin_us=0.0)
    src, dst = a.alloc(100), b.alloc(100)
    counter = b.imm_counter(1)
    a.submit_write(src, dst.descriptor, imm=1).wait(WAIT_S)
    counter.wait(1, WAIT_S)
    eventually(lambda: sleeps_on(a), "the worker sleeps")

    before = a.stats()["worker_sleeps"]
    for _ in range(60):
        a.submit_write(src, dst.descriptor, imm=1)
        counter.wait(1, WAIT_S)
        threading.Event().wait(0.005)

    assert a.stats()["worker_sleeps"] - before < 5


def sleeps_on(engine: xr.Engine) -> bool:
    """Whether the worker has nothing to look after, and so sleeps until it is woken."""
    before = engine.stats()["worker_sleeps"]
    threading.Event().wait(0.1)
    return engine.stats()["worker_sleeps"] == before


def test_manual_engine_moves_only_when_driven(open_engine: EngineFactory) -> None:
    a, b = open_engine("a", polling="manual"), open_engine("b", polling="manual")
    src, dst = a.alloc(1000), b.alloc(1000)
    src.array()[:] = 5
    transfer = a.submit_write(src, dst.descriptor, imm=1)
    threading.Event().wait(0.05)
    assert not transfer.done

    eventually(lambda: (a.progress(), b.progress()) and transfer.done, "the write done by progress()")
    eventually(lambda: b.progress() or b.imm_counter(1).poll() == 1, "the count seen by progress()")

    assert (dst.array() == 5).all()
    eventually(lambda: not a.progress() and not b.progress(), "progress() that has nothing left to do")


def test_manual_engine_has_no_worker(open_engine: EngineFactory) -> None:
    before = crossrail_threads()

    open_engine(polling="manual")

    assert [name for name in crossrail_threads() if "worker" in name and name not in before] == []


def test_waiting_drives_a_manual_engine(open_engine: EngineFactory) -> None:
    manual, helped = open_engine("manual", polling="manual"), open_engine("helped")
    src, dst = manual.register(pattern(1, 3_000_000)), helped.register(np.zeros(3_000_000, np.uint8))

    manual.submit_write(src, dst.descriptor, imm=1).wait(WAIT_S)
    helped.imm_counter(1).wait(1, WAIT_S)
    helped.submit_write(dst, src.descriptor, imm=2)
    manual.imm_counter(2).wait(1, WAIT_S)
    with manual.submit_recvs(1, 16) as pool:
        helped.submit_send(manual.address, b"x")
        assert pool.recv(WAIT_S).data == b"x"


@pytest.mark.parametrize("end", ["close", "revoke"])
@pytest.mark.parametrize("nbytes", [8, 1_000_000])  # posted by submit_write, by progress()
def test_write_that_is_over_keeps_no_region_in_use_while_a_manual_engine_idles(
    open_engine: EngineFactory, nbytes: int, end: str
) -> None:
    manual, other = open_engine("manual", transport="shm", polling="manual"), open_engine("other", transport="shm")
    src, dst = manual.alloc(nbytes), other.alloc(nbytes)
    manual.submit_write(src, dst.descriptor).wait(WAIT_S)
    transfer = manual.submit_write(src, dst.descriptor, imm=1)
    while not transfer.done:
        manual.progress()

    getattr(dst, end)(timeout_s=WAIT_S)

    other.imm_counter(1).wait(1, WAIT_S)


def test_progress_of_an_engine_with_a_worker_is_harmless(engine: xr.Engine) -> None:
    src, dst = engine.alloc(1000), engine.alloc(1000)

    for _ in range(200):
        engine.submit_write(src, dst.descriptor, imm=1)
        assert engine.progress() in (True, False)

    engine.imm_counter(1).wait(200, WAIT_S)


# --- many threads, one engine ---


def test_many_threads_submit_to_one_engine(engine: xr.Engine, other: xr.Engine) -> None:
    thread_count, rounds, nbytes = 8, 300, 257
    size = thread_count * rounds * nbytes
    src, dst = engine.register(pattern(1, size)), other.alloc(size)

    def submit(number: int) -> None:
        for i in range(number * rounds, (number + 1) * rounds):
            offset = i * nbytes
            engine.submit_write(src, dst.descriptor, nbytes, src_offset=offset, dst_offset=offset, imm=number)

    run_all([lambda i=i: submit(i) for i in range(thread_count)])

    for number in range(thread_count):
        other.imm_counter(number).wait(rounds, WAIT_S)
    assert_same_bytes(dst.array(), pattern(1, size))


def test_threads_mix_every_kind_of_call(engine: xr.Engine, other: xr.Engine) -> None:
    rounds = 100
    src, dst = engine.register(pattern(1, 65_536)), other.alloc(65_536)
    pages = np.arange(16)
    group = engine.add_peer_group([other.address])
    pool = other.submit_recvs(4, 64)

    def times(call: Call) -> Call:
        return lambda: [call() for _ in range(rounds)]

    run_all(
        [
            times(lambda: engine.submit_write(src, dst.descriptor, imm=1).wait(WAIT_S)),
            times(lambda: engine.submit_paged_writes(src, pages, dst.descriptor, pages, 4096, imm=1).wait(WAIT_S)),
            times(lambda: engine.submit_read(src, dst.descriptor).wait(WAIT_S)),
            times(lambda: engine.submit_barrier(group, 1).wait(WAIT_S)),
            times(lambda: engine.submit_send(other.address, b"x").wait(WAIT_S)),
            times(lambda: pool.recv(WAIT_S)),
            times(lambda: other.imm_counter(1).wait(18, WAIT_S)),
            times(lambda: engine.register(bytearray(100)).close()),
            times(lambda: (engine.stats(), str(engine.explain(other.address)), engine.peers())),
        ]
    )

    assert other.imm_counter(1).poll() == 0
    pool.close()


def run_all(calls: list[Call]) -> None:
    """Each call on a thread of its own; raises what one of them raised."""
    failures: list[BaseException] = []

    def run(call: Call) -> None:
        try:
            call()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * WAIT_S)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    if failures:
        raise failures[0]


def test_long_page_is_posted_in_slices(open_engine: EngineFactory) -> None:
    """What drives has its hands free in between: a cancel stops it, and what is there in part is not counted."""
    nbytes = 64 << 20
    engine, other = open_engine(transport="shm", polling="manual"), open_engine("other", transport="shm")
    source, target = engine.alloc(nbytes), other.alloc(nbytes)
    engine.connect(other.address, WAIT_S)
    source.array()[:] = 1
    page, landed = np.zeros(1, np.int64), target.array()

    transfer = engine.submit_paged_writes(source, page, target.descriptor, page, nbytes, imm=1)
    eventually(lambda: engine.progress() and landed[0] == 1, "its first slice is there")
    transfer.cancel()
    with pytest.raises(xr.TransferCancelled):
        transfer.wait(WAIT_S)
    assert landed[-1] == 0

    engine.submit_paged_writes(source, page, target.descriptor, page, nbytes, imm=1).wait(WAIT_S)
    other.imm_counter(1).wait(1, WAIT_S)
    assert other.imm_counter(1).poll() == 0

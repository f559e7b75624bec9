"""A transfer: one accepted submit and its single completion, seen by wait, await, callback and polling."""

import asyncio
import threading
from collections import Counter

import numpy as np
import pytest

import crossrail as xr
from crossrail._notify import callbacks_of
from tests.conftest import EngineFactory
from tests.support.limits import NEVER_S, WAIT_S, eventually, never


@pytest.fixture
def written(engine: xr.Engine, other: xr.Engine) -> xr.Transfer:
    """A write that is done."""
    target = other.alloc(1000)
    transfer = engine.submit_write(engine.alloc(1000), target.descriptor, imm=5)
    transfer.wait(WAIT_S)
    return transfer


@pytest.fixture
def pending(engine: xr.Engine, other: xr.Engine) -> xr.Transfer:
    """A message that nobody receives."""
    engine.connect(other.address, WAIT_S)
    return engine.submit_send(other.address, b"nobody receives")


def test_done_transfer_says_what_it_was(written: xr.Transfer, other: xr.Engine) -> None:
    assert written.done is True
    assert written.status == "done"
    assert written.kind == "write"
    assert written.peer == other.address or written.peer == other.name
    assert written.nbytes == 1000
    assert written.imm == 5
    assert written.exception() is None
    assert "write" in repr(written)


def test_imm_is_none_without_one(engine: xr.Engine, other: xr.Engine) -> None:
    target = other.alloc(10)
    transfer = engine.submit_write(engine.alloc(10), target.descriptor)

    transfer.wait(WAIT_S)

    assert transfer.imm is None


def test_pending_transfer_says_so(pending: xr.Transfer) -> None:
    assert pending.done is False
    assert pending.status == "pending"
    with pytest.raises(xr.UsageError, match="pending"):
        pending.exception()


def test_errors_say_which_way_the_bytes_go(engine: xr.Engine, other: xr.Engine) -> None:
    here, there = engine.alloc(1000), other.alloc(1000)
    gone = there.descriptor
    there.close()

    with pytest.raises(xr.RemoteRegionClosed, match=f"^read of 1000 bytes from '{other.name}'"):
        engine.submit_read(here, gone).wait(WAIT_S)
    with pytest.raises(xr.RemoteRegionClosed, match=f"^write of 1000 bytes to '{other.name}'"):
        engine.submit_write(here, gone).wait(WAIT_S)


def test_wait_may_be_repeated(written: xr.Transfer) -> None:
    written.wait()
    written.wait(0)


def test_wait_gives_up_at_its_deadline_and_the_transfer_goes_on(pending: xr.Transfer, other: xr.Engine) -> None:
    with pytest.raises(xr.WaitTimeout):
        pending.wait(0.05)
    with pytest.raises(TimeoutError):
        pending.wait(0)

    with other.submit_recvs(1, 100) as pool:
        pending.wait(WAIT_S)
        assert pool.recv(WAIT_S).data == b"nobody receives"


@pytest.mark.parametrize("timeout_s", [float("nan"), -1.0])
def test_senseless_timeout_is_refused(pending: xr.Transfer, timeout_s: float) -> None:
    with pytest.raises(xr.UsageError, match="timeout_s"):
        pending.wait(timeout_s)


def test_several_threads_wait_for_one_transfer(pending: xr.Transfer, other: xr.Engine) -> None:
    woken: Counter[int] = Counter()

    def wait(number: int) -> None:
        pending.wait(WAIT_S)
        woken[number] += 1

    threads = [threading.Thread(target=wait, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    with other.submit_recvs(1, 100):
        for thread in threads:
            thread.join(WAIT_S)

    assert woken == Counter(range(8))


# --- cancel ---


def test_cancelled_transfer_raises_and_is_over(pending: xr.Transfer, other: xr.Engine) -> None:
    assert pending.cancel() is True

    with pytest.raises(xr.TransferCancelled) as failure:
        pending.wait(WAIT_S)

    assert failure.value.op == pending.kind == "send"
    assert failure.value.nbytes == len(b"nobody receives")
    assert pending.status == "cancelled"
    assert isinstance(pending.exception(), xr.TransferCancelled)
    with other.submit_recvs(1, 100) as pool:
        never(lambda: pool.poll(), "a cancelled message that arrives")


def test_cancel_of_a_done_transfer_changes_nothing(written: xr.Transfer) -> None:
    assert written.cancel() is False
    assert written.status == "done"


def test_cancel_twice_is_harmless(pending: xr.Transfer) -> None:
    pending.cancel()
    pending.cancel()

    with pytest.raises(xr.TransferCancelled):
        pending.wait(WAIT_S)


def test_cancelled_writes_end_whole_or_cancelled(engine: xr.Engine, other: xr.Engine) -> None:
    nbytes = 4 * 1024 * 1024
    src = engine.register(np.ones(nbytes, np.uint8))
    dst = other.register(np.zeros(nbytes, np.uint8))
    transfers = [engine.submit_write(src, dst.descriptor, imm=1) for _ in range(40)]

    for transfer in transfers[::2]:
        transfer.cancel()
    done = 0
    for transfer in transfers:
        try:
            transfer.wait(WAIT_S)
            done += 1
        except xr.TransferCancelled as error:
            assert error.nbytes_retired <= error.nbytes

    assert done >= 20  # those nobody cancelled
    other.imm_counter(1).wait(done, WAIT_S)
    assert other.imm_counter(1).poll() == 0


def test_nothing_is_written_after_a_cancel_completed(engine: xr.Engine, other: xr.Engine) -> None:
    nbytes = 8 * 1024 * 1024
    src = engine.register(np.ones(nbytes, np.uint8))
    array = np.zeros(nbytes, np.uint8)
    dst = other.register(array)

    for _ in range(10):
        transfers = [engine.submit_write(src, dst.descriptor) for _ in range(4)]
        for transfer in transfers:
            transfer.cancel()
        for transfer in transfers:
            eventually(lambda transfer=transfer: transfer.done, "a cancelled write complete")
        array[:] = 7

        assert (array == 7).all()


def test_asyncio_takes_transfers_where_it_takes_coroutines_and_wait_says_what_it_needs(pending: xr.Transfer) -> None:
    """asyncio.wait would take a transfer for a future, because of add_done_callback, and never return."""

    async def main() -> None:
        with pytest.raises(xr.UsageError, match=r"asyncio\.ensure_future\(transfer\)"):
            await asyncio.wait([pending], timeout=WAIT_S)
        done, _ = await asyncio.wait([asyncio.ensure_future(pending)], timeout=0)
        assert not done
        assert pending.cancel()
        with pytest.raises(xr.TransferCancelled):
            await asyncio.gather(pending, asyncio.wait_for(pending, WAIT_S))

    asyncio.run(main())


# --- callbacks ---


def test_callback_of_a_pending_transfer_runs_once_when_it_completes(pending: xr.Transfer, other: xr.Engine) -> None:
    seen: list[xr.Transfer] = []
    pending.add_done_callback(seen.append)
    never(lambda: seen, "a callback of a pending transfer")

    with other.submit_recvs(1, 100):
        eventually(lambda: seen, "the callback")

    assert seen == [pending]
    assert seen[0].done


def test_callback_of_a_done_transfer_runs_at_once(written: xr.Transfer) -> None:
    seen: list[xr.Transfer] = []

    written.add_done_callback(seen.append)

    eventually(lambda: seen == [written], "the callback")


def test_callback_that_is_added_after_close_runs_and_leaves_no_thread(written: xr.Transfer, engine: xr.Engine) -> None:
    seen: list[xr.Transfer] = []
    engine.close()

    written.add_done_callback(seen.append)

    eventually(lambda: seen == [written], "the callback")
    # That thread is started once more in case that it had ended before: then it finds nothing.
    started = callbacks_of(engine).start()
    assert started is not None
    started.join(WAIT_S)
    assert not started.is_alive()


def test_callbacks_share_one_thread_that_is_not_ours(engine: xr.Engine, other: xr.Engine) -> None:
    threads: list[threading.Thread] = []
    src, dst = engine.alloc(10), other.alloc(10)

    for _ in range(50):
        engine.submit_write(src, dst.descriptor).add_done_callback(lambda _: threads.append(threading.current_thread()))

    eventually(lambda: len(threads) == 50, "50 callbacks")
    assert len(set(threads)) == 1
    assert threads[0] is not threading.current_thread()


def test_every_callback_of_a_transfer_runs_in_the_order_in_which_it_was_added(pending: xr.Transfer) -> None:
    ran: list[int] = []
    for i in range(10):
        pending.add_done_callback(lambda _, i=i: ran.append(i))

    pending.cancel()

    eventually(lambda: len(ran) == 10, "10 callbacks")
    assert ran == list(range(10))


def test_failed_transfer_reaches_its_callback(pending: xr.Transfer, other: xr.Engine) -> None:
    failures: list[Exception | None] = []
    pending.add_done_callback(lambda transfer: failures.append(transfer.exception()))

    other.close()

    eventually(lambda: failures, "the callback")
    assert isinstance(failures[0], xr.PeerLost)


def test_transfers_nobody_keeps_still_happen(engine: xr.Engine, other: xr.Engine) -> None:
    dst = other.alloc(100)

    for i in range(200):
        engine.submit_write(engine.register(np.full(100, i, np.uint8)), dst.descriptor, imm=2)

    other.imm_counter(2).wait(200, WAIT_S)


# --- asyncio ---


async def test_transfer_can_be_awaited_again_and_again(engine: xr.Engine, other: xr.Engine) -> None:
    target = other.alloc(10)
    transfer = engine.submit_write(engine.alloc(10), target.descriptor)

    assert await transfer is None
    assert await transfer is None


async def test_failed_transfer_raises_where_it_is_awaited(pending: xr.Transfer) -> None:
    pending.cancel()

    with pytest.raises(xr.TransferCancelled):
        await pending


async def test_several_tasks_await_one_transfer(pending: xr.Transfer, other: xr.Engine) -> None:
    tasks = [asyncio.ensure_future(pending) for _ in range(5)]
    await asyncio.sleep(0.01)

    with other.submit_recvs(1, 100):
        assert await asyncio.wait_for(asyncio.gather(*tasks), WAIT_S) == [None] * 5


async def test_giving_up_on_an_await_leaves_the_transfer_running(pending: xr.Transfer, other: xr.Engine) -> None:
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(pending, 0.05)
    assert pending.status == "pending"

    with other.submit_recvs(1, 100) as pool:
        await asyncio.wait_for(pending, WAIT_S)
        assert (await pool.recv_async(WAIT_S)).data == b"nobody receives"


async def test_a_thousand_awaits_at_once(engine: xr.Engine, other: xr.Engine) -> None:
    src, dst = engine.alloc(64), other.alloc(64)

    transfers = [engine.submit_write(src, dst.descriptor, imm=1) for _ in range(1000)]
    await asyncio.wait_for(asyncio.gather(*transfers), WAIT_S)

    await other.imm_counter(1).wait_async(1000, WAIT_S)


async def test_the_loop_keeps_running_while_something_is_awaited(pending: xr.Transfer) -> None:
    waiting = asyncio.ensure_future(pending)

    for _ in range(20):
        await asyncio.sleep(NEVER_S / 100)
    assert not waiting.done()

    pending.cancel()
    with pytest.raises(xr.TransferCancelled):
        await waiting


def test_one_engine_serves_one_loop_after_another(engine: xr.Engine, other: xr.Engine) -> None:
    src, dst = engine.alloc(64), other.alloc(64)

    async def write() -> None:
        await engine.submit_write(src, dst.descriptor, imm=1)
        await other.imm_counter(1).wait_async(1, WAIT_S)

    for _ in range(5):
        asyncio.run(write())


def test_one_engine_serves_loops_of_several_threads(engine: xr.Engine, other: xr.Engine) -> None:
    src, dst = engine.alloc(64), other.alloc(64)
    finished: list[int] = []

    async def write(imm: int) -> None:
        for _ in range(50):
            await engine.submit_write(src, dst.descriptor, imm=imm)
            await other.imm_counter(imm).wait_async(1, WAIT_S)
        finished.append(imm)

    threads = [threading.Thread(target=lambda i=i: asyncio.run(write(i))) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)

    assert sorted(finished) == [0, 1, 2, 3]


def test_pages_of_more_bytes_than_64_bits_count_are_refused(open_engine: EngineFactory) -> None:
    engine = open_engine(transport="null")
    memory = bytearray(1)
    region = engine.register((np.frombuffer(memory, np.uint8).ctypes.data, 1 << 48))  # null touches none of it
    pages = np.zeros(1 << 16, np.uint32)

    with pytest.raises(xr.UsageError, match=r"65536 entries, and they are more than 2\*\*64 bytes"):
        engine.submit_paged_writes(region, pages, region.descriptor, pages, 1 << 48)
    transfer = engine.submit_paged_writes(region, pages[1:], region.descriptor, pages[1:], 1 << 48)
    assert transfer.nbytes == 65535 << 48
    transfer.cancel()

"""Receive pools: bounded, one at a time, read by polling, blocking, awaiting or callback."""

import asyncio
import gc
import threading

import pytest

import crossrail as xr
from tests.conftest import EngineFactory
from tests.support.limits import NEVER_S, WAIT_S, eventually, never


def send(engine: xr.Engine, message: bytes) -> xr.Transfer:
    """To itself."""
    return engine.submit_send(engine.address, message)


def test_pool_says_its_size(engine: xr.Engine) -> None:
    with engine.submit_recvs(7, 300) as pool:
        assert (pool.count, pool.nbytes) == (7, 300)


def test_message_says_its_length_and_whom_it_is_from(engine: xr.Engine) -> None:
    with engine.submit_recvs(1, 16) as pool:
        send(engine, b"12345").wait(WAIT_S)
        assert repr(pool.recv(WAIT_S)) == f"<Message of 5 bytes from {engine.address!r}>"


def test_poll_takes_at_most_its_limit_and_never_blocks(engine: xr.Engine) -> None:
    with engine.submit_recvs(10, 16) as pool:
        assert pool.poll() == []
        for i in range(5):
            send(engine, bytes([i])).wait(WAIT_S)

        first = pool.poll(2)
        rest = pool.poll(100)

    assert (len(first), len(rest)) == (2, 3)
    assert sorted(message.data for message in first + rest) == [bytes([i]) for i in range(5)]


def test_recv_in_vain_times_out(engine: xr.Engine) -> None:
    with engine.submit_recvs(1, 16) as pool, pytest.raises(xr.WaitTimeout):
        pool.recv(0.05)


def test_recv_is_woken_by_a_message(engine: xr.Engine) -> None:
    got: list[bytes] = []
    with engine.submit_recvs(1, 16) as pool:
        reader = threading.Thread(target=lambda: got.append(pool.recv(WAIT_S).data))
        reader.start()
        never(lambda: got, "a message before one was sent", 0.05)
        send(engine, b"wake")
        reader.join(WAIT_S)

    assert got == [b"wake"]


async def test_recv_async_is_woken_by_a_message(engine: xr.Engine) -> None:
    with engine.submit_recvs(1, 16) as pool:
        task = asyncio.create_task(pool.recv_async(WAIT_S))
        await asyncio.sleep(0.01)
        await send(engine, b"wake")

        assert (await task).data == b"wake"


async def test_recv_async_in_vain_times_out(engine: xr.Engine) -> None:
    with engine.submit_recvs(1, 16) as pool, pytest.raises(xr.WaitTimeout):
        await pool.recv_async(0.05)


async def test_cancelled_recv_async_takes_no_message(engine: xr.Engine) -> None:
    with engine.submit_recvs(1, 16) as pool:
        task = asyncio.create_task(pool.recv_async())
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await send(engine, b"kept")

        assert (await pool.recv_async(WAIT_S)).data == b"kept"


async def test_pool_can_be_iterated(engine: xr.Engine) -> None:
    got: list[bytes] = []
    with engine.submit_recvs(2, 16) as pool:
        transfers = [send(engine, bytes([i])) for i in range(10)]
        async for message in pool:
            got.append(message.data)
            if len(got) == 10:
                break
        await asyncio.gather(*transfers)

    assert sorted(got) == [bytes([i]) for i in range(10)]


async def test_iteration_ends_with_the_pool(engine: xr.Engine) -> None:
    pool = engine.submit_recvs(2, 16)

    async def read() -> list[bytes]:
        return [message.data async for message in pool]

    task = asyncio.create_task(read())
    await send(engine, b"last")
    await asyncio.sleep(0.05)
    pool.close()

    assert await asyncio.wait_for(task, WAIT_S) == [b"last"]


async def test_two_tasks_share_a_pool(engine: xr.Engine) -> None:
    with engine.submit_recvs(4, 16) as pool:
        tasks = [asyncio.create_task(pool.recv_async(WAIT_S)) for _ in range(2)]
        await asyncio.sleep(0.01)
        await asyncio.gather(send(engine, b"a"), send(engine, b"b"))

        assert sorted(message.data for message in await asyncio.gather(*tasks)) == [b"a", b"b"]


async def test_tasks_that_share_a_pool_take_turns(engine: xr.Engine) -> None:
    turns: asyncio.Queue[int] = asyncio.Queue()
    with engine.submit_recvs(4, 16) as pool:

        async def work(worker: int) -> None:
            async for _ in pool:
                turns.put_nowait(worker)

        tasks = [asyncio.create_task(work(worker)) for worker in range(8)]
        await asyncio.sleep(0.01)
        taken = []
        for _ in range(16):
            await send(engine, b"next")
            taken.append(await asyncio.wait_for(turns.get(), WAIT_S))

        assert taken == [*range(8), *range(8)]
    await asyncio.gather(*tasks)


def test_second_pool_is_refused_while_one_is_open(engine: xr.Engine) -> None:
    with engine.submit_recvs(1, 16):
        with pytest.raises(xr.UsageError, match="pool"):
            engine.submit_recvs(1, 16)

    with engine.submit_recvs(2, 32) as pool:
        assert pool.count == 2


def test_messages_in_a_closed_pool_can_still_be_polled(engine: xr.Engine) -> None:
    pool = engine.submit_recvs(2, 16)
    send(engine, b"in").wait(WAIT_S)

    pool.close()
    pool.close()

    assert [message.data for message in pool.poll()] == [b"in"]


def test_closing_wakes_a_blocked_reader(engine: xr.Engine) -> None:
    pool = engine.submit_recvs(1, 16)
    raised: list[Exception] = []

    def read() -> None:
        try:
            pool.recv(WAIT_S)
        except xr.CrossrailError as error:
            raised.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    never(lambda: raised, "a reader that gives up", 0.05)
    pool.close()
    reader.join(WAIT_S)

    assert not reader.is_alive()
    assert raised and not isinstance(raised[0], xr.WaitTimeout)


@pytest.mark.parametrize(
    ("count", "nbytes", "word"), [(0, 16, "count"), (-1, 16, "count"), (1, 0, "nbytes"), (1, -1, "nbytes")]
)
def test_senseless_pool_is_refused(engine: xr.Engine, count: int, nbytes: int, word: str) -> None:
    with pytest.raises(xr.UsageError, match=word):
        engine.submit_recvs(count, nbytes)


def test_message_past_the_longest_is_refused_at_once(engine: xr.Engine) -> None:
    with pytest.raises(xr.UsageError, match=r"message.*65537.*65536"):
        send(engine, bytes(65_537))


def test_longest_message_is_an_option(open_engine: EngineFactory) -> None:
    engine = open_engine(message_bytes_max=100)
    with engine.submit_recvs(1, 100) as pool:
        send(engine, bytes(100)).wait(WAIT_S)
        assert pool.recv(WAIT_S).data == bytes(100)

        with pytest.raises(xr.UsageError, match="100"):
            send(engine, bytes(101))


@pytest.mark.parametrize("message", ["text", None, 5, [1, 2]])
def test_message_that_is_no_bytes_is_refused(engine: xr.Engine, message: object) -> None:
    with pytest.raises(xr.UsageError, match="message"):
        engine.submit_send(engine.address, message)


@pytest.mark.parametrize("make", [bytes, bytearray, memoryview])
def test_message_may_be_any_buffer(engine: xr.Engine, make: type) -> None:
    with engine.submit_recvs(1, 16) as pool:
        send(engine, make(b"abc")).wait(WAIT_S)

        message = pool.recv(WAIT_S)

    assert (message.data, message.peer) == (b"abc", engine.address)


def test_callback_that_raises_does_not_stop_the_next(engine: xr.Engine, caplog: pytest.LogCaptureFixture) -> None:
    got: list[bytes] = []

    def on_message(message: xr.Message) -> None:
        got.append(message.data)
        if message.data == b"bad":
            raise RuntimeError("callback gone wrong")

    with engine.submit_recvs(1, 16, on_message=on_message):
        for message in (b"bad", b"good"):
            send(engine, message).wait(WAIT_S)
        eventually(lambda: got == [b"bad", b"good"], "both messages")

    eventually(lambda: "callback gone wrong" in caplog.text, "the log of it")


def test_dropped_pool_makes_room_for_another(engine: xr.Engine) -> None:
    engine.submit_recvs(1, 16)  # nobody keeps it

    with engine.submit_recvs(1, 16) as pool:
        send(engine, b"x").wait(WAIT_S)
        assert pool.recv(WAIT_S + NEVER_S).data == b"x"


def test_pool_that_is_dropped_after_a_receive_in_vain_is_closed(engine: xr.Engine) -> None:
    async def receive_in_vain() -> None:
        pool = engine.submit_recvs(1, 16)
        with pytest.raises(xr.WaitTimeout):
            await pool.recv_async(0.01)
        del pool
        gc.collect()
        engine.submit_recvs(1, 16).close()

    asyncio.run(receive_in_vain())


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_how_long_messages_are_that_come_is_up_to_the_pool(open_engine: EngineFactory, transport: str) -> None:
    receiver = open_engine("receiver", transport=transport, message_bytes_max=1024)
    sender = open_engine("sender", transport=transport)
    with receiver.submit_recvs(1, 65536) as pool:
        sender.submit_send(receiver.address, bytes(60000)).wait(WAIT_S)
        assert len(pool.recv(WAIT_S).data) == 60000

"""submit_send and submit_recvs: messages, copied at submit, into a pool of receive buffers."""

import contextlib

import pytest

import crossrail as xr
from tests.contract.conftest import Pair
from tests.contract.setups import ALL_RAILS, SOME_RAILS, setups
from tests.support.limits import WAIT_S, eventually, never
from tests.support.node import CommandError
from tests.support.patterns import pattern
from tests.support.threads import start_thread


@setups(ALL_RAILS)
def test_message_arrives_with_its_sender(pair: Pair) -> None:
    pair.there.receive(4, 1024)

    pair.here.submit_send(pair.there.address, b"hello \x00\xff world").wait(WAIT_S)

    assert pair.there.take() == (pair.here.address, b"hello \x00\xff world")


@setups(SOME_RAILS)
@pytest.mark.parametrize("nbytes", [0, 1, 7, 255, 256, 4095, 4096, 40_000, 65_536])
def test_messages_of_any_length(pair: Pair, nbytes: int) -> None:
    pair.there.receive(2, 65_536)
    message = pattern(nbytes, nbytes).tobytes()

    pair.here.submit_send(pair.there.address, message).wait(WAIT_S)

    assert pair.there.take()[1] == message


@setups(SOME_RAILS)
def test_messages_both_ways(pair: Pair) -> None:
    pair.there.receive(8, 100)
    with pair.here.submit_recvs(8, 100) as pool:
        for i in range(20):
            pair.here.submit_send(pair.there.address, b"ping %d" % i)
            assert pair.there.take()[1] == b"ping %d" % i
            pair.there.send(pair.here.address, b"pong %d" % i)

            message = pool.recv(WAIT_S)
            assert (message.peer, message.data) == (pair.there.address, b"pong %d" % i)


@setups(SOME_RAILS)
def test_no_message_is_lost_or_doubled(pair: Pair) -> None:
    pair.there.receive(16, 64)
    sent = [b"message %d" % i for i in range(300)]

    for message in sent:
        pair.here.submit_send(pair.there.address, message)
    got = [pair.there.take()[1] for _ in sent]

    assert sorted(got) == sorted(sent)  # the order is not promised


def test_payload_is_copied_at_submit(pair: Pair) -> None:
    message = bytearray(b"before")

    transfer = pair.here.submit_send(pair.there.address, message)
    message[:] = b"after!"
    pair.there.receive(1, 64)
    transfer.wait(WAIT_S)

    assert pair.there.take()[1] == b"before"


def test_full_pool_holds_the_sender_back_and_loses_nothing(pair: Pair) -> None:
    pair.there.receive(2, 16)
    sent = [b"%d" % i for i in range(2000)]
    transfers = [pair.here.submit_send(pair.there.address, message) for message in sent]
    never(lambda: all(transfer.done for transfer in transfers), "2000 messages done with 2 buffers and nobody reading")

    got = [pair.there.take()[1] for _ in transfers]

    for transfer in transfers:
        transfer.wait(WAIT_S)
    assert sorted(got) == sorted(sent)


def test_message_longer_than_the_buffers_fails_only_itself(pair: Pair) -> None:
    pair.there.receive(4, 10)

    long = pair.here.submit_send(pair.there.address, bytes(11))
    short = pair.here.submit_send(pair.there.address, bytes(10))

    with pytest.raises(xr.MessageTooLong, match="11"):
        long.wait(WAIT_S)
    short.wait(WAIT_S)
    assert pair.there.take()[1] == bytes(10)


def test_sender_waits_for_a_pool_to_open(pair: Pair) -> None:
    transfer = pair.here.submit_send(pair.there.address, b"early")
    never(lambda: transfer.done, "a message done before anyone could receive it")

    pair.there.receive(1, 16)

    transfer.wait(WAIT_S)
    assert pair.there.take()[1] == b"early"


@setups(SOME_RAILS)
def test_message_that_waits_for_a_pool_can_be_cancelled(pair: Pair) -> None:
    transfers = [pair.here.submit_send(pair.there.address, bytes([i]) * 9000) for i in range(20)]
    never(lambda: any(transfer.done for transfer in transfers), "messages done before anyone could receive them")

    for transfer in transfers[:19]:
        assert transfer.cancel()
    for transfer in transfers[:19]:
        with pytest.raises(xr.TransferCancelled):
            transfer.wait(WAIT_S)

    pair.there.receive(2, 9000)
    transfers[19].wait(WAIT_S)
    assert pair.there.take()[1] == bytes([19]) * 9000
    pair.here.submit_send(pair.there.address, b"last").wait(WAIT_S)
    assert pair.there.take()[1] == b"last"


@setups(SOME_RAILS)
def test_cancelled_messages_make_room_for_others(pair: Pair) -> None:
    """More than may wait at the receiver, again and again."""
    for _ in range(3):
        transfers = [pair.here.submit_send(pair.there.address, bytes(8000)) for _ in range(400)]
        pair.here.submit_send(pair.there.address, b"too late").cancel()
        for transfer in transfers:
            transfer.cancel()
        for transfer in transfers:
            with pytest.raises(xr.TransferCancelled):
                transfer.wait(WAIT_S)


@setups(SOME_RAILS)
def test_cancelled_message_is_delivered_or_cancelled(pair: Pair) -> None:
    pair.there.receive(2, 16)
    transfers = []
    for i in range(300):
        transfers.append(pair.here.submit_send(pair.there.address, b"%d" % i))
        if i % 3 == 0:
            transfers[-1 - i % 7].cancel()

    got: set[int] = set()

    def take_all() -> bool:
        with contextlib.suppress(CommandError):
            while True:
                got.add(int(pair.there.take(0.01)[1]))
        return all(transfer.done for transfer in transfers) and len(got) >= statuses(transfers).count("done")

    eventually(take_all, "an end of all transfers, and all that are done delivered")
    assert set(statuses(transfers)) <= {"done", "cancelled"}
    assert got == {i for i, status in enumerate(statuses(transfers)) if status == "done"}


def statuses(transfers: list[xr.Transfer]) -> list[str]:
    return [transfer.status for transfer in transfers]


def test_messages_go_on_with_the_next_pool(pair: Pair) -> None:
    pair.there.receive(1, 16)
    pair.here.submit_send(pair.there.address, b"one").wait(WAIT_S)
    assert pair.there.take()[1] == b"one"
    pair.there.call("close_pool")

    transfer = pair.here.submit_send(pair.there.address, b"two")
    pair.there.receive(1, 16)

    transfer.wait(WAIT_S)
    assert pair.there.take()[1] == b"two"


def test_message_to_itself(pair: Pair) -> None:
    with pair.here.submit_recvs(1, 16) as pool:
        pair.here.submit_send(pair.here.address, b"self").wait(WAIT_S)

        message = pool.recv(WAIT_S)
        assert (message.peer, message.data) == (pair.here.address, b"self")


def test_messages_reach_a_callback(pair: Pair) -> None:
    got: list[bytes] = []
    with pair.here.submit_recvs(4, 16, on_message=lambda message: got.append(message.data)):
        for i in range(20):
            pair.there.send(pair.here.address, bytes([i]))

        eventually(lambda: len(got) == 20, "20 messages in the callback")
    assert sorted(got) == [bytes([i]) for i in range(20)]


def test_senders_from_several_engines_and_threads_share_a_pool(pair: Pair) -> None:
    engines = [pair.there, pair.another("second"), pair.another("third")]
    with pair.here.submit_recvs(3, 16) as pool:
        got: list[tuple[str, bytes]] = []
        reader = start_thread(pair.here, lambda: got.extend(taken(pool, 30)), "reader")
        for i in range(10):
            for engine in engines:
                engine.send(pair.here.address, bytes([i]))
        reader.join(WAIT_S)

    assert sorted(got) == sorted((engine.address.name, bytes([i])) for engine in engines for i in range(10))


def taken(pool: xr.ReceivePool, count: int) -> list[tuple[str, bytes]]:
    messages = [pool.recv(WAIT_S) for _ in range(count)]
    return [(message.peer.name, message.data) for message in messages]

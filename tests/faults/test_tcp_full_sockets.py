"""What waits for room in a socket: it is told in time, and nobody's memory is sent that is no longer for sending."""

import array
import fcntl
import os
import select
import socket
import struct
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress

import numpy as np
import pytest

import crossrail as xr
from crossrail.observe import read_traffic
from tests.conftest import EngineFactory
from tests.faults.test_tcp_targets import connection_to, share_frame, shared_answer
from tests.support import tcp_wire as wire
from tests.support.leaks import open_fds
from tests.support.limits import WAIT_S, eventually
from tests.support.tcp_engines import TCP, descriptor_of, region_id
from tests.support.tcp_wire import Frame, RawAcceptor, RawPeer

pytestmark = pytest.mark.timeout(120)

MIB = 1 << 20
MESSAGE = (1 << 32) - 1  # in place of a channel
TOO_LONG = 8  # Status, native/transport/types.h


def waiting_bytes(connection: socket.socket) -> int:
    """That have arrived and are not read."""
    count = array.array("i", [0])
    fcntl.ioctl(connection, termios.FIONREAD, count)
    return count[0]


def until_full(connection: socket.socket, takes_no_more: Callable[[], bool] = lambda: True) -> None:
    """Until no more arrives, since nobody reads, and whoever sends has no more room either."""
    looks: list[int] = []

    def is_still() -> bool:
        looks.append(waiting_bytes(connection) if takes_no_more() else 0)
        return looks[-1] > 0 and len(looks) >= 15 and len(set(looks[-15:])) == 1

    eventually(is_still, "a socket that is full")


# --- what is to be told ---


def test_write_beside_a_read_is_acknowledged_without_being_asked_for(open_engine: EngineFactory) -> None:
    """Also where the last of the read's data was waiting for room when the write came, which depends on its length."""
    engine = open_engine("target", **TCP)
    region = engine.alloc(8 * MIB)
    key = region_id(region)
    for number, length in enumerate(range(MIB // 2, 8 * MIB + 1, MIB // 2), 1):
        with RawPeer(engine.address).connected(1, bulk=True) as connection:
            connection.settimeout(WAIT_S)
            connection.sendall(wire.read_frame(key, 0, length, 1))
            until_full(connection)
            connection.sendall(wire.write_frame(key, [(0, b"x" * 100, 5)]))
            engine.imm_counter(5).wait(1, WAIT_S)

            acknowledged(connection, 2, f"a read of {length} bytes and a write (number {number})")


def acknowledged(connection: socket.socket, operations: int, what: str) -> None:
    placed = 0
    while placed < operations:
        try:
            kind, meta, _ = wire.receive_frame(connection)
        except TimeoutError:
            raise AssertionError(f"{what}: only {placed} acknowledged") from None
        assert kind != 0, "the connection ended"
        if kind == Frame.ACK:
            (_, placed, _, _) = struct.unpack("<QQII", meta)


# --- memory that is no longer for sending ---


def payload_of(connection: socket.socket) -> Iterator[bytes]:
    """Of the frames that come, until the connection ends or nothing comes for a while."""
    connection.settimeout(1)
    try:
        while True:
            kind, _, payload = wire.receive_frame(connection)
            if kind == 0:
                return
            yield payload
    except (TimeoutError, ConnectionError):
        return


LEAVING = {"says goodbye": wire.frame(Frame.BYE, b"bye"), "begins another link": b""}


@pytest.mark.parametrize("how", LEAVING)
def test_region_that_closed_is_not_sent_to_who_left_a_shared_connection(open_engine: EngineFactory, how: str) -> None:
    engine = open_engine("here", **TCP)
    source = np.full(MIB, ord("A"), np.uint8)
    region = engine.register(source, access="read")
    key = region_id(region)
    with closing(RawAcceptor(engine.address)) as there, connection_to(there, engine) as (connection, _):
        connection.sendall(share_frame(10))
        assert shared_answer(connection) == (0, 1, 0)
        connection.sendall(b"".join(wire.read_frame(key, 0, MIB, number) for number in range(1, 13)))
        until_full(connection)
        connection.sendall(LEAVING[how] + share_frame(11) + wire.write_frame(0, [(0, b"", 7)]))
        engine.imm_counter(7).wait(1, WAIT_S)

        region.close(WAIT_S)
        source[:] = ord("B")

        received = list(payload_of(connection))
        assert sum(payload.count(b"A") for payload in received) > 0
        assert sum(payload.count(b"B") for payload in received) == 0, "bytes of a region that was closed"


def hangs_up_on(connection: socket.socket, said: bytes) -> bool:
    try:
        connection.sendall(said)
    except ConnectionError:
        return True
    return False


WORDS = {
    "taken": lambda link_id, message_id: wire.frame(Frame.TAKEN, struct.pack("<QQQ", link_id, message_id, 1)),
    "too long": lambda _, message_id: wire.frame(Frame.REFUSED, struct.pack("<QII", message_id, MESSAGE, TOO_LONG)),
}


@pytest.mark.parametrize("word", WORDS)
def test_message_that_was_not_sent_cannot_be_taken(open_engine: EngineFactory, word: str) -> None:
    """Its buffer would be another's while the kernel has still to read it."""
    length = 250_000
    engine = open_engine("here", polling="manual", message_bytes_max=256 << 10, **TCP)  # sends when it is told to
    mine = engine.alloc(16_000)
    with closing(RawAcceptor(engine.address)) as there, connection_to(there, engine) as (connection, link_id):
        with engines_end(connection) as end:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 100_000)  # less than a message
        region = xr.RegionDescriptor.from_bytes(descriptor_of(mine, there.address))
        for _ in range(1000):
            engine.submit_write(mine, region)
        drive_until_full(engine, connection)
        messages = [engine.submit_send(there.address, bytes(length)) for _ in range(2)]
        framed = works_of(engine)
        while works_of(engine) == framed:  # the messages come first in what is handed over next
            wire.receive_exactly(connection, 20_000)
            drive_until_full(engine, connection)

        connection.sendall(WORDS[word](link_id, 2))

        def is_hung_up_on() -> bool:
            engine.progress()
            return read_traffic(engine).rails[0].counts.broken == 1

        eventually(is_hung_up_on, "it is hung up on")
        assert not messages[1].done


def engines_end(connection: socket.socket) -> socket.socket:
    """The other end of this connection: it is in this process, too."""
    for fd, what in open_fds().items():
        if not what.startswith("socket:"):
            continue
        end = socket.socket(fileno=os.dup(fd))
        with suppress(OSError):  # not connected
            if end.getsockname() == connection.getpeername() and end.getpeername() == connection.getsockname():
                return end
        end.close()
    raise AssertionError("the engine has no such socket")


def drive_until_full(engine: xr.Engine, connection: socket.socket) -> None:
    """Until it has handed over what the sockets have room for."""
    looks: list[tuple[int, int]] = []
    while len(looks) < 20 or len(set(looks[-20:])) > 1:
        for _ in range(20):
            engine.progress()
        time.sleep(0.001)
        looks.append((works_of(engine), waiting_bytes(connection)))


def works_of(engine: xr.Engine) -> int:
    return read_traffic(engine).rails[0].counts.works


def test_what_was_not_sent_cannot_be_acknowledged(open_engine: EngineFactory) -> None:
    """By a peer that reads nothing. What is over is its owner's again: it would be sent as it is by then."""
    engine = open_engine("here", **TCP)
    count, length = 64, MIB // 4
    source = np.full(count * length, ord("A"), np.uint8)
    mine = engine.register(source, access="local")
    with closing(RawAcceptor(engine.address)) as there, connection_to(there, engine) as (small, link_id):
        region = xr.RegionDescriptor.from_bytes(descriptor_of(engine.alloc(count * length), there.address))
        transfers = [engine.submit_write(mine, region, length, src_offset=i * length) for i in range(count)]
        with there.accept() as bulk:
            assert there.handshake(bulk) == link_id
            with engines_end(bulk) as end:
                until_full(bulk, lambda: not select.select([], [end], [], 0)[1])  # no engine that has yet to begin
            acks = [wire.frame(Frame.ACK, struct.pack("<QQII", link_id, placed, 1, 0)) for placed in range(1, 1000)]
            small.sendall(b"".join(acks))
            eventually(lambda: hangs_up_on(small, acks[-1]), "it is hung up on")
            over = [number for number, transfer in enumerate(transfers) if transfer.done]
            for number in over:
                source[number * length : (number + 1) * length] = ord("B")

            received = list(payload_of(bulk))
    assert 0 < len(over) < count
    assert sum(payload.count(b"B") for payload in received) == 0, "bytes that were written after the end of a transfer"

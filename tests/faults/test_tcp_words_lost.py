"""What is told by a connection whose other end has gone is told again by another: the peer does not ask for it."""

import socket
import struct
from contextlib import closing, suppress
from typing import Any

import pytest

import crossrail as xr
from tests.conftest import EngineFactory
from tests.support import tcp_wire as wire
from tests.support.limits import WAIT_S
from tests.support.tcp_wire import Frame, RawAcceptor, RawPeer

TCP: dict[str, Any] = {"transport": "tcp", "rails": ["127.0.0.1"]}
MESSAGE = (1 << 32) - 1  # in place of a channel
CANCELLED = 2


@pytest.fixture
def target(open_engine: EngineFactory) -> xr.Engine:
    return open_engine("target", **TCP)


def taken(frame: tuple[int, bytes, bytes]) -> list[int]:
    """Ids of the messages that this frame says the pool has."""
    kind, meta, _ = frame
    if kind != Frame.TAKEN:
        return []
    _, first, count = struct.unpack("<QQQ", meta)
    return list(range(first, first + count))


def test_message_that_was_taken_is_said_again_when_the_word_was_lost(target: xr.Engine) -> None:
    peer = RawPeer(target.address)
    with target.submit_recvs(4, 100) as pool, peer.connected(0) as first, peer.connected(1) as second:
        for connection in (first, second):
            connection.settimeout(WAIT_S)
        # The initiator's end of the first is gone, and it had nothing to ask about; the target has not noticed.
        second.sendall(wire.message_frame(1, b"once"))
        while taken(wire.receive_frame(first)) != [1]:
            pass

        wire.reset(first)

        while taken(wire.receive_frame(second)) != [1]:
            pass
        assert bytes(pool.recv(WAIT_S).data) == b"once"
        assert pool.poll(1) == []


# --- messages that were cancelled while they waited for a buffer ---


def recalled(message_id: int) -> tuple[int, bytes]:
    return Frame.REFUSED, struct.pack("<QII", message_id, MESSAGE, CANCELLED)


def heard(connection: socket.socket, kind: int) -> tuple[bytes, bytes]:
    """Metadata and payload of the next frame of this kind."""
    while (frame := wire.receive_frame(connection))[0] != kind:
        assert frame[0] != 0, "the connection ended"
    return frame[1], frame[2]


def test_message_that_was_given_back_is_said_again_when_the_word_was_lost(target: xr.Engine) -> None:
    peer = RawPeer(target.address)
    recall = wire.frame(Frame.RECALL, struct.pack("<Q", 1))
    with peer.connected(0) as first, peer.connected(1) as second:
        for connection in (first, second):
            connection.settimeout(WAIT_S)
        second.sendall(wire.message_frame(1, b"never") + wire.message_frame(2, b"once") + recall)
        while wire.receive_frame(first)[:2] != recalled(1):
            pass

        wire.reset(first)

        while wire.receive_frame(second)[:2] != recalled(1):
            pass
        with target.submit_recvs(4, 100) as pool:
            assert bytes(pool.recv(WAIT_S).data) == b"once"
            second.sendall(recall + wire.frame(Frame.RECALL, struct.pack("<Q", 2)) + wire.message_frame(3, b"last"))
            assert bytes(pool.recv(WAIT_S).data) == b"last"
            assert pool.poll(1) == []


@pytest.mark.parametrize("fate", ["given back", "taken", "never arrived"])
def test_peer_is_asked_for_it_again_when_the_question_was_lost(open_engine: EngineFactory, fate: str) -> None:
    engine = open_engine("here", **TCP)
    with closing(RawAcceptor(engine.address)) as there:
        transfer = engine.submit_send(there.address, b"message")
        with there.accept() as connection:
            link_id = there.handshake(connection)
            (message_id,) = struct.unpack("<Q", heard(connection, Frame.MESSAGE)[0])
            if fate != "never arrived":
                connection.sendall(wire.frame(Frame.ACK, struct.pack("<QQII", link_id, 1, 0, 0)))
            assert transfer.cancel()
            if fate != "never arrived":
                assert heard(connection, Frame.RECALL) == (struct.pack("<Q", message_id), b"")
            assert not transfer.done
            wire.reset(connection)
        with there.accept() as connection:
            there.handshake(connection)
            asked: dict[int, bytes] = {}
            while len(asked) < (1 if fate == "never arrived" else 2):
                kind, asked_for, _ = wire.receive_frame(connection)
                asked[kind] = asked_for
            acked, channel, _ = struct.unpack("<QII", asked[Frame.RESOLVE])
            assert asked.get(Frame.RECALL) == (None if fate == "never arrived" else struct.pack("<Q", message_id))
            connection.sendall(wire.frame(Frame.RESOLVED, struct.pack("<QQII", acked, 0, channel, 1)))
            if fate == "given back":
                kind, meta = recalled(message_id)
                connection.sendall(wire.frame(kind, meta))
            elif fate == "taken":
                connection.sendall(wire.frame(Frame.TAKEN, struct.pack("<QQQ", link_id, message_id, 1)))
            if fate == "taken":
                transfer.wait(WAIT_S)
            else:
                with pytest.raises(xr.TransferCancelled):
                    transfer.wait(WAIT_S)


def test_message_that_nobody_cancelled_cannot_be_given_back(open_engine: EngineFactory) -> None:
    engine = open_engine("here", peer_timeout_s=1.0, **TCP)
    with closing(RawAcceptor(engine.address)) as there:
        transfer = engine.submit_send(there.address, b"message")
        with there.accept() as connection:
            link_id = there.handshake(connection)
            (message_id,) = struct.unpack("<Q", heard(connection, Frame.MESSAGE)[0])
            kind, meta = recalled(message_id)
            connection.sendall(wire.frame(Frame.ACK, struct.pack("<QQII", link_id, 1, 0, 0)) + wire.frame(kind, meta))
            with suppress(ConnectionResetError):  # it hangs up before it has read all
                while wire.receive_frame(connection)[0] != 0:
                    pass
        there.close()
        with pytest.raises(xr.PeerLost):
            transfer.wait(WAIT_S)

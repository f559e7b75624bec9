"""What is told by a connection whose other end has gone is told again by another: the peer does not ask for it."""

import struct

import pytest

import crossrail as xr
from tests.conftest import EngineFactory
from tests.support import tcp_wire as wire
from tests.support.limits import WAIT_S
from tests.support.tcp_wire import RawPeer


@pytest.fixture
def target(open_engine: EngineFactory) -> xr.Engine:
    return open_engine("target", transport="tcp", rails=["127.0.0.1"])


def taken(frame: tuple[int, bytes, bytes]) -> list[int]:
    """Ids of the messages that this frame says the pool has."""
    kind, meta, _ = frame
    if kind != wire.Frame.TAKEN:
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

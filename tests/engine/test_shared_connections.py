"""Over tcp, small operations of both directions share a connection, whoever made it, however they meet."""

import socket
import struct
import threading
from collections.abc import Iterator

import numpy as np
import pytest

import crossrail as xr
from tests.conftest import EngineFactory
from tests.support.limits import WAIT_S, eventually
from tests.support.proxy import ProxiedAddress
from tests.support.tcp_wire import Frame, RawPeer, frame, receive_frame, reset, with_ports

NBYTES = 64


class Meeting:
    """Two engines that reach each other only through proxies, which count connections."""

    def __init__(self, open_engine: EngineFactory) -> None:
        self.here, self.there = (open_engine(name, transport="tcp", rails=["127.0.0.1"]) for name in ("here", "there"))
        self.way_there, self.way_back = ProxiedAddress(self.there.address), ProxiedAddress(self.here.address)
        self.src = {engine: engine.alloc(NBYTES) for engine in (self.here, self.there)}
        self.dst = {engine: engine.alloc(NBYTES) for engine in (self.here, self.there)}

    def connect(self, engine: xr.Engine) -> None:
        engine.connect((self.way_there if engine is self.here else self.way_back).address, WAIT_S)

    def write(self, engine: xr.Engine, value: int) -> None:
        """One counted write, waited for at both ends, and its bytes looked at."""
        other = self.there if engine is self.here else self.here
        self.src[engine].array()[:] = value
        engine.submit_write(self.src[engine], self.dst[other].descriptor, imm=1).wait(WAIT_S)
        other.imm_counter(1).wait(1, WAIT_S)
        assert np.all(self.dst[other].array() == value)

    def open_connections(self) -> int:
        return sum(len(proxy.passed_bytes()) for proxy in self.way_there.proxies + self.way_back.proxies)

    def close(self) -> None:
        self.way_there.close()
        self.way_back.close()


@pytest.fixture
def meeting(open_engine: EngineFactory) -> Iterator[Meeting]:
    made = Meeting(open_engine)
    yield made
    made.close()


def test_answers_go_back_over_the_connection_that_is_there(meeting: Meeting) -> None:
    meeting.connect(meeting.here)
    meeting.write(meeting.here, 1)

    meeting.connect(meeting.there)
    meeting.write(meeting.there, 2)
    meeting.write(meeting.here, 3)

    assert meeting.open_connections() == 1


def test_who_met_at_the_same_moment_ends_on_one_connection(meeting: Meeting) -> None:
    gate = threading.Barrier(2)

    def run(engine: xr.Engine) -> None:
        gate.wait(WAIT_S)
        meeting.connect(engine)

    threads = [threading.Thread(target=run, args=(engine,)) for engine in (meeting.here, meeting.there)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    for value in range(1, 6):
        meeting.write(meeting.here, value)
        meeting.write(meeting.there, value)

    eventually(lambda: meeting.open_connections() == 1, "one connection for both directions")
    meeting.write(meeting.here, 7)
    meeting.write(meeting.there, 8)


@pytest.mark.parametrize("who", ["here", "there"])
def test_forgetting_a_peer_leaves_its_own_operations_alone(meeting: Meeting, who: str) -> None:
    forgetful, other = (meeting.here, meeting.there) if who == "here" else (meeting.there, meeting.here)
    for engine in (meeting.here, meeting.there):
        meeting.connect(engine)
        meeting.write(engine, 1)

    forgetful.forget_peer(other.address)
    for value in range(2, 5):
        meeting.write(other, value)
    meeting.connect(forgetful)
    meeting.write(forgetful, 9)
    meeting.write(other, 10)


def test_cut_connection_comes_back_for_both(meeting: Meeting) -> None:
    for engine in (meeting.here, meeting.there):
        meeting.connect(engine)
        meeting.write(engine, 1)

    for value in range(2, 12):
        for proxy in meeting.way_there.proxies + meeting.way_back.proxies:
            proxy.cut()
        meeting.write(meeting.here, value)
        meeting.write(meeting.there, value)

    eventually(lambda: meeting.open_connections() == 1, "one connection for both directions")


def share_with(peer: socket.socket) -> int:
    """Lets an engine use the connection that this peer made, as it asks to. Returns the id of its link."""
    peer.settimeout(WAIT_S)
    kind, meta, _ = receive_frame(peer)
    while kind == Frame.ACK:
        kind, meta, _ = receive_frame(peer)
    assert kind == Frame.SHARE
    link_id, channel, epoch, _ = struct.unpack("<QIIQ", meta)
    peer.sendall(frame(Frame.SHARED, struct.pack("<IIQ", channel, epoch, 0)))
    return int(link_id)


def take_message(peer: socket.socket, link_id: int, number: int) -> bytes:
    """The message of that number on its link, which is also the number of the operation."""
    kind, meta, payload = receive_frame(peer)
    assert (kind, meta) == (Frame.MESSAGE, struct.pack("<Q", number))
    peer.sendall(frame(Frame.ACK, struct.pack("<QQII", link_id, number, 0, 0)))
    peer.sendall(frame(Frame.TAKEN, struct.pack("<QQQ", link_id, number, 1)))
    return payload


def test_peer_behind_a_firewall_is_answered_over_each_connection_that_it_makes(open_engine: EngineFactory) -> None:
    """Nobody can connect to it: that an attempt to do so failed is no reason not to use the next one that it makes."""
    engine = open_engine("open", transport="tcp", rails=["127.0.0.1"])
    peer = RawPeer(engine.address)
    with socket.create_server(("127.0.0.1", 0)) as firewall:
        firewall.settimeout(WAIT_S)
        peer.sender = with_ports(peer.sender, [firewall.getsockname()[1]])
        address = xr.Address.from_bytes(peer.sender)
        with peer.connected() as first:
            one = engine.submit_send(address, b"one")
            assert take_message(first, share_with(first), 1) == b"one"
            one.wait(WAIT_S)
        for _ in range(2):  # the second attempt tells that the first has failed
            attempt, _ = firewall.accept()
            reset(attempt)

        with peer.connected(resumes=True) as second:
            two = engine.submit_send(address, b"two")
            assert take_message(second, share_with(second), 2) == b"two"
            two.wait(WAIT_S)

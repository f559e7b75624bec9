"""Service messages that no engine of ours would send: each is ignored with an event, or ends the connection."""

import struct

import pytest

import crossrail as xr
from tests.conftest import EngineFactory
from tests.support import tcp_wire as wire
from tests.support.limits import WAIT_S, eventually
from tests.support.tcp_wire import RawPeer

VERSION = 2
KINDS = {"ping": 1, "question": 2, "verdict": 3}
EVENTS_MAX = 16


def question(count: int, pages: int, imm: int = 5, reads: int = 0) -> bytes:
    body = struct.pack("<QQQQQQIBI", 1, 1 << 16, 0, 10, 10, 0, imm, reads, count)
    return bytes([VERSION, KINDS["question"]]) + body + bytes(4 * pages)


@pytest.fixture
def target(open_engine: EngineFactory) -> xr.Engine:
    return open_engine("target", transport="tcp", rails=["127.0.0.1"])


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        (b"", "malformed"),
        (bytes([VERSION]), "malformed"),
        (bytes([VERSION + 1, KINDS["ping"]]), f"version {VERSION + 1}"),
        (bytes([VERSION, 0]), "kind 0"),
        (bytes([VERSION, 77]), "kind 77"),
        (bytes([VERSION, KINDS["ping"], 0]), "malformed"),
        (question(0, 0), "malformed"),
        (question(3, 2), "malformed"),
        (question(961, 960), "malformed"),
        (question(1, 1, imm=1 << 28), "malformed"),
        (question(1, 1, reads=1), "malformed"),  # of a read nothing is counted
        (question(1, 1, reads=2), "malformed"),
        (bytes([VERSION, KINDS["verdict"]]) + struct.pack("<QBQ", 1, 99, 0), "malformed"),
    ],
)
def test_malformed_service_message_is_ignored_and_said(target: xr.Engine, payload: bytes, words: str) -> None:
    events: list[xr.EngineEvent] = []
    target.on_event(events.append)
    with RawPeer(target.address).connected() as connection:
        connection.sendall(wire.service_frame(payload) + wire.service_frame(wire.SERVICE_PING) + wire.ping_frame())
        while wire.receive_frame(connection)[0] != wire.Frame.PONG:  # the connection goes on
            pass

    eventually(lambda: [e for e in events if e.kind == "protocol-error" and words in e.detail], "the event")
    assert all("ignored" in event.detail for event in events)


def test_flood_of_malformed_service_messages_is_said_only_so_often(target: xr.Engine) -> None:
    events: list[xr.EngineEvent] = []
    target.on_event(events.append)
    with RawPeer(target.address).connected() as connection:
        connection.sendall(wire.service_frame(b"nonsense") * 1000 + wire.ping_frame())
        while wire.receive_frame(connection)[0] != wire.Frame.PONG:
            pass

    eventually(lambda: len(events) >= EVENTS_MAX, "the events")
    assert len(events) == EVENTS_MAX


@pytest.mark.parametrize("payload", [bytes(4001), bytes(65_535)])
def test_too_long_service_message_ends_the_connection(target: xr.Engine, payload: bytes) -> None:
    events: list[xr.EngineEvent] = []
    target.on_event(events.append)
    with RawPeer(target.address).connected() as connection:
        connection.sendall(wire.service_frame(payload)[:4096])
        assert wire.receive_frame(connection)[0] == 0

    eventually(lambda: [e for e in events if e.kind == "protocol-error"], "the event")


def test_verdict_that_nobody_asked_for_changes_nothing(target: xr.Engine, open_engine: EngineFactory) -> None:
    peer = open_engine("peer", transport="tcp", rails=["127.0.0.1"])
    src, dst = target.alloc(1000), peer.alloc(1000)
    with RawPeer(target.address).connected() as connection:
        for token in range(20):  # of a transfer of its own, if it guesses well
            failed = bytes([VERSION, KINDS["verdict"]]) + struct.pack("<QBQ", token, 4, 0)
            connection.sendall(wire.service_frame(failed))
        transfers = [target.submit_write(src, dst.descriptor, imm=1, verify=True) for _ in range(10)]
        for transfer in transfers:
            transfer.wait(WAIT_S)

    peer.imm_counter(1).wait(10, WAIT_S)

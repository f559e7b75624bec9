"""Frames and lists of addresses: what is accepted, and that nothing else is."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossrail.doctor.reach import wire
from crossrail.doctor.reach.rails import Rail
from crossrail.doctor.reach.wire import Frame, Kind, Status, WireError

RAIL = {"interface": "eth0", "address": "10.0.0.1", "mtu": 9000, "mbit_per_s": 100000}


def test_frame_survives_the_wire() -> None:
    frame = Frame(Kind.SINK, 2000, Status.BUSY, "1.2.3")

    assert wire.decode(wire.encode(frame)) == frame
    assert len(wire.encode(Frame(Kind.PING, 1, version="x" * 500))) == wire.FRAME_BYTES


@given(st.binary(max_size=200))
def test_bytes_that_are_no_frame_are_refused(data: bytes) -> None:
    try:
        frame = wire.decode(data)
    except WireError:
        return
    assert data.startswith(b"XRDR") and len(data) == wire.FRAME_BYTES
    assert frame.version.isprintable()


@given(st.binary(min_size=60, max_size=60))
def test_any_frame_is_judged_without_raising(rest: bytes) -> None:
    assert wire.check_request(wire.decode(b"XRDR" + rest)) in set(Status)


@pytest.mark.parametrize(
    ("frame", "status"),
    [
        (Frame(Kind.RAILS, 0), Status.OK),
        (Frame(Kind.PING, 20), Status.OK),
        (Frame(Kind.SOURCE, 10_000), Status.OK),
        (Frame(Kind.PORT, 0), Status.OK),
        (Frame(Kind.PORT, 1), Status.BAD_REQUEST),
        (Frame(Kind.SEEN, 0), Status.OK),
        (Frame(Kind.RAILS, 1), Status.BAD_REQUEST),
        (Frame(Kind.PING, 0), Status.BAD_REQUEST),
        (Frame(Kind.PING, 1 << 63), Status.BAD_REQUEST),
        (Frame(Kind.SOURCE, 10_001), Status.BAD_REQUEST),
        (Frame(0, 0), Status.BAD_REQUEST),
        (Frame(200, 0), Status.BAD_REQUEST),
        (Frame(Kind.RAILS, 0, Status.BUSY), Status.BAD_REQUEST),
        (Frame(Kind.RAILS, 0, protocol=2), Status.OTHER_PROTOCOL),
        (Frame(200, 0, protocol=2), Status.OTHER_PROTOCOL),
    ],
)
def test_requests_are_bounded(frame: Frame, status: Status) -> None:
    assert wire.check_request(frame) is status


def test_rails_survive_the_wire() -> None:
    rails = [Rail("eth0", "10.0.0.1", 9000, 100_000), Rail("eth1", "fd00::1", 1500, None)]

    assert wire.decode_rails(wire.encode_rails(rails)) == rails
    assert len(wire.encode_rails([Rail("x" * 15, "fd00:1111:2222:3333:4444:5555:6666:7777", 65536, 400_000)] * 99)) < (
        wire.RAILS_BYTES_MAX
    )


@pytest.mark.parametrize(
    "content",
    [
        None,
        {},
        [1],
        [[]],
        [RAIL] * 65,
        [{}],
        [RAIL | {"mtu": True}],
        [RAIL | {"mtu": -1}],
        [RAIL | {"mtu": 1 << 40}],
        [RAIL | {"mbit_per_s": 1.5}],
        [RAIL | {"address": "example.com"}],
        [RAIL | {"address": "fe80::1%eth0"}],
        [RAIL | {"address": 5}],
        [RAIL | {"interface": "e" * 65}],
    ],
)
def test_lists_that_are_no_rails_are_refused(content: object) -> None:
    with pytest.raises(WireError):
        wire.decode_rails(json.dumps(content).encode())


@pytest.mark.parametrize("data", [b"", b"\xff", b"[" * 100_000, b'[{"a":'])
def test_bytes_that_are_no_json_are_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        wire.decode_rails(data)


@pytest.mark.parametrize("data", [b"", b"10.0.0", b"\xff\xfe", b"10.0.0.1\n", b"\x1b[2J"])
def test_text_that_is_no_address_is_refused(data: bytes) -> None:
    with pytest.raises(WireError, match="no IP address"):
        wire.decode_address(data)

    assert wire.decode_address(b"fe80::1%eth0") == "fe80::1"


def test_text_of_a_peer_cannot_command_the_terminal() -> None:
    (rail,) = wire.decode_rails(json.dumps([RAIL | {"interface": "\x1b]0;owned\x07"}]).encode())

    assert rail.interface == "?]0;owned?"
    assert wire.decode(wire.encode(Frame(Kind.PING, 1, version="\x1b[2J"))).version == "?[2J"

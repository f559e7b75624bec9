"""Whoever measures, against strangers at the other end."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from crossrail.doctor.finding import Severity
from crossrail.doctor.reach import measure as measuring
from crossrail.doctor.reach import wire
from crossrail.doctor.reach.measure import Pair, possible_pairs
from crossrail.doctor.reach.rails import Rail
from crossrail.doctor.reach.verdict import judge
from crossrail.doctor.reach.wire import Frame, Kind, Status
from tests.doctor.reaching import LOOPBACK, run
from tests.support.limits import SLOWNESS, WAIT_S

Script = Callable[[socket.socket], None]


@contextlib.contextmanager
def stranger(script: Script) -> Iterator[int]:
    """Serves every connection by the script. Yields its port."""
    server = socket.create_server(("127.0.0.1", 0))
    server.settimeout(0.05)
    ending = threading.Event()

    def serve() -> None:
        while not ending.is_set():
            with contextlib.suppress(TimeoutError):
                connection, _ = server.accept()
                with connection, contextlib.suppress(OSError):
                    connection.settimeout(1.0)
                    script(connection)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield int(server.getsockname()[1])
    finally:
        ending.set()
        thread.join()
        server.close()


def answering(frame: Frame, more: bytes = b"") -> Script:
    def script(connection: socket.socket) -> None:
        connection.recv(wire.FRAME_BYTES)
        connection.sendall(wire.encode(frame) + more)

    return script


def hold(connection: socket.socket) -> None:
    time.sleep(0.6)


def trickle(connection: socket.socket) -> None:
    for byte in wire.encode(Frame(Kind.RAILS, 0)):
        connection.send(bytes([byte]))
        time.sleep(0.05)


@pytest.mark.parametrize(
    "script",
    [
        lambda connection: connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 9),
        lambda connection: None,
        hold,
        trickle,
        answering(Frame(Kind.RAILS, 1 << 60)),
        answering(Frame(Kind.RAILS, 9), b"[" * 9),
        answering(Frame(Kind.RAILS, 2), b"["),
        answering(Frame(Kind.SINK, 0)),
        answering(Frame(Kind.RAILS, 0, 99)),
    ],
    ids=[
        "http",
        "closes",
        "silent",
        "trickles",
        "huge",
        "no-json",
        "cut-short",
        "other-kind",
        "other-status",
    ],
)
def test_stranger_at_the_other_end(script: Script, hurried: None) -> None:
    check_attempt(script, "broken")


@pytest.mark.parametrize(
    ("answer", "state"),
    [
        (Frame(Kind.RAILS, 0, Status.BUSY), "busy"),
        (Frame(Kind.RAILS, 0, Status.OTHER_PROTOCOL, "9.9", 9), "version"),
    ],
    ids=["busy", "protocol"],
)
def test_listener_that_does_not_measure_with_us(answer: Frame, state: str, short_grace: float) -> None:
    check_attempt(answering(answer), state)


def check_attempt(script: Script, state: str) -> None:
    with stranger(script) as port:
        matrix = run(port)

    assert [attempt.state for attempt in matrix.attempts] == [state]
    assert judge(matrix, "1.0")[0].severity is Severity.ERROR


def streaming(sink: Script, source: Script) -> Script:
    """Answers everything as a listener does, but for the streams."""

    def script(connection: socket.socket) -> None:
        frame = wire.decode(connection.recv(wire.FRAME_BYTES))
        if frame.kind == Kind.RAILS:
            data = wire.encode_rails([LOOPBACK])
            connection.sendall(wire.encode(Frame(Kind.RAILS, len(data))) + data)
            return
        connection.sendall(wire.encode(frame))
        for _ in range(frame.value if frame.kind == Kind.PING else 0):
            connection.sendall(connection.recv(wire.FRAME_BYTES))
        if frame.kind in (Kind.SINK, Kind.SOURCE):
            (sink if frame.kind == Kind.SINK else source)(connection)

    return script


def stop(_connection: socket.socket) -> None:
    time.sleep(wire.GRACE_S + 0.1)


def take_slowly(connection: socket.socket) -> None:
    """Until after we are given up: one of our writes, of 1 MiB, lasts longer."""
    deadline = time.monotonic() + wire.GRACE_S + 1
    while time.monotonic() < deadline:
        connection.recv(30_000)
        time.sleep(0.05 * SLOWNESS)


def give_slowly(connection: socket.socket) -> None:
    """Until nobody takes it any more."""
    with contextlib.suppress(OSError):
        while True:
            connection.sendall(bytes(1000))
            time.sleep(0.05)


@pytest.mark.parametrize(("sink", "source"), [(stop, stop), (take_slowly, stop)], ids=["there", "back"])
def test_peer_that_stops_taking_data_is_stalled(short_grace: float, sink: Script, source: Script) -> None:
    with stranger(streaming(sink, source)) as port:
        matrix = run(port)

    (pair,) = matrix.pairs
    assert pair.state == "stalled" and pair.rtt_us is not None
    finding = judge(matrix, "1.0")[0]
    assert finding.check == "reach.stalled" and "ping -M do" in finding.fixes[0].command


def test_network_that_is_slow_is_not_stalled(short_grace: float) -> None:
    """A buffer full takes it longer than we wait, each way."""
    with stranger(streaming(take_slowly, give_slowly)) as port:
        matrix = run(port)

    (pair,) = matrix.pairs
    assert pair.state == "ok"
    assert pair.out_gb_per_s is not None and 0 < pair.out_gb_per_s < 0.1
    assert pair.in_gb_per_s is not None and 0 < pair.in_gb_per_s < 0.001


def test_long_way_is_measured_by_fewer_round_trips(short_grace: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty would take longer than either side waits: that is no reason to say that nothing connects."""
    way_s = short_grace / 15
    monkeypatch.setattr(measuring, "_PINGS_S", 4 * way_s)
    asked = []

    def script(connection: socket.socket) -> None:
        frame = wire.decode(connection.recv(wire.FRAME_BYTES))
        asked.append(frame.value)
        connection.sendall(wire.encode(frame))
        for _ in range(frame.value):
            ping = connection.recv(wire.FRAME_BYTES)
            time.sleep(way_s)
            connection.sendall(ping)

    with stranger(script) as port:
        pair = measuring._Prober(port, "1.0", 0.05).probe(Pair(LOOPBACK, LOOPBACK))

    assert pair.state == "ok" and pair.rtt_us is not None and pair.rtt_us >= way_s * 1e6
    assert asked[0] == 1 and max(asked) < measuring.PINGS


def test_peer_that_sends_for_ever_is_left(short_grace: float) -> None:
    outlasted = threading.Event()

    def script(connection: socket.socket) -> None:
        frame = wire.decode(connection.recv(wire.FRAME_BYTES))
        connection.sendall(wire.encode(frame))
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            connection.sendall(bytes(1 << 16))
        outlasted.set()

    pair = Pair(LOOPBACK, LOOPBACK)
    with stranger(script) as port, pytest.raises(wire.WireError):
        measuring._Prober(port, "1.0", 0.05)._receive(pair)

    assert not outlasted.is_set()


def test_addresses_that_a_peer_names_cannot_lead_back_to_us() -> None:
    named = [Rail("evil", "127.0.0.1", 1500, None), Rail("eth0", "192.0.2.9", 1500, None)]

    pairs = possible_pairs([Rail("eth0", "192.0.2.1", 1500, None)], named, "192.0.2.9")

    assert [pair.there.address for pair in pairs] == ["192.0.2.9"]


def test_link_local_address_keeps_its_interface_and_is_no_rail() -> None:
    assert measuring.resolve("fe80::1%lo", 1) == ["fe80::1%lo"]
    rail = Rail("eth0", "2001:db8::1", 1500, None)
    assert [pair.there for pair in possible_pairs([rail], [rail], "fe80::1%lo")] == [rail]


def test_peer_behind_address_translation_is_measured_where_it_answered() -> None:
    pairs = possible_pairs(
        [Rail("eth0", "192.0.2.1", 1500, None)], [Rail("eth0", "10.0.0.5", 1500, None)], "192.0.2.77"
    )

    assert [pair.there.address for pair in pairs] == ["192.0.2.77", "10.0.0.5"]

"""Both sides over loopback, and the listener against strangers."""

import contextlib
import errno
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from crossrail.doctor.finding import Severity
from crossrail.doctor.host import Host
from crossrail.doctor.reach import listen as listening
from crossrail.doctor.reach import measure as measuring
from crossrail.doctor.reach import wire
from crossrail.doctor.reach.listen import Listener
from crossrail.doctor.reach.measure import measure
from crossrail.doctor.reach.rails import Rail, local_rails
from crossrail.doctor.reach.show import to_json
from crossrail.doctor.reach.verdict import judge
from crossrail.doctor.reach.wire import Frame, Kind, Status
from crossrail.errors import TransportError
from tests.doctor.reaching import LOOPBACK, rails, run
from tests.doctor.tree import severities
from tests.support.limits import WAIT_S, eventually
from tests.support.ports import free_port
from tests.support.seeds import Seed


@pytest.fixture
def lines() -> list[str]:
    """What the listener said."""
    return []


@pytest.fixture
def listener(nothing_leaks: None, lines: list[str]) -> Iterator[Listener]:
    with Listener(0, lambda address: [LOOPBACK], "1.0", lines.append, bind="127.0.0.1") as one:
        yield one


def connect(listener: Listener) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", listener.port), WAIT_S)
    connection.settimeout(WAIT_S)
    return connection


def answer_to(listener: Listener, data: bytes) -> bytes:
    """All that comes back until it closes."""
    with connect(listener) as connection:
        connection.sendall(data)
        received = b""
        with contextlib.suppress(ConnectionError):
            while piece := connection.recv(4096):
                received += piece
        return received


def ping_works(listener: Listener) -> bool:
    with connect(listener) as connection:
        connection.sendall(wire.encode(Frame(Kind.PING, 1)))
        deadline = time.monotonic() + WAIT_S
        answer = wire.decode(wire.receive_exactly(connection, wire.FRAME_BYTES, deadline))
        connection.sendall(bytes(wire.FRAME_BYTES))
        return answer.status == Status.OK and wire.receive_exactly(connection, wire.FRAME_BYTES, deadline) == bytes(64)


# --- the pair ---


def test_pair_over_loopback(listener: Listener, lines: list[str]) -> None:
    matrix = run(listener.port)

    assert [attempt.state for attempt in matrix.attempts] == ["ok"]
    (pair,) = matrix.pairs
    assert pair.state == "ok", pair.detail
    assert pair.rtt_us is not None and 0 < pair.rtt_us < 1e6
    assert pair.mtu == 65535 or pair.mtu == 65536
    assert pair.mss is not None and pair.mss > 500
    assert pair.out_gb_per_s is not None and pair.out_gb_per_s > 0
    assert pair.in_gb_per_s is not None and pair.in_gb_per_s > 0
    assert {f.severity for f in judge(matrix, "1.0")} <= {Severity.OK, Severity.NOTE}
    eventually(lambda: any("received" in line for line in lines) and any("sent" in line for line in lines), str(lines))
    assert "127.0.0.1 (crossrail 1.0) begins" in lines


def test_port_that_the_kernel_chose_is_tried_as_well(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    reached = run(listener.port)
    assert reached.other is not None
    assert (reached.other_port, reached.other.state) == (listener.other_port, "ok")

    with socket.socket() as nobody:  # bound, and does not listen
        nobody.bind(("127.0.0.1", 0))
        monkeypatch.setattr(Listener, "other_port", property(lambda _: nobody.getsockname()[1]))
        blocked = run(listener.port)

    assert severities(judge(blocked, "1.0"))["reach.other-port"] is Severity.NOTE, "somebody named a port"
    blocked.port = wire.PORT
    assert severities(judge(blocked, "1.0"))["reach.other-port"] is Severity.WARNING


def test_translation_on_the_way_is_said(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(listener.port).seen_as is None

    admit = listener._admit
    monkeypatch.setattr(listener, "_admit", lambda connection, host: admit(connection, "192.0.2.7"))
    matrix = run(listener.port)

    assert matrix.seen_as == ("127.0.0.1", "192.0.2.7")
    assert severities(judge(matrix, "1.0"))["reach.translated"] is Severity.WARNING


def test_pair_over_every_loopback_address_of_this_machine(lines: list[str]) -> None:
    host = Host()
    with Listener(0, lambda address: local_rails(host, loopback=True), "1.0", lines.append) as listener:
        matrix = measure(
            "127.0.0.1", listener.port, lambda loopback: local_rails(host, loopback=loopback), "1.0", seconds=0.05
        )

    assert any(pair.here.address == pair.there.address == "127.0.0.1" for pair in matrix.pairs)
    assert all(pair.state == "ok" for pair in matrix.pairs), matrix.pairs


def test_other_version_is_said_on_both_sides(listener: Listener, lines: list[str]) -> None:
    matrix = run(listener.port, version="2.0")

    assert severities(judge(matrix, "2.0"))["reach.version"] is Severity.WARNING
    assert any("2.0" in line and "1.0" in line and "one version" in line for line in lines)
    assert matrix.pairs[0].state == "ok"


def test_json_form_is_the_documented_one(listener: Listener) -> None:
    matrix = run(listener.port)

    content = json.loads(json.dumps(to_json(matrix, judge(matrix, "1.0"), strict=False, version="1.0")))

    assert content["format"] == "crossrail.doctor.peer" and content["version"] == 1
    assert content.keys() == {
        "format", "version", "crossrail", "peer_crossrail", "target", "port", "addresses", "pairs", "summary",
        "exit_status", "findings",
    }  # fmt: skip
    assert content["addresses"] == [{"address": "127.0.0.1", "state": "ok", "detail": ""}]
    (pair,) = content["pairs"]
    assert pair.keys() == {
        "here", "there", "state", "detail", "rtt_us", "mtu", "mss", "out_gb_per_s", "in_gb_per_s", "retransmits",
    }  # fmt: skip
    assert pair["here"].keys() == {"interface", "address", "mtu", "mbit_per_s"}


def test_port_that_is_taken_is_a_clear_error(listener: Listener) -> None:
    with pytest.raises(TransportError, match="choose another port"):
        Listener(listener.port, lambda address: [], "1.0", bind="127.0.0.1")


def test_port_for_root_is_said_to_be_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> socket.socket:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(socket, "create_server", refuse)
    with pytest.raises(TransportError, match=r"cannot listen on port 80: Permission denied.*are for root") as refused:
        Listener(80, lambda address: [], "1.0")
    assert "ss -ltnp" not in str(refused.value)


# --- the way there does not work ---


def test_refused_connection_is_explained() -> None:
    matrix = run(free_port())

    assert [attempt.state for attempt in matrix.attempts] == ["refused"]
    (finding,) = judge(matrix, "1.0")
    assert finding.severity is Severity.ERROR and "refused" in finding.title
    assert any("--listen" in fix.command for fix in finding.fixes)


def test_silence_is_a_timeout_and_points_at_firewalls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "_CONNECT_DEADLINE_S", 0.3)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        port = server.getsockname()[1]
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:  # the queue is full: the kernel drops what comes, as firewalls do
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", port))
        time.sleep(0.1)
        matrix = run(port)
        for filler in fillers:
            filler.close()

    assert [attempt.state for attempt in matrix.attempts] == ["timeout"]
    (finding,) = judge(matrix, "1.0")
    commands = " ".join(fix.command for fix in finding.fixes)
    assert (
        "firewall" in finding.title and "ufw allow" in commands and "firewall-cmd" in commands and str(port) in commands
    )


def test_name_that_does_not_resolve() -> None:
    matrix = run(7311, target="no-such-host.invalid")

    (finding,) = judge(matrix, "1.0")
    assert finding.check == "reach.name" and finding.severity is Severity.ERROR


def test_name_service_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(measuring, "_RESOLVE_DEADLINE_S", 0.2)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: release.wait(WAIT_S) and [])

    begun = time.monotonic()
    matrix = run(7311, target="slow.example")
    release.set()

    assert time.monotonic() - begun < WAIT_S / 2
    assert "name server" in matrix.error
    eventually(lambda: all(t.name != "doctor-resolve" for t in threading.enumerate()), "the look-up ends")


def test_listener_that_ends_in_the_middle(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    say = lambda line: listener.close() if line.startswith("measuring") else None  # noqa: E731

    matrix = measure("127.0.0.1", listener.port, rails, "1.0", seconds=0.05, say=say)

    assert matrix.pairs[0].state == "ended" and matrix.pairs[0].rtt_us is not None


# --- strangers at the listener ---


def test_garbage_is_refused_and_the_next_one_served(listener: Listener, lines: list[str], seed: Seed) -> None:
    for data in (b"GET / HTTP/1.1\r\n\r\n" * 8, bytes(64), seed.rng().bytes(5000), b"XRDR" + b"\xff" * 60):
        answer_to(listener, data)

    assert ping_works(listener)
    assert any("refused" in line for line in lines)


def test_requests_out_of_bounds_are_refused(listener: Listener) -> None:
    for frame in (Frame(Kind.SOURCE, 1 << 63), Frame(Kind.PING, 0), Frame(77, 1), Frame(Kind.RAILS, 5)):
        answer = wire.decode(answer_to(listener, wire.encode(frame)))

        assert answer.status == Status.BAD_REQUEST


def test_other_protocol_gets_an_answer_that_it_can_read(listener: Listener, lines: list[str]) -> None:
    request = Frame(Kind.RAILS, 0, version="9.9", protocol=9)

    answer = wire.decode(answer_to(listener, wire.encode(request)))

    assert (answer.status, answer.protocol, answer.version) == (Status.OTHER_PROTOCOL, wire.PROTOCOL, "1.0")
    eventually(lambda: any("9.9" in line and "one version" in line for line in lines), str(lines))


def closed_by_peer_within(connection: socket.socket, seconds: float) -> bool:
    connection.settimeout(seconds)
    with contextlib.suppress(ConnectionError, TimeoutError):
        while connection.recv(1 << 16):
            pass
        return True
    return False


def test_silent_connection_is_closed(listener: Listener, hurried: None) -> None:
    with connect(listener) as connection:
        assert closed_by_peer_within(connection, WAIT_S)


def test_slow_loris_is_cut_off_however_it_trickles(listener: Listener, hurried: None) -> None:
    begun = time.monotonic()
    with connect(listener) as connection:
        for byte in wire.encode(Frame(Kind.PING, 1)):
            try:
                connection.sendall(bytes([byte]))
            except ConnectionError:
                break
            time.sleep(0.05)
        else:
            pytest.fail("it waited for 64 bytes at 20 a second")

    assert time.monotonic() - begun < 3


def test_half_closed_connection_is_closed(listener: Listener) -> None:
    with connect(listener) as connection:
        connection.sendall(b"XRDR")
        connection.shutdown(socket.SHUT_WR)

        assert closed_by_peer_within(connection, WAIT_S)


def test_sink_that_gets_nothing_ends(listener: Listener, hurried: None) -> None:
    with connect(listener) as connection:
        connection.sendall(wire.encode(Frame(Kind.SINK, 50)))

        assert closed_by_peer_within(connection, WAIT_S)


def test_source_that_nobody_reads_ends(listener: Listener, hurried: None, lines: list[str]) -> None:
    with connect(listener) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(wire.encode(Frame(Kind.SOURCE, 300)))

        eventually(lambda: any("sent" in line or "broken off" in line for line in lines), "the stream ends")
    assert ping_works(listener)


def test_ping_that_stops_halfway_ends(listener: Listener, hurried: None) -> None:
    with connect(listener) as connection:
        connection.sendall(wire.encode(Frame(Kind.PING, 100)) + bytes(100))

        assert closed_by_peer_within(connection, WAIT_S)


def test_one_host_cannot_take_all_connections(listener: Listener) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(listening.CONNECTIONS_PER_HOST_MAX):
            stack.enter_context(connect(listener))
        eventually(lambda: len(listener._connections) == listening.CONNECTIONS_PER_HOST_MAX, "all are served")

        answer = wire.decode(answer_to(listener, b""))

        assert answer.status == Status.BUSY
    eventually(lambda: len(listener._connections) == 0, "they are gone")
    assert ping_works(listener)


def test_busy_listener_is_said_to_be_busy(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "_BUSY_PAUSE_S", 0.01)
    with contextlib.ExitStack() as stack:
        for _ in range(listening.CONNECTIONS_PER_HOST_MAX):
            stack.enter_context(connect(listener))
        eventually(lambda: len(listener._connections) == listening.CONNECTIONS_PER_HOST_MAX, "all are served")

        matrix = run(listener.port)

    assert [attempt.state for attempt in matrix.attempts] == ["busy"]


def test_close_does_not_wait_for_strangers(lines: list[str]) -> None:
    listener = Listener(0, lambda address: [], "1.0", lines.append, bind="127.0.0.1")
    with connect(listener), connect(listener) as sink:
        sink.sendall(wire.encode(Frame(Kind.SINK, 10_000)))
        eventually(lambda: len(listener._connections) == 2, "both are served")
        begun = time.monotonic()

        listener.close()
        listener.close()

    assert time.monotonic() - begun < 2


def test_lines_of_a_listener_are_bounded(monkeypatch: pytest.MonkeyPatch, lines: list[str]) -> None:
    monkeypatch.setattr(listening, "_LINES_MAX", 3)
    with Listener(0, lambda address: [], "1.0", lines.append, bind="127.0.0.1") as listener:
        for _ in range(6):
            answer_to(listener, bytes(64))
        eventually(lambda: len(lines) >= 3, "lines, which the listener's threads write")

    assert len(lines) == 3 and "no more lines" in lines[-1]


# --- interfaces whose names are no UTF-8 ---

ODD = Rail("ra\udcffil", "192.0.2.1", 1500, None)


def test_connections_leave_by_an_interface_of_any_name() -> None:
    options: list[object] = []

    class Connection:
        def setsockopt(self, level: int, name: int, value: object) -> None:
            options.append(value)

        def bind(self, address: object) -> None:
            pass

    measuring._Prober(1, "1.0", 1.0)._leave_by(Connection(), ODD, "192.0.2.2")  # type: ignore[arg-type]

    assert options == [b"ra\xffil\0"]


def test_listener_tells_of_an_interface_of_any_name(nothing_leaks: None) -> None:
    odd = replace(ODD, address="127.0.0.1")
    with Listener(0, lambda address: [odd], "1.0", bind="127.0.0.1") as listener:
        matrix = run(listener.port)

    (pair,) = matrix.pairs
    assert pair.there.interface == "ra?il"
    assert pair.state == "ok"


def test_json_is_unicode_whatever_interfaces_are_called() -> None:
    matrix = measuring.Matrix("192.0.2.2", 1, pairs=[measuring.Pair(ODD, ODD, "refused")])

    content = to_json(matrix, judge(matrix, "1.0"), strict=False, version="1.0")

    assert content["pairs"][0]["here"]["interface"] == "ra?il"
    assert json.dumps(content, ensure_ascii=False).encode()


@pytest.mark.parametrize(
    ("name", "address"), [("eth0", "fe80::1%eth0"), ("ra\udcffil", "fe80::1%7")], ids=["usual", "odd"]
)
def test_link_local_address_names_an_interface_as_sockets_take_it(
    name: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "if_indextoname", lambda index: name)

    monkeypatch.setattr(socket, "if_nametoindex", {name: 7}.__getitem__)

    assert measuring._address(("fe80::1", 1, 0, 7)) == address
    assert measuring._place(address, 1) == ("fe80::1", 1, 0, 7), "the zone is no part of the address there"

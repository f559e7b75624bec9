"""Who else may be at the other end of a connection: servers of another kind, silent ones, strangers, other versions."""

import resource
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import pytest

import crossrail as xr
from tests.conftest import EngineFactory
from tests.support import tcp_wire as wire
from tests.support.limits import PROGRAM_S, WAIT_S, eventually
from tests.support.process import start_script
from tests.support.tcp_engines import TCP, events_of, region_id, still_serves
from tests.support.tcp_wire import Frame, Kind, RawAcceptor, RawPeer, endpoints_of

pytestmark = pytest.mark.timeout(120)

HANDSHAKE_BYTES_MAX = 2048  # kHandshakeBytesMax in native/transport/tcp/handshake.h


@pytest.fixture
def target(open_engine: EngineFactory) -> xr.Engine:
    return open_engine("target", **TCP)


# --- we connect to somebody else ---


@contextmanager
def server(answer: bytes | None) -> Iterator[int]:
    """Listens; sends `answer` to whoever connects and hangs up, or nothing and keeps them waiting."""
    stop = threading.Event()
    kept: list[socket.socket] = []
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        listener.settimeout(0.05)

        def run() -> None:
            while not stop.is_set():
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    continue
                kept.append(connection)
                if answer is None:
                    continue
                with suppress(OSError):  # it has hung up
                    connection.recv(16)
                    connection.sendall(answer)
                    connection.shutdown(socket.SHUT_WR)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            stop.set()
            thread.join(WAIT_S)
            for connection in kept:
                connection.close()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "wrong port"),
        (b"SSH-2.0-OpenSSH_9.0\r\n", "wrong port"),
        (b"", "closed the connection during the handshake|broke"),
        (None, "does not finish the handshake"),
    ],
)
def test_wrong_port_is_named(open_engine: EngineFactory, target: xr.Engine, answer: bytes | None, words: str) -> None:
    timeout = {"connect_timeout_s": 0.6} if answer is None else {}  # what answers is not to be taken for late
    engine = open_engine("here", **timeout, **TCP)
    with server(answer) as port:
        address = xr.Address.from_bytes(wire.with_ports(target.address.to_bytes(), [port]))

        with pytest.raises(xr.PeerLost, match=words):
            engine.connect(address, WAIT_S)

    assert engine.peer_state(address) == "lost"


def test_closed_port_is_lost_at_once(open_engine: EngineFactory) -> None:
    engine, gone = open_engine("here", **TCP), open_engine("gone", **TCP)
    gone.close()

    with pytest.raises(xr.PeerLost, match="refused"):
        engine.connect(gone.address, WAIT_S)


def test_another_engine_at_the_address_is_noticed(open_engine: EngineFactory, target: xr.Engine) -> None:
    engine = open_engine("here", **TCP)
    stale = xr.Address.from_bytes(wire.with_incarnation(target.address.to_bytes(), bytes(range(16))))

    with pytest.raises(xr.PeerLost, match="another engine is at this address now"):
        engine.connect(stale, WAIT_S)


def test_wrong_secret_is_said_on_both_sides(open_engine: EngineFactory) -> None:
    here, there = open_engine("here", secret="one", **TCP), open_engine("there", secret="two", **TCP)
    events = events_of(there)

    with pytest.raises(xr.PeerLost, match="same secret"):
        here.connect(there.address, WAIT_S)

    eventually(lambda: [e for e in events if e.kind == "protocol-error" and "same secret" in e.detail], "the event")
    still_serves(there, secret="two")


def test_peer_that_cannot_prove_the_secret_is_refused_with_an_event(open_engine: EngineFactory) -> None:
    there = open_engine("there", secret="right", **TCP)
    events = events_of(there)
    peer = RawPeer(there.address, secret="right")
    with peer.dial() as connection:
        hello = peer.hello()
        connection.sendall(hello)
        kind, _ = wire.receive_message(connection)
        assert kind == Kind.CHALLENGE
        connection.sendall(wire.message(Kind.PROOF, bytes(32)))
        kind, body = wire.receive_message(connection)

    assert kind == Kind.REFUSAL
    assert "same secret" in wire.refusal_text(body)
    eventually(lambda: [e for e in events if "same secret" in e.detail], "the event")


def test_many_strangers_do_not_fill_the_log(target: xr.Engine) -> None:
    """A port scanner: the first are told, and it hides no stranger of another kind. (How many came: native tests.)"""
    events = events_of(target)
    for _ in range(200):
        with RawPeer(target.address).dial() as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            wire.receive_message(stranger)
    peer = RawPeer(target.address)
    with peer.dial() as stranger:
        stranger.sendall(peer.hello())
        wire.receive_message(stranger)
        stranger.sendall(wire.message(Kind.PROOF, bytes(32)))
        wire.receive_message(stranger)

    eventually(lambda: [e for e in events if "same secret" in e.detail], "the stranger of another kind")
    told = [event.detail for event in list(events) if "not a crossrail handshake" in event.detail]
    assert 8 <= len(told) <= 8 + 2  # the first, and one a minute
    still_serves(target)


def test_proof_of_another_connection_is_worth_nothing(target: xr.Engine) -> None:
    peer = RawPeer(target.address)
    with peer.dial() as first, peer.dial() as second:
        hello = peer.hello()
        proofs = []
        for connection in (first, second):
            connection.sendall(hello)
            kind, challenge = wire.receive_message(connection)
            assert kind == Kind.CHALLENGE
            proofs.append(peer.answer(hello, challenge))
        second.sendall(proofs[0])
        kind, _ = wire.receive_message(second)

    assert kind == Kind.REFUSAL


@pytest.mark.parametrize("version", [0, 1, 65535])
def test_other_version_is_refused_and_said(target: xr.Engine, version: int) -> None:
    events = events_of(target)
    with RawPeer(target.address).dial() as connection:
        connection.sendall(wire.message(Kind.HELLO, bytes(100), version=version))
        kind, body = wire.receive_message(connection)

    assert kind == Kind.REFUSAL
    # Read on both sides, so it may not say "this engine".
    assert (
        f"the connecting engine speaks version {version} of the tcp transport, the accepting engine"
        in wire.refusal_text(body)
    )
    eventually(lambda: [e for e in events if f"version {version}" in e.detail], "the event")


def test_target_of_another_version_is_named(open_engine: EngineFactory) -> None:
    engine = open_engine("here", **TCP)
    with closing(RawAcceptor(engine.address)) as there:
        answered = threading.Thread(target=lambda: answer_with_version(there, 1))
        answered.start()

        with pytest.raises(xr.PeerLost, match="speaks version 1"):
            engine.connect(there.address, WAIT_S)

        answered.join(WAIT_S)


def answer_with_version(there: RawAcceptor, version: int) -> None:
    with there.accept() as connection:
        wire.receive_message(connection)
        connection.sendall(wire.message(Kind.CHALLENGE, bytes(64), version=version))
        connection.recv(1)


# --- strangers at our door ---


def test_half_a_handshake_costs_nothing_and_ends(target: xr.Engine) -> None:
    peer = RawPeer(target.address)
    hello = peer.hello()
    for length in (0, 1, 7, 8, 9, 40, len(hello) - 1):
        with peer.dial() as connection:
            connection.sendall(hello[:length])
    still_serves(target)


def test_three_hundred_silent_strangers_and_an_honest_peer(target: xr.Engine) -> None:
    with ExitStack() as stack:
        peer = RawPeer(target.address)
        strangers = [stack.enter_context(peer.dial()) for _ in range(300)]
        for i, stranger in enumerate(strangers):
            if i % 2:
                stranger.sendall(peer.hello()[: i % 60])

        still_serves(target)

        turned_away = 0
        for stranger in strangers[:40]:
            stranger.settimeout(WAIT_S)
            kind, _ = wire.receive_message(stranger)
            turned_away += kind == Kind.REFUSAL
        assert turned_away == 40, "the longest silent make room"
    still_serves(target)


@pytest.mark.parametrize("promised", [HANDSHAKE_BYTES_MAX + 1, 65535])
def test_stranger_that_promises_a_longer_message_is_turned_away_at_once(target: xr.Engine, promised: int) -> None:
    with RawPeer(target.address).dial() as stranger:
        stranger.settimeout(WAIT_S)
        stranger.sendall(struct.pack("<IHH", wire.MAGIC, wire.VERSION, promised))
        kind, body = wire.receive_message(stranger)

    assert kind == Kind.REFUSAL and "not a crossrail handshake" in wire.refusal_text(body)


@pytest.mark.no_sanitizer  # it takes memory of its own for each piece
def test_strangers_in_the_middle_of_a_message_cost_a_few_kib_each() -> None:
    # In a process that does nothing else: what tests before this one left behind, or looking at /proc, costs more.
    count = 200  # of 256 that are let in at a time
    message = struct.pack("<IHH", wire.MAGIC, wire.VERSION, HANDSHAKE_BYTES_MAX) + bytes(HANDSHAKE_BYTES_MAX - 8)
    script = """
        import sys
        from tests.support.leaks import anonymous_kib
        from tests.support.tcp_engines import TCP, still_serves
        import crossrail as xr
        with xr.Engine("target", **TCP) as target:
            print(target.address.to_bytes().hex(), flush=True)
            for _ in sys.stdin:
                print(anonymous_kib(), flush=True)
            still_serves(target)
    """
    with start_script(script) as target, ExitStack() as stack:
        stack.callback(target.kill)
        assert target.stdin is not None and target.stdout is not None
        address = xr.Address.from_bytes(bytes.fromhex(target.stdout.readline()))

        def taken_kib() -> int:
            target.stdin.write("\n")
            target.stdin.flush()
            return int(target.stdout.readline())

        connections = [stack.enter_context(RawPeer(address).dial()) for _ in range(count)]
        eventually(lambda: unread_bytes(address) == 0, "all are let in")
        for _ in range(3):  # what the measurement itself needs
            before = taken_kib()

        for connection in connections:
            connection.sendall(message[:-1])
        eventually(lambda: unread_bytes(address) == 0, "all of it taken in")

        per_stranger_kib = (taken_kib() - before) / count
        _, errors = target.communicate(timeout=PROGRAM_S)
        assert target.returncode == 0, errors
    assert 0 < per_stranger_kib < 4


def unread_bytes(engine: xr.Address) -> int:
    """Of what has arrived at its port, how much it has not read yet: proc_net_tcp(5)."""
    port = f":{endpoints_of(engine.to_bytes())[0][1]:04X}"
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    established = "01"
    queues = [row[4].partition(":")[2] for row in rows if row[1].endswith(port) and row[3] == established]
    return sum(int(queue, 16) for queue in queues)


def test_handshake_that_trickles_in_ends_at_its_deadline_and_keeps_nobody_out(target: xr.Engine) -> None:
    events = events_of(target)
    peer = RawPeer(target.address)
    hello = peer.hello()
    with peer.dial() as slow:
        slow.settimeout(0.1)
        sent, answer = 0, b""
        until = time.monotonic() + WAIT_S
        while not answer and time.monotonic() < until:
            if sent < len(hello) - 1:  # the last one never comes
                slow.sendall(hello[sent : sent + 1])
                sent += 1
            if sent % 10 == 1:
                still_serves(target)
            with suppress(TimeoutError):
                answer = slow.recv(4096)

    assert b"the handshake was not finished in time" in answer
    eventually(lambda: [e for e in events if "not finished in time" in e.detail], "the event")


# --- what an authenticated peer may ask for ---


@pytest.fixture
def raw(target: xr.Engine) -> Iterator[socket.socket]:
    with RawPeer(target.address).connected() as connection:
        connection.settimeout(WAIT_S)
        yield connection


def outcome(connection: socket.socket) -> tuple[int, bytes]:
    while True:
        kind, meta, _ = wire.receive_frame(connection)
        if kind != Frame.PONG:
            return kind, meta


@pytest.mark.parametrize(
    ("offset", "length"), [(990, 11), (1000, 1), (1 << 62, 8), ((1 << 64) - 4, 8), (0, 1001), ((1 << 64) - 1, 0)]
)
def test_write_out_of_bounds_is_refused_and_nothing_else(
    target: xr.Engine, raw: socket.socket, offset: int, length: int
) -> None:
    memory = bytearray(b"\xaa" * 1000)
    region = target.register(memory)
    entries = [(0, b"good", 1), (offset, bytes(length), 1), (4, b"fine", 1)]

    raw.sendall(wire.write_frame(region_id(region), entries))

    kind, meta = outcome(raw)
    assert kind == Frame.REFUSED
    assert struct.unpack_from("<QI", meta) == (2, 0)
    text = meta[16:].decode()
    assert f"region {region_id(region)}, offset {offset}, {length} bytes" in text
    kind, meta = outcome(raw)
    assert kind == Frame.ACK
    assert struct.unpack_from("<QQ", meta)[1] == 3
    target.imm_counter(1).wait(2, WAIT_S)
    assert memory == b"goodfine" + b"\xaa" * 992
    region.close(WAIT_S)


def test_read_out_of_bounds_or_of_no_region_is_refused(target: xr.Engine, raw: socket.socket) -> None:
    region = target.alloc(1000)
    for number, (key, offset, length) in enumerate(
        [(region_id(region), 1000, 1), (region_id(region), 0, 1 << 60), (region_id(region) + 12345, 0, 1), (0, 0, 0)]
    ):
        raw.sendall(wire.read_frame(key, offset, length, 100 + number))
        kinds = [outcome(raw), outcome(raw)]
        ends = [meta for kind, meta in kinds if kind == Frame.READ_END]
        assert len(ends) == 1
        assert struct.unpack_from("<Q", ends[0]) == (100 + number,)
        assert f"offset {offset}, {length} bytes" in ends[0][16:].decode()
    still_serves(target)


@pytest.mark.parametrize("access", ["local", "read"])
def test_write_to_a_region_that_is_not_open_to_it_is_refused_before_a_byte_is_placed(
    target: xr.Engine, raw: socket.socket, access: str
) -> None:
    memory = bytearray(b"\xaa" * 1000)
    region = target.register(memory, access=access)
    key = region_id(region)

    raw.sendall(wire.write_frame(key, [(8, b"bad", 1)]))

    kind, meta = outcome(raw)
    assert kind == Frame.REFUSED
    access_denied = 7  # Status in native/transport/types.h
    assert struct.unpack_from("<QII", meta) == (1, 0, access_denied)
    text = meta[16:].decode()
    assert f"region {key}, offset 8, 3 bytes" in text and "did not open it to this operation" in text
    raw.sendall(wire.write_frame(0, [(0, b"", 2)]))  # the connection lives
    target.imm_counter(2).wait(1, WAIT_S)
    assert memory == b"\xaa" * 1000 and target.imm_counter(1).poll() == 0
    region.close(WAIT_S)


def test_read_of_a_region_that_is_not_open_to_it_is_refused(target: xr.Engine, raw: socket.socket) -> None:
    region = target.register(bytearray(b"secret"), access="local")

    raw.sendall(wire.read_frame(region_id(region), 0, 6, 100))

    told = [outcome(raw), outcome(raw)]
    assert not any(kind == Frame.READ_DATA for kind, _ in told)
    (end,) = (meta for kind, meta in told if kind == Frame.READ_END)
    assert struct.unpack_from("<Q", end) == (100,)
    assert "offset 0, 6 bytes: its owner did not open it to this operation" in end[16:].decode()
    region.close(WAIT_S)


def flipped(frame: bytes, at: int) -> bytes:
    return frame[:at] + bytes([frame[at] ^ 1]) + frame[at + 1 :]


MALFORMED = {
    "unknown type": wire.frame(77),
    "no type": wire.frame(0),
    "no mark": wire.frame(Frame.PING, bytes(8), mark=0),
    "recall too short": wire.frame(Frame.RECALL, bytes(4)),
    "recall with payload": wire.frame(Frame.RECALL, bytes(8), b"x"),
    "ping too short": wire.frame(Frame.PING, bytes(7)),
    "ping with payload": wire.frame(Frame.PING, bytes(8), b"x"),
    "frame of acceptors": wire.frame(Frame.TAKEN, bytes(16)),
    "write without table": wire.frame(Frame.WRITE, bytes(8), operations=1),
    "write of no entries": wire.frame(Frame.WRITE, b"", count=0),
    "write of too many entries": wire.head(Frame.WRITE, bytes(8 + 16 * 1009), 0, count=1009, operations=1009),
    "write whose payload is longer": wire.head(
        Frame.WRITE, struct.pack("<QQII", 1, 0, 8, 0), 100, count=1, operations=1
    )
    + bytes(100),
    "write that ends what did not begin": wire.write_frame(1, [(0, b"x", None)], operations=2),
    "message too long": wire.head(Frame.MESSAGE, bytes(8), (256 << 10) + 1, operations=1),
    "message without end": wire.frame(Frame.MESSAGE, bytes(8), b"x"),
    "read without end": wire.frame(Frame.READ, bytes(32)),
    "question about no channel": wire.resolve_frame(0, 9, 1),
    "question about itself": wire.resolve_frame(0, 0, 5),
    "question that knows the future": wire.resolve_frame(5, 0, 0),
    "metadata beyond the maximum": wire.head(Frame.PING, bytes(65535), 0),
    "a bit that flipped in the header": flipped(wire.ping_frame(), 4),
    "a bit that flipped in the metadata": flipped(wire.ping_frame(), 20),
    "a bit that flipped in a table": flipped(wire.write_frame(1, [(0, b"x", 5)] * 1000), 9000),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_malformed_frame_ends_the_connection_with_an_event(target: xr.Engine, raw: socket.socket, what: str) -> None:
    events = events_of(target)
    with RawPeer(target.address).connected() as bystander:
        try:
            raw.sendall(MALFORMED[what])
            while wire.receive_frame(raw)[0] != 0:
                pass
        except ConnectionResetError:
            pass

        eventually(lambda: [e for e in events if e.kind == "protocol-error"], "the event")
        bystander.sendall(wire.ping_frame())
        assert wire.receive_frame(bystander)[0] == Frame.PONG


def test_endless_reads_that_nobody_takes_end_the_connection(target: xr.Engine, raw: socket.socket) -> None:
    region = target.alloc(1 << 20)
    events = events_of(target)
    try:
        for i in range(1100):
            raw.sendall(wire.read_frame(region_id(region), 0, 1 << 20, i + 1))
    except (ConnectionResetError, BrokenPipeError):
        pass
    eventually(lambda: [e for e in events if "more reads" in e.detail], "the event")
    region.close(WAIT_S)


def test_peer_that_asks_by_one_connection_and_does_not_read_another(target: xr.Engine) -> None:
    """What became of its messages is told again at each question, by any connection: that costs no memory each time."""
    peer = RawPeer(target.address)
    with target.submit_recvs(8, 16), peer.connected(0) as unread, peer.connected(1, bulk=True) as asking:
        asking.settimeout(WAIT_S)
        for message_id in range(1, 1001):
            asking.sendall(wire.message_frame(message_id, b"longer than a buffer"))
        for _ in range(15):
            asking.sendall(wire.resolve_frame(0, 0, 0) * 20)
            for _ in range(20):
                while outcome(asking)[0] != Frame.RESOLVED:
                    pass

        unread.settimeout(WAIT_S)
        unread.sendall(wire.ping_frame())
        told, kind = 0, Frame.PING
        while kind != Frame.PONG:
            kind, meta, _ = wire.receive_frame(unread)
            assert kind != 0, f"cut off after {told} bytes"
            told += wire.FRAME_HEAD.size + len(meta)

    assert told < 16 << 20, "bytes: more than sockets hold"
    still_serves(target)


def test_peer_that_sends_messages_and_does_not_read_what_became_of_them(target: xr.Engine, raw: socket.socket) -> None:
    events = events_of(target)
    messages = [wire.message_frame(1 + number, b"longer than a buffer") for number in range(200_000)]
    with target.submit_recvs(8, 16), pytest.raises((ConnectionResetError, BrokenPipeError)):
        raw.sendall(b"".join(messages))
    eventually(lambda: [e for e in events if "does not read" in e.detail], "the event")
    still_serves(target)


def test_peer_that_is_refused_and_does_not_read_it_is_cut_off(target: xr.Engine, raw: socket.socket) -> None:
    events = events_of(target)
    refused = wire.write_frame(0xBAD, [(0, b"", None)] * 1000) * 1000  # a hundred MB of refusals
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    with pytest.raises((ConnectionResetError, BrokenPipeError)):
        raw.sendall(refused)

    eventually(lambda: [e for e in events if "does not read" in e.detail], "the event")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10, "KiB of memory more"
    still_serves(target)


def test_peer_has_two_channels_for_each_rail_of_both_sides(target: xr.Engine) -> None:
    """Each costs memory: what it was refused is kept."""
    peer = RawPeer(target.address)  # as many rails as the target
    channels = 2 * 2 * target.rails
    for channel in range(channels):
        with peer.connected(channel):
            pass

    with peer.dial() as connection:
        connection.sendall(peer.hello(channels))
        kind, body = wire.receive_message(connection)

    assert kind == wire.Kind.REFUSAL
    assert "malformed" in wire.refusal_text(body)

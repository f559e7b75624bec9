"""TLS that does not come about: wrong files, certificates and libraries, and who else may be at the other end."""

import contextlib
import datetime
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

import crossrail as xr
from tests.conftest import EngineFactory
from tests.support import tcp_wire as wire
from tests.support.certificates import Authority
from tests.support.limits import WAIT_S, eventually
from tests.support.patterns import pattern
from tests.support.process import run_script
from tests.support.proxy import proxied
from tests.support.seeds import Seed
from tests.support.tcp_engines import TCP, events_of, still_serves
from tests.support.tcp_wire import Kind, RawAcceptor, RawPeer
from tests.support.tls_peer import Flights, client_context, dial, server_context, start_tls

pytestmark = pytest.mark.timeout(120)

AN_HOUR_AGO = datetime.timedelta(hours=-1)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def tls(authority: Authority) -> xr.TlsConfig:
    return authority.issue()


@pytest.fixture
def target(open_engine: EngineFactory, tls: xr.TlsConfig) -> xr.Engine:
    return open_engine("target", tls=tls, **TCP)


def expect_event(events: list[xr.EngineEvent], words: str) -> None:
    def seen() -> bool:
        return any(event.kind == "protocol-error" and words in event.detail for event in events)

    eventually(seen, f"an event with {words!r}")
    assert all("\n" not in event.detail for event in events)


# --- it does not open ---


def no_pem(tls: xr.TlsConfig, folder: Path) -> Path:
    (folder / "no.pem").write_text("-----BEGIN NOTHING-----\n")
    return folder / "no.pem"


def empty(tls: xr.TlsConfig, folder: Path) -> Path:
    (folder / "empty.pem").write_bytes(b"")
    return folder / "empty.pem"


def missing(tls: xr.TlsConfig, folder: Path) -> Path:
    return folder / "gone.pem"


def a_folder(tls: xr.TlsConfig, folder: Path) -> Path:
    return folder


@pytest.mark.parametrize("option", ["cert", "key", "ca"])
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (no_pem, "in PEM format"),
        (empty, "it is empty"),
        (missing, "No such file or directory"),
        (a_folder, "Is a directory"),
    ],
)
def test_bad_file_is_named(
    tls: xr.TlsConfig, tmp_path: Path, option: str, make: Callable[[xr.TlsConfig, Path], Path], words: str
) -> None:
    path = make(tls, tmp_path)
    files = {"cert": tls.cert, "key": tls.key, "ca": tls.ca} | {option: path}

    with pytest.raises(xr.UsageError, match=f"tls.{option} = '{path}'.*{words}"):
        xr.Engine("here", tls=xr.TlsConfig(**files), **TCP)


def test_key_of_another_certificate_is_told(authority: Authority, tls: xr.TlsConfig) -> None:
    other = authority.issue("other")

    with pytest.raises(xr.UsageError, match=r"is not the key of tls\.cert"):
        xr.Engine("here", tls=xr.TlsConfig(tls.cert, other.key, tls.ca), **TCP)


def test_key_with_a_password_is_told(authority: Authority) -> None:
    with pytest.raises(xr.UsageError, match="not a private key in PEM format without a password"):
        xr.Engine("here", tls=authority.issue(password=b"sesame"), **TCP)


@pytest.mark.parametrize("library", ["/gone/libssl.so.3", "libc.so.6"])
def test_without_openssl_it_says_what_to_install(tls: xr.TlsConfig, library: str) -> None:
    script = f"""
        import os

        os.environ["CROSSRAIL_LIBSSL"] = {library!r}

        import crossrail as xr

        try:
            xr.Engine("here", transport="tcp", tls=xr.TlsConfig({str(tls.cert)!r}, {str(tls.key)!r}, {str(tls.ca)!r}))
        except xr.TransportError as error:
            print(str(error))
    """

    done = run_script(script)

    assert f"CROSSRAIL_LIBSSL={library}" in done.stdout and "install OpenSSL 3" in done.stdout, (
        done.stdout + done.stderr
    )


# --- one of the two is not trusted: both are told ---


def expired(authority: Authority, stranger: Authority) -> xr.TlsConfig:
    return authority.issue("old", left=AN_HOUR_AGO)


def of_another_ca(authority: Authority, stranger: Authority) -> xr.TlsConfig:
    return stranger.issue("unknown", trusts=authority.file)


@pytest.mark.parametrize("bad_one_connects", [True, False])
@pytest.mark.parametrize(
    ("make", "words", "alert"),
    [(expired, "certificate has expired", "certificate expired"), (of_another_ca, "unable to get", "unknown ca")],
)
def test_bad_certificate_is_said_on_both_sides(
    open_engine: EngineFactory,
    authority: Authority,
    tmp_path: Path,
    make: Callable[[Authority, Authority], xr.TlsConfig],
    words: str,
    alert: str,
    bad_one_connects: bool,
) -> None:
    good, bad = authority.issue(), make(authority, Authority(tmp_path, "stranger"))
    here = open_engine("here", tls=bad if bad_one_connects else good, **TCP)
    there = open_engine("there", tls=good if bad_one_connects else bad, **TCP)
    events = events_of(there)

    with pytest.raises(xr.PeerLost, match=alert if bad_one_connects else words) as lost:
        here.connect(there.address, WAIT_S)

    assert "TLS handshake" in str(lost.value) and "\n" not in str(lost.value)
    expect_event(events, words if bad_one_connects else alert)


@pytest.mark.parametrize("bad_one_connects", [True, False])
def test_wrong_name_is_said_on_both_sides(
    open_engine: EngineFactory, authority: Authority, bad_one_connects: bool
) -> None:
    right, wrong = authority.issue("right", dns=["good"], verify="name"), authority.issue("wrong", dns=["other"])
    names = ("bad", "good") if bad_one_connects else ("good", "bad")
    configs = (wrong, right) if bad_one_connects else (right, wrong)
    here, there = (open_engine(name, tls=config, **TCP) for name, config in zip(names, configs, strict=True))
    events = events_of(there)

    with pytest.raises(xr.PeerLost, match=r"not for the name 'bad'.*Next: give it a certificate"):
        here.connect(there.address, WAIT_S)

    expect_event(events, "not for the name 'bad'")


@pytest.mark.parametrize("connects_with_tls", [True, False])
def test_tls_on_one_side_only_is_said_on_both(
    open_engine: EngineFactory, tls: xr.TlsConfig, connects_with_tls: bool
) -> None:
    here = open_engine("here", tls=tls if connects_with_tls else None, **TCP)
    there = open_engine("there", tls=None if connects_with_tls else tls, **TCP)
    events = events_of(there)

    with pytest.raises(xr.PeerLost, match=r"give tls to both, or to neither$"):  # no advice about restarts after it
        here.connect(there.address, WAIT_S)

    expect_event(events, "give tls to both, or to neither")


def test_other_secret_is_refused_under_tls_too(open_engine: EngineFactory, tls: xr.TlsConfig) -> None:
    here, there = (open_engine(name, tls=tls, secret=name, **TCP) for name in ("here", "there"))
    events = events_of(there)

    with pytest.raises(xr.PeerLost, match="same secret"):
        here.connect(there.address, WAIT_S)

    expect_event(events, "same secret")


# --- we connect to somebody else ---


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x16\x03\x03\x00\x05hello", b"\x15\x03\x03\x00\x02\x02\x28"]
)
def test_another_server_at_the_port_is_told(open_engine: EngineFactory, tls: xr.TlsConfig, answer: bytes) -> None:
    engine = open_engine("here", tls=tls, **TCP)
    with closing(RawAcceptor(engine.address)) as there:

        def serve() -> None:
            with there.accept() as connection:
                wire.receive_message(connection)
                connection.sendall(answer)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(4096):
                    pass

        thread = threading.Thread(target=serve)
        thread.start()

        with pytest.raises(xr.PeerLost, match=r"the TLS handshake failed.*Next: check that each side's certificate"):
            engine.connect(there.address, WAIT_S)

        thread.join(WAIT_S)


def test_refusal_that_comes_before_our_first_flight_is_told(open_engine: EngineFactory, tls: xr.TlsConfig) -> None:
    """No race: nothing but our thread drives the engine, and the answer waits for it."""
    engine = open_engine("here", tls=tls, polling="manual", **TCP)
    with closing(RawAcceptor(engine.address)) as there:
        transfer = engine.submit_send(there.address, b"hello")
        engine.progress()
        with there.accept() as connection:
            connection.sendall(wire.refusal(1, "no engine of yours"))

            with pytest.raises(xr.PeerLost, match="refuses: no engine of yours"):
                transfer.wait(WAIT_S)


def test_slow_network_cuts_flights_and_frames_anywhere(
    open_engine: EngineFactory, tls: xr.TlsConfig, target: xr.Engine, seed: Seed
) -> None:
    """Byte by byte, so that every byte of a record is once the first of what has arrived."""
    engine = open_engine("here", tls=tls, **TCP)
    with closing(RawAcceptor(engine.address)) as there:
        address = xr.Address.from_bytes(wire.with_ports(target.address.to_bytes(), [there.listener.getsockname()[1]]))

        def pass_on(source: socket.socket, to: socket.socket) -> None:
            to.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with contextlib.suppress(OSError):
                while data := source.recv(65536):
                    for at in range(len(data)):
                        to.sendall(data[at : at + 1])
                        time.sleep(0)

        def serve() -> None:
            with there.accept() as near, dial(target.address) as far:
                back = threading.Thread(target=pass_on, args=(far, near))
                back.start()
                pass_on(near, far)
                far.shutdown(socket.SHUT_WR)
                back.join(WAIT_S)

        thread = threading.Thread(target=serve)
        thread.start()

        engine.connect(address, WAIT_S)
        # Short enough for the connection that is there: another one would want to be accepted.
        source, place, copy = engine.alloc(9_001), target.alloc(9_001), engine.alloc(9_001)
        source.array()[:] = pattern(seed.number(), 9_001)
        engine.submit_write(source, place.descriptor, imm=5).wait(WAIT_S)
        engine.submit_read(copy, place.descriptor).wait(WAIT_S)
        assert (place.array() == source.array()).all() and (copy.array() == source.array()).all()

        engine.close()
        thread.join(WAIT_S)


def test_peer_that_does_not_read_for_a_while_misses_nothing(
    open_engine: EngineFactory, tls: xr.TlsConfig, seed: Seed
) -> None:
    """Sockets and what is sealed fill up on the way; both directions wait, and go on where they were."""
    options = {"tls": tls, "peer_timeout_s": WAIT_S, **TCP}
    here, there = open_engine("here", **options), open_engine("there", **options)
    nbytes = (24 << 20) + 13
    source, place, copy = here.alloc(nbytes), there.alloc(nbytes), here.alloc(nbytes)
    source.array()[:] = pattern(seed.number(), nbytes)
    with proxied(there.address) as way:
        here.connect(way.address, WAIT_S)
        proxy = way.proxies[0]
        here.submit_write(source, place.descriptor, 1000, imm=3).wait(WAIT_S)
        proxy.stall()  # its buffers and the kernels' take some MB
        write = here.submit_write(source, place.descriptor, imm=3)
        small = [here.submit_write(source, place.descriptor, 100, imm=3) for _ in range(200)]
        with pytest.raises(xr.WaitTimeout):
            write.wait(0.3)
        assert not any(transfer.done for transfer in small)
        proxy.stall(False)

        for transfer in [write, *small]:
            transfer.wait(WAIT_S)
        here.submit_read(copy, place.descriptor).wait(WAIT_S)

    there.imm_counter(3).wait(202, WAIT_S)
    assert (place.array() == source.array()).all() and (copy.array() == source.array()).all()


def test_relay_with_a_certificate_of_the_same_ca_is_noticed(
    open_engine: EngineFactory, authority: Authority, tls: xr.TlsConfig, target: xr.Engine
) -> None:
    """It ends TLS on both sides and passes the handshake's messages on, which it has no secret to make itself."""
    engine = open_engine("here", tls=tls, **TCP)
    relay = authority.issue("relay")
    with closing(RawAcceptor(engine.address)) as there:
        # The target's own address, but for the port.
        port = there.listener.getsockname()[1]
        address = xr.Address.from_bytes(wire.with_ports(target.address.to_bytes(), [port]))

        def serve() -> None:
            with there.accept() as near, dial(target.address) as far:
                wire.receive_message(near)
                far.sendall(start_tls(target.address))
                near_tls = server_context(relay).wrap_socket(near, server_side=True)
                far_tls = client_context(relay, relay).wrap_socket(far)
                with near_tls, far_tls:
                    far_tls.sendall(near_tls.recv(4096))  # the Hello
                    near_tls.sendall(far_tls.recv(4096))  # the Challenge
                    near_tls.recv(4096)  # the engine's refusal

        thread = threading.Thread(target=serve)
        thread.start()

        with pytest.raises(xr.PeerLost, match="somebody in between"):
            engine.connect(address, WAIT_S)

        thread.join(WAIT_S)
    still_serves(target, tls=tls)


# --- strangers at our door ---


def test_who_does_not_know_us_gets_no_tls(target: xr.Engine, tls: xr.TlsConfig) -> None:
    with dial(target.address) as connection:
        connection.sendall(wire.message(Kind.START_TLS, bytes(8)))
        kind, body = wire.receive_message(connection)

    assert kind == Kind.REFUSAL and "another engine is at this address" in wire.refusal_text(body)
    still_serves(target, tls=tls)


def test_client_without_a_certificate_is_refused(target: xr.Engine, tls: xr.TlsConfig) -> None:
    events = events_of(target)
    with dial(target.address) as connection:
        connection.sendall(start_tls(target.address))
        with client_context(None, tls).wrap_socket(connection) as under, pytest.raises((ssl.SSLError, ConnectionError)):
            under.recv(1)

    expect_event(events, "did not return a certificate")
    still_serves(target, tls=tls)


def test_older_tls_is_refused(target: xr.Engine, tls: xr.TlsConfig) -> None:
    events = events_of(target)
    context = client_context(tls, tls)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with dial(target.address) as connection:
        connection.sendall(start_tls(target.address))
        with pytest.raises(ssl.SSLError):
            context.wrap_socket(connection)

    expect_event(events, "protocol")
    still_serves(target, tls=tls)


def test_proof_without_the_binding_is_refused(target: xr.Engine, tls: xr.TlsConfig) -> None:
    """Who has a certificate and the secret, and yet does not prove that this session is his."""
    peer = RawPeer(target.address)
    with dial(target.address) as connection:
        connection.sendall(start_tls(target.address))
        with client_context(tls, tls).wrap_socket(connection) as under:
            hello = peer.hello()
            under.sendall(hello)
            kind, challenge = wire.receive_message(under)
            assert kind == Kind.CHALLENGE
            key = wire.key_of("", wire.incarnation_of(target.address.to_bytes()))
            under.sendall(wire.message(Kind.PROOF, wire.proof(key, b"initiator", hello, challenge[:32])))
            kind, body = wire.receive_message(under)

    assert kind == Kind.REFUSAL and "somebody in between" in wire.refusal_text(body)
    still_serves(target, tls=tls)


STAGES = ("nothing", "garbage", "half a flight", "first flight", "half of the second", "second flight", "after it")


@pytest.mark.parametrize("stage", STAGES)
def test_killed_in_the_middle_of_the_handshake(target: xr.Engine, tls: xr.TlsConfig, stage: str) -> None:
    """By a reset, as a killed process whose socket has unread bytes does. Who only leaves is nothing to report."""
    events = events_of(target)
    for _ in range(4):
        connection = dial(target.address)
        flights = Flights(client_context(tls, tls), connection)
        first = b"" if stage == "nothing" else flights.hello()
        if stage == "garbage":
            first = os.urandom(300)
        connection.sendall(start_tls(target.address) + (first[:100] if stage == "half a flight" else first))
        if STAGES.index(stage) > STAGES.index("first flight"):
            second = flights.finish()
            connection.sendall(second[: len(second) // 2] if stage == "half of the second" else second)
        if stage == "after it":
            connection.sendall(flights.sealed(RawPeer(target.address).hello()[:50]))
        wire.reset(connection)
    still_serves(target, tls=tls)
    assert stage == "garbage" or not [event for event in events if event.kind == "protocol-error"]


@pytest.mark.parametrize("stage", ["first flight", "second flight", "the records after"])
def test_changed_bytes_end_the_connection_and_nothing_else(
    target: xr.Engine, tls: xr.TlsConfig, seed: Seed, stage: str
) -> None:
    draw = seed.rng()

    def changed(data: bytes) -> bytes:
        mutable = bytearray(data)
        for _ in range(draw.integers(1, 4)):
            mutable[draw.integers(len(mutable))] ^= int(draw.integers(1, 256))
        return bytes(mutable)

    for _ in range(25):
        with dial(target.address) as connection:
            flights = Flights(client_context(tls, tls), connection)
            first = flights.hello()
            connection.sendall(start_tls(target.address) + (changed(first) if stage == "first flight" else first))
            try:
                if stage != "first flight":
                    second = flights.finish()
                    connection.sendall(changed(second) if stage == "second flight" else second)
                if stage == "the records after":
                    connection.sendall(changed(flights.sealed(RawPeer(target.address).hello())))
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(4096):
                    pass
            except ConnectionError:
                pass  # it hung up first
    still_serves(target, tls=tls)


def test_more_bytes_than_a_handshake_needs_are_refused(target: xr.Engine, tls: xr.TlsConfig) -> None:
    """A second flight whose certificates never end, in records that are each well made."""
    events = events_of(target)
    with dial(target.address) as connection:
        flights = Flights(client_context(tls, tls), connection)
        connection.sendall(start_tls(target.address) + flights.hello())
        flights.finish()
        nothing = b"\x14\x03\x03\x00\x01\x01"  # change_cipher_spec, which TLS 1.3 passes over
        with pytest.raises(ConnectionError):
            connection.sendall(nothing * 10_000_000)

    expect_event(events, "TLS")
    still_serves(target, tls=tls)


def test_slow_handshake_ends_in_time(target: xr.Engine, tls: xr.TlsConfig) -> None:
    """A byte at a time, for ever: the patience of 5 s is for all of it."""
    with dial(target.address) as connection:
        first = Flights(client_context(tls, tls), connection).hello()
        connection.sendall(start_tls(target.address) + first[:5])
        connection.settimeout(0.1)

        def dribble() -> bool:
            try:
                connection.sendall(b"\0")
                return connection.recv(1) == b""
            except TimeoutError:
                return False
            except ConnectionError:
                return True

        eventually(dribble, "the end of our patience", pause_s=0.1)
    still_serves(target, tls=tls)

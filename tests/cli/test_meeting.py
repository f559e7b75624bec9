"""The port at which a serve answers pushers of other hosts: who knows the secret is told, nobody else is."""

import asyncio
import contextlib
import os
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

import crossrail as xr
from crossrail.cli import meeting
from crossrail.cli.meeting import Meeting, ask, split_url
from crossrail.errors import CrossrailError, UsageError
from tests.support.limits import WAIT_S, eventually
from tests.support.ports import free_port

SECRET = b"0123456789abcdef"


@contextlib.contextmanager
def few_descriptors(free: int) -> Iterator[None]:
    """This process may open so many more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fillers = [os.dup(0) for _ in range(free)]
    highest = max(map(int, os.listdir("/proc/self/fd")))
    while (filler := os.dup(0)) <= highest:
        fillers.append(filler)
    for last in (filler, *fillers[:free]):
        os.close(last)
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for filler in fillers[free:]:
            os.close(filler)


@contextlib.contextmanager
def held(address: xr.Address, secret: bytes = SECRET) -> Iterator[int]:
    """A meeting on a loop of its own; yields its port."""
    loop = asyncio.new_event_loop()
    ports: list[int] = []
    ready, over = threading.Event(), asyncio.Event()

    async def hold() -> None:
        async with Meeting(0, secret, address) as open_meeting:
            ports.append(open_meeting.port)
            ready.set()
            await over.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(hold()))
    thread.start()
    try:
        assert ready.wait(WAIT_S)
        yield ports[0]
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(WAIT_S)
        loop.close()


def test_address_of_one_interface_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """fe80::1%eth0: without the interface, the last figure, the kernel refuses it as invalid."""
    place = ("fe80::1", 7320, 0, 4)
    asked: list[object] = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(socket.AF_INET6, socket.SOCK_STREAM, 6, "", place)])
    monkeypatch.setattr(socket, "create_server", lambda address, **_: asked.append(address))

    meeting._listening_socket("fe80::1%eth0", 7320)

    assert asked == [place]


@contextlib.contextmanager
def answering(answer: Callable[[socket.socket], object]) -> Iterator[int]:
    """Something at a port that is no serve."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                connection, _ = server.accept()
                with connection:
                    answer(connection)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()[1]
    thread.join(WAIT_S)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_who_knows_the_secret_is_told_the_address(engine: xr.Engine, host: str) -> None:
    with held(engine.address) as port:
        assert ask(host, port, SECRET) == engine.address
        assert ask(host, port, SECRET) == engine.address


def test_who_does_not_is_refused_in_words(engine: xr.Engine) -> None:
    with held(engine.address) as port:
        with pytest.raises(UsageError, match="secret"):
            ask("127.0.0.1", port, b"another secret")
        with pytest.raises(UsageError, match="CROSSRAIL_SECRET"):
            ask("127.0.0.1", port, b"")


def test_another_version_is_refused_in_words(engine: xr.Engine) -> None:
    with held(engine.address) as port, socket.create_connection(("127.0.0.1", port), WAIT_S) as connection:
        connection.recv(100)
        connection.sendall(struct.pack("<4sH48s", b"XRMT", 9, b""))
        assert b"you 9" in connection.makefile("rb").read()


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.0\r\n\r\n", b"XRMT", bytes(54), b"x" * 100_000])
def test_strangers_learn_nothing_and_do_no_harm(engine: xr.Engine, sent: bytes) -> None:
    with held(engine.address) as port:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), WAIT_S) as connection:
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            told = connection.makefile("rb").read()
            assert len(told) < 100 and engine.address.to_bytes()[6:26] not in told
        assert ask("127.0.0.1", port, SECRET) == engine.address


def test_shortage_of_descriptors_is_told_once_and_passes(engine: xr.Engine, caplog: pytest.LogCaptureFixture) -> None:
    with held(engine.address) as port, contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(socket.socket()) for _ in range(12)]
        with few_descriptors(4):
            for stranger in strangers:
                stranger.connect(("127.0.0.1", port))
            eventually(lambda: caplog.records, "it is told")
            time.sleep(3 * meeting._ACCEPT_PAUSE_S)
        for stranger in strangers:
            stranger.close()

        assert ask("127.0.0.1", port, SECRET) == engine.address
    [told] = caplog.records
    assert told.getMessage().startswith("cannot accept more connections: Too many open files")
    assert told.exc_info is None


@contextlib.contextmanager
def silent_strangers(port: int) -> Iterator[None]:
    """As many as are taken in."""
    with contextlib.ExitStack() as stack:
        for _ in range(meeting._ASKERS_MAX):
            stranger = stack.enter_context(socket.create_connection(("127.0.0.1", port), WAIT_S))
            assert stranger.recv(1), "it was not taken in"
        yield


def test_silent_strangers_are_few(engine: xr.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_DEADLINE_S", WAIT_S)
    monkeypatch.setattr(meeting, "_ASKERS_MAX", 4)
    with held(engine.address) as port, silent_strangers(port), pytest.raises(xr.CrossrailError):
        ask("127.0.0.1", port, SECRET)


def test_silent_strangers_are_not_for_long(engine: xr.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_DEADLINE_S", 0.5)
    monkeypatch.setattr(meeting, "_ASKERS_MAX", 1)

    def is_told() -> bool:
        with contextlib.suppress(xr.CrossrailError):
            return ask("127.0.0.1", port, SECRET) == engine.address
        return False

    with held(engine.address) as port, silent_strangers(port):
        eventually(is_told, "they are gone")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda c: None, "hung up"),
        (lambda c: c.sendall(b"SSH-2.0-OpenSSH_9.2p1 Debian-2\r\n"), "wrong port"),
        (lambda c: (c.sendall(struct.pack("<4sH16s", b"XRMT", 1, b"")), c.recv(100), c.sendall(bytes(35))), "refuses"),
        (
            lambda c: (
                c.sendall(struct.pack("<4sH16s", b"XRMT", 1, b"")),
                c.recv(100),
                c.sendall(struct.pack("<BH32s4s", 1, 4, b"forged", b"addr")),
            ),
            "does not have our secret",
        ),
        (
            lambda c: (
                c.sendall(struct.pack("<4sH16s", b"XRMT", 1, b"")),
                c.recv(100),
                c.sendall(struct.pack("<BH32s", 1, 65535, b"")),
            ),
            "65535",
        ),
    ],
)
def test_who_is_no_serve_is_named(answer: Callable[[socket.socket], object], words: str) -> None:
    with answering(answer) as port, pytest.raises(xr.CrossrailError, match=words):
        ask("127.0.0.1", port, SECRET)


def test_nobody_there_is_said_with_the_way_out() -> None:
    port = free_port()
    with pytest.raises(CrossrailError, match=f"serve --listen {port}"):
        ask("127.0.0.1", port, SECRET)


def test_who_takes_the_connection_and_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the host nor a firewall is to blame: somebody is there."""
    monkeypatch.setattr(meeting, "_DEADLINE_S", 0.3)
    over = threading.Event()
    with answering(lambda c: over.wait(WAIT_S)) as port:
        with pytest.raises(xr.CrossrailError, match=r"accepts connections but says nothing: .*wrong port"):
            ask("127.0.0.1", port, SECRET)
        over.set()


def test_who_takes_no_connection_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_DEADLINE_S", 0.3)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server, contextlib.ExitStack() as stack:
        port = server.getsockname()[1]
        for _ in range(4):  # fill the queue: what comes now is dropped, as by a firewall
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(("127.0.0.1", port))
        with pytest.raises(CrossrailError, match="no answer"):
            ask("127.0.0.1", port, SECRET)


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("tcp://10.0.0.1", ("10.0.0.1", 7312, "")),
        ("tcp://10.0.0.1/", ("10.0.0.1", 7312, "")),
        ("tcp://decoder-3.rack:80/a/b.bin", ("decoder-3.rack", 80, "a/b.bin")),
        ("tcp://[fe80::1]:7000/dir/", ("fe80::1", 7000, "dir/")),
        ("tcp://host/a?", ("host", 7312, "a?")),  # a name of a file is none of the rest's parts
        ("tcp://host/a#b?c", ("host", 7312, "a#b?c")),
        ("tcp://host/a\nb\t", ("host", 7312, "a\nb\t")),  # for the serve to refuse
    ],
)
def test_urls_are_taken_apart(url: str, parts: tuple[str, int, str]) -> None:
    assert split_url(url) == parts


@pytest.mark.parametrize(
    "url",
    ["tcp://", "tcp://:7312/", "tcp://h:0/", "tcp://h:99999/", "tcp://h:x/", "tcp://[::1/", "tcp://h?/", "tcp://h\n/"],
)
def test_urls_that_are_none_are_refused(url: str) -> None:
    with pytest.raises(UsageError, match="tcp://"):
        split_url(url)


@given(st.text(max_size=40))
def test_any_text_is_a_url_or_refused(text: str) -> None:
    with contextlib.suppress(UsageError):
        host, port, _ = split_url("tcp://" + text)
        assert host and 1 <= port <= 65535

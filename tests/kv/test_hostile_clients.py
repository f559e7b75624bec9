"""Clients that send what never ends, or more than is wanted, or take no answer: each is gone by a deadline."""

import asyncio
import contextlib
import gzip
import itertools
import logging
import re
import socket
from collections.abc import Iterable

import aiohttp
import pytest
from aiohttp import web

from crossrail.kv.http.front import Front
from crossrail.kv.http.listener import Listener
from crossrail.kv.toy import ToyTokenizer
from tests.kv.asking import HEAD, answer_of
from tests.kv.conftest import PATIENCE_S, until
from tests.support.kv_cluster import SECRET, Cluster
from tests.support.limits import WAIT_S

LINGER_BYTES_MAX = 64 << 20
IN_BUFFERS_BYTES = 32 << 20  # of both sockets, and of what is in parts
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
LOOKS = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n"
TOO_LARGE = b"Content-Length: %d\r\n\r\n" % (1 << 40)


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


async def sent_until_cut_off(port: int, first: bytes, more: bytes) -> tuple[int, bytes]:
    """How many bytes were taken of a client that sends `more` for ever, and what it was told."""
    loop = asyncio.get_running_loop()
    with socket.socket() as client:
        client.setblocking(False)
        await loop.sock_connect(client, ("127.0.0.1", port))
        sent, heard = 0, b""
        with contextlib.suppress(ConnectionError):
            await asyncio.wait_for(loop.sock_sendall(client, first), WAIT_S)
            while True:
                await asyncio.wait_for(loop.sock_sendall(client, more), WAIT_S)
                sent += len(more)
                with contextlib.suppress(BlockingIOError):
                    heard += client.recv(1 << 16)
        return sent, heard


async def heard_until_cut_off(port: int, first: bytes, more: Iterable[bytes], pause_s: float) -> bytes:
    """What a client was told that sends on, a little at a time, until its connection ends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)

    async def send() -> None:
        with contextlib.suppress(ConnectionError):
            writer.write(first)
            for piece in more:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(pause_s)

    sending = asyncio.ensure_future(send())
    heard = bytearray()
    try:
        with contextlib.suppress(ConnectionError):
            while piece := await asyncio.wait_for(reader.read(1 << 16), WAIT_S):
                heard += piece
        return bytes(heard)
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


@pytest.mark.parametrize("expect", [b"", b"Expect: 100-continue\r\n"], ids=["at once", "waits to be told"])
async def test_body_that_will_be_too_large_is_refused_before_any_of_it_came(
    url: str, caplog: pytest.LogCaptureFixture, expect: bytes
) -> None:
    answer = await answer_of(url, HEAD + expect + b"Content-Length: %d\r\n\r\n" % ((16 << 20) + 1))
    assert answer.startswith(b"HTTP/1.1 413 ") and b"\r\nConnection: close\r\n" in answer
    assert b'"the body has more than 16777216 bytes"' in answer and not caplog.records


@pytest.mark.parametrize(
    ("first", "more", "status"),
    [
        (HEAD + TOO_LARGE, b" " * (1 << 20), b"413"),
        (HEAD + CHUNKED, b"%x\r\n%b\r\n" % (1 << 20, b" " * (1 << 20)), b"413"),
        (b"POST /nowhere HTTP/1.1\r\nHost: x\r\n" + TOO_LARGE, b" " * (1 << 20), b"404"),
        (LOOKS + TOO_LARGE, b" " * (1 << 20), b"200"),
        (HEAD + b"Content-Encoding: gzip\r\n" + TOO_LARGE, gzip.compress(bytes(1 << 20)) * 512, b"415"),
    ],
    ids=["length", "chunks", "no such path", "no body wanted", "packed"],
)
async def test_client_that_goes_on_sending_is_cut_off(
    url: str, caplog: pytest.LogCaptureFixture, first: bytes, more: bytes, status: bytes
) -> None:
    """By how much it sent: it may do so for a minute, as far as its front's patience goes, and for 10 s."""
    sent, heard = await sent_until_cut_off(port_of(url), first, more)
    assert heard.startswith(b"HTTP/1.1 " + status)
    assert sent <= LINGER_BYTES_MAX + IN_BUFFERS_BYTES
    assert not caplog.records


async def test_client_that_looks_only_after_it_has_sent_all_is_told_why(url: str) -> None:
    def ask() -> bytes:
        with socket.create_connection(("127.0.0.1", port_of(url)), timeout=WAIT_S) as client:
            client.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % (17 << 20))
            client.sendall(b" " * (17 << 20))
            return client.recv(100)

    assert (await asyncio.to_thread(ask)).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize("coding", [b"gzip", b"deflate", b"br", b"zstd", b"x", b"\xff", b"identity, GZIP"])
async def test_packed_bodies_are_not_taken(url: str, caplog: pytest.LogCaptureFixture, coding: bytes) -> None:
    asked = HEAD + b"Content-Encoding: " + coding + b"\r\nContent-Length: 2\r\n\r\n{}"
    answer = await answer_of(url, asked)
    assert answer.startswith(b"HTTP/1.1 415 ") and b"\r\nAccept-Encoding: identity\r\n" in answer
    assert b'"the body has Content-Encoding: ' in answer and not caplog.records


@pytest.mark.parametrize("coding", [b"", b"identity", b" Identity "])
async def test_bodies_that_say_they_are_not_packed_are_taken(url: str, coding: bytes) -> None:
    answer = await answer_of(url, HEAD + b"Content-Encoding: " + coding + b"\r\nContent-Length: 2\r\n\r\n{}")
    assert answer.startswith(b"HTTP/1.1 400 ") and b"missing required field `prompt`" in answer


async def test_nothing_is_unpacked(client: aiohttp.ClientSession) -> None:
    """Not even of bodies that nobody looks at: a few KB may take as long as hundreds of MB."""
    packed, got = gzip.compress(b"a" * 10_000), asyncio.get_running_loop().create_future()

    async def answer(http: web.Request) -> web.StreamResponse:
        got.set_result(await http.content.read())
        return web.Response()

    listener, app = Listener(), web.Application()
    app.add_routes([listener.route("POST", "/", answer)])
    port = await listener.start(app, "127.0.0.1", 0, logging.getLogger("of this test"))
    headers = {"Content-Encoding": "gzip"}
    async with client.post(f"http://127.0.0.1:{port}/", data=packed, headers=headers) as response:
        assert (response.status, await got) == (200, packed)
    await listener.close()


@pytest.mark.parametrize(
    ("first", "more", "statuses"),
    [
        (b"", b"\r\n", []),
        (b"G", b"E", [400]),
        (b"GET /", b"a", [408]),
        (LOOKS, b"a", [408]),
        (LOOKS + b"X: ", b"a", [408]),
        (LOOKS, b"X: a\r\n", [408]),
        (LOOKS + b"\r\n" + LOOKS, b"a", [200, 408]),
        (LOOKS + b"\r\n", b"\r\n", [200]),
        (LOOKS + b"\r\n" + HEAD + TOO_LARGE[:-2] + b"\r\n", b"a", [200, 413]),
        (HEAD + b"Content-Length: 10000\r\n\r\n", b"a", [408]),
        (HEAD + CHUNKED, b"1\r\na\r\n", [408]),
        (HEAD + CHUNKED, b"0", [408]),
        (HEAD + CHUNKED + b"1;", b"a", [408]),
        (HEAD + CHUNKED + b"0\r\nX: ", b"a", [408]),
        (HEAD + CHUNKED + b"0\r\n", b"X: a\r\n", [408]),
        (LOOKS + b"Content-Length: 10000\r\n\r\n", b"a", [200]),
        (LOOKS + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n", b"a", [200, 400]),
        (b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n", b"a", [404, 400]),
    ],
    ids=[
        "line ends", "method", "path", "name of a header", "value of a header", "headers", "second head",
        "line ends behind a request", "second body", "body", "chunks", "size of a chunk", "chunk's extension",
        "trailer", "trailers", "body of a GET", "behind an upgrade", "behind CONNECT",
    ],
)  # fmt: skip
async def test_what_is_sent_for_ever_a_little_at_a_time_ends(
    impatient: int, caplog: pytest.LogCaptureFixture, first: bytes, more: bytes, statuses: list[int]
) -> None:
    heard = await heard_until_cut_off(impatient, first, itertools.repeat(more), PATIENCE_S / 50)
    assert [int(status) for status in re.findall(rb"HTTP/1\.[01] (\d+) ", heard)] == statuses, heard
    assert not caplog.records


@pytest.mark.parametrize(
    ("first", "more", "words"),
    [
        (b"GET /", b"a" * 20_000, "a line of its head has more than 8190 bytes"),
        (LOOKS, b"X: " + b"a" * 20_000, "a line of its head has more than 8190 bytes"),
        (LOOKS, b"a" * 20_000 + b": x", "a line of its head has more than 8190 bytes"),
        (LOOKS, b"X: a\r\n" * 1000, "its head has more fields than are taken"),
    ],
    ids=["path", "value", "name", "fields"],
)
async def test_heads_over_the_limits_are_refused(
    url: str, caplog: pytest.LogCaptureFixture, first: bytes, more: bytes, words: str
) -> None:
    sent, heard = await sent_until_cut_off(port_of(url), first, more)
    assert re.match(rb"HTTP/1\.[01] 431 ", heard) or sent > 0  # its end may come before what it is told
    assert sent <= IN_BUFFERS_BYTES
    answer = await answer_of(url, first + more + b"\r\n\r\n")
    assert re.match(rb"HTTP/1\.[01] 431 ", answer) and words.encode() in answer
    assert not caplog.records


async def test_head_of_folded_lines_is_refused(url: str, caplog: pytest.LogCaptureFixture) -> None:
    answer = await answer_of(url, LOOKS + b"X: a\r\n b" * 5000 + b"\r\n\r\n")
    assert re.match(rb"HTTP/1\.[01] 400 ", answer)
    assert not caplog.records


def fields(count: int) -> list[bytes]:
    return [b"X%03d: " % n + b"a" * 8000 + b"\r\n" for n in range(count)]


@pytest.mark.parametrize("behind", [b"", LOOKS + b"\r\n"], ids=["first", "second"])
@pytest.mark.parametrize(
    "pieces",
    [[b"".join([LOOKS, *fields(12), b"\r\n"])], [LOOKS, *fields(12), b"\r\n"], [LOOKS, *fields(12)]],
    ids=["at once", "piece by piece", "without an end"],
)
async def test_head_of_many_long_fields_is_refused(
    impatient: int, caplog: pytest.LogCaptureFixture, behind: bytes, pieces: list[bytes]
) -> None:
    """aiohttp would keep a MiB of it twice, for each client that takes its time."""
    heard = await heard_until_cut_off(impatient, behind, pieces, 0.02)

    assert [int(status) for status in re.findall(rb"HTTP/1\.[01] (\d+) ", heard)] == [200] * bool(behind) + [431]
    assert b"head has more than 65536 bytes" in heard
    assert not caplog.records


async def test_head_below_the_bound_is_taken(url: str) -> None:
    answer = await answer_of(url, LOOKS + b"".join(fields(7)) + b"\r\n")
    assert answer.startswith(b"HTTP/1.1 200 ")


async def test_heads_that_wait_behind_a_request_are_bounded(nothing_leaks: None) -> None:
    """As of one that streams for minutes: of 31 heads behind it nothing was read, but all was kept."""
    listener, is_cancelled = Listener(), asyncio.Event()

    async def answer(http: web.Request) -> web.StreamResponse:
        try:
            await asyncio.Event().wait()
        finally:
            is_cancelled.set()
        raise AssertionError

    app = web.Application()
    app.add_routes([listener.route("GET", "/v1/models", answer)])
    port = await listener.start(app, "127.0.0.1", 0, logging.getLogger("of this test"), handler_cancellation=True)
    head = LOOKS + b"".join(fields(7)) + b"\r\n"
    try:
        assert await heard_until_cut_off(port, LOOKS + b"\r\n", [head] * 30, 0.01) == b""
        await asyncio.wait_for(is_cancelled.wait(), WAIT_S)
    finally:
        await listener.close()


async def test_garbage_behind_a_request_is_refused(url: str, caplog: pytest.LogCaptureFixture) -> None:
    for pieces in ([LOOKS + b"\r\n", b"GARBAGE\r\n\r\n"], [LOOKS + b"\r\nGARBAGE\r\n\r\n"]):
        heard = await heard_until_cut_off(port_of(url), b"", pieces, 0.1)
        assert [int(status) for status in re.findall(rb"HTTP/1\.[01] (\d+) ", heard)] in ([200, 400], [400])
    assert not caplog.records


@pytest.mark.parametrize("behind", [b"", b"GARBAGE\r\n\r\n"], ids=["requests", "garbage"])
async def test_client_that_takes_no_answer_is_cut_off(cluster: Cluster, behind: bytes) -> None:
    """Its answers fill all buffers, so its connection cannot end by itself."""
    front = Front(cluster.router, ToyTokenizer(), SECRET, patience_s=PATIENCE_S)
    port, listener = await front.start("127.0.0.1", 0), front._listener

    def pipes() -> list[asyncio.Transport]:
        """asyncio accepts a connection a turn of its loop before it gives it these."""
        return [connection.transport for connection in listener._connections if connection.transport is not None]

    try:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", port))
            await until(pipes, "it is there")
            (pipe,) = pipes()
            pipe.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            await asyncio.get_running_loop().sock_sendall(client, 150 * (LOOKS + b"\r\n") + behind)
            await until(lambda: pipe.get_write_buffer_size() > 0, "buffers are full")
            await until(lambda: pipe.get_write_buffer_size() == 0 and not listener._connections, "it was cut off")
            assert pipe.get_extra_info("socket").fileno() == -1
    finally:
        await front.close()

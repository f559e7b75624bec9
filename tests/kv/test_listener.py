"""Clients that are slow, silent, gone, large, or speak no HTTP."""

import asyncio
import contextlib
import gc
import io
import json
import logging
import select
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from crossrail.kv.http.listener import Listener
from tests.kv.asking import HEAD, SLOW_S, answer_of, body
from tests.kv.conftest import PATIENCE_S, quiet, start, until
from tests.support.kv_cluster import ROUTER, Cluster
from tests.support.limits import PROGRAM_S, WAIT_S


@asynccontextmanager
async def answering(listener: Listener) -> AsyncIterator[int]:
    """Its port, while it answers "/"."""

    async def answer(_: web.Request) -> web.StreamResponse:
        return web.Response(text="here")

    async def begin(http: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(http)
        await asyncio.Event().wait()
        return response

    app = web.Application()
    app.add_routes([listener.route("GET", "/", answer), listener.route("GET", "/for_ever", begin, is_long=True)])
    yield await listener.start(app, "127.0.0.1", 0, logging.getLogger("of this test"), handler_cancellation=True)
    await listener.close()


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    yield reader, writer
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


ASKED = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
ASKED_FOR_EVER = b"GET /for_ever HTTP/1.1\r\nHost: x\r\n\r\n"


async def test_clients_that_only_connect_keep_nobody_out(nothing_leaks: None) -> None:
    async with answering(Listener(connections_max=8)) as port, contextlib.AsyncExitStack() as stack:
        idle = [await stack.enter_async_context(connected(port)) for _ in range(20)]
        for _ in range(3):
            assert (await answer_of(f"http://127.0.0.1:{port}", ASKED)).startswith(b"HTTP/1.1 200 ")
        ended = [await asyncio.wait_for(reader.read(), WAIT_S) for reader, _ in idle[:12]]
        assert ended == [b""] * 12, "the oldest were cut off"
        assert not any(reader.at_eof() for reader, _ in idle[15:]), "and not the newest"


async def test_more_clients_than_descriptors_are_told_so(nothing_leaks: None, caplog: pytest.LogCaptureFixture) -> None:
    listener = Listener(connections_max=3)
    async with answering(listener) as port, contextlib.AsyncExitStack() as stack:
        asking = [await stack.enter_async_context(connected(port)) for _ in range(3)]
        for reader, writer in asking:
            writer.write(ASKED_FOR_EVER)
            assert b" 200 " in await asyncio.wait_for(reader.readline(), WAIT_S)
        refused = await answer_of(f"http://127.0.0.1:{port}", b"")
        assert refused.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
        assert refused.endswith(b"\r\n\r\n3 connections are open, the most that may be\n")
        asking[0][1].close()
        await until(lambda: len(listener._connections) == 2, "one has left")
        assert (await answer_of(f"http://127.0.0.1:{port}", ASKED)).startswith(b"HTTP/1.1 200 ")
    assert not caplog.records


async def test_clients_of_a_burst_are_cut_off_or_answered(nothing_leaks: None) -> None:
    """asyncio accepts eight before the first of them is a connection that can be closed."""
    listener = Listener(connections_max=4)
    async with answering(listener) as port, contextlib.AsyncExitStack() as stack:
        heard = [await stack.enter_async_context(connected(port)) for _ in range(3)]
        for reader, writer in heard:
            writer.write(ASKED)
            assert await asyncio.wait_for(reader.readuntil(b"here"), WAIT_S)
        burst = [stack.enter_context(socket.socket()) for _ in range(8)]
        for client in burst:  # no await in here: the server's loop does not run
            client.settimeout(WAIT_S)
            client.connect(("127.0.0.1", port))
            client.setblocking(False)
        loop = asyncio.get_running_loop()
        ended = [asyncio.ensure_future(asyncio.wait_for(loop.sock_recv(client, 1), WAIT_S)) for client in burst[:7]]
        cut_off = await asyncio.gather(*ended, return_exceptions=True)
        assert all(end == b"" or isinstance(end, ConnectionResetError) for end in cut_off), cut_off
        assert len(listener._connections) == 4
        await loop.sock_sendall(burst[7], ASKED)
        assert (await asyncio.wait_for(loop.sock_recv(burst[7], 100), WAIT_S)).startswith(b"HTTP/1.1 200 ")


async def test_client_that_is_idle_longest_makes_room(nothing_leaks: None) -> None:
    listener = Listener(connections_max=4)
    async with answering(listener) as port, contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(connected(port)) for _ in range(4)]
        for number in (0, 1, 2, 3, 1):  # then 2 is idle longest
            reader, writer = clients[number]
            writer.write(ASKED_FOR_EVER if number == 0 else ASKED)
            assert await asyncio.wait_for(reader.readuntil(b"\r\n\r\n" if number == 0 else b"here"), WAIT_S)
        clients[3][1].write(ASKED[:10])
        await until(lambda: len(listener._idle) == 2, "a request of 3 is under way")
        for number in (2, 1):
            reader, writer = await stack.enter_async_context(connected(port))
            writer.write(ASKED_FOR_EVER)
            assert b" 200 " in await asyncio.wait_for(reader.readline(), WAIT_S)
            assert await asyncio.wait_for(clients[number][0].read(), WAIT_S) == b""
        assert b" 503 " in await answer_of(f"http://127.0.0.1:{port}", b"")
        clients[3][1].write(ASKED[10:])
        assert await asyncio.wait_for(clients[3][0].readuntil(b"here"), WAIT_S)
        assert not clients[0][0].at_eof()


def test_descriptors_that_run_out_fill_no_log() -> None:
    """asyncio of Python 3.11 tries to accept as often as its backlog is long, and logs each failure."""
    script = """
import asyncio, logging, resource, socket, sys
from aiohttp import web
from crossrail.kv.http.listener import Listener

logging.basicConfig(stream=sys.stdout)
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))

async def main():
    listener = Listener()
    port = await listener.start(web.Application(), "127.0.0.1", 0, logging.getLogger("here"))
    print(port, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await listener.close()

asyncio.run(main())
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process, contextlib.ExitStack() as stack:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        for _ in range(300):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=WAIT_S))
        time.sleep(0.5)
        said, _ = process.communicate("", timeout=PROGRAM_S)
    assert not said


async def test_bytes_that_are_no_http_are_refused_and_not_logged(url: str, caplog: pytest.LogCaptureFixture) -> None:
    """aiohttp logs a traceback for each: a port scanner fills a log with them."""
    for garbage in (b"\x16\x03\x01\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GARBAGE\r\n\r\n"):
        answer = await answer_of(url, garbage)
        assert b" 400 " in answer and b'{"error": {"message": "the request cannot be read: ' in answer
    assert not caplog.records


@pytest.mark.parametrize("asked", [b"OPTIONS *", b"CONNECT somewhere:443"])
async def test_what_has_no_path_is_an_error_as_any_other(url: str, asked: bytes) -> None:
    answer = await answer_of(url, asked + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 404 ") and b'{"error": {"message": "404: Not Found", ' in answer


@pytest.mark.parametrize("expected", [b"\xff", b"100-continue\xff", b"patience"])
async def test_expectations_that_nobody_knows_are_refused(
    url: str, caplog: pytest.LogCaptureFixture, expected: bytes
) -> None:
    answer = await answer_of(url, HEAD + b"Expect: " + expected + b"\r\nContent-Length: 2\r\n\r\n{}")
    assert answer.startswith(b"HTTP/1.1 417 ") and b"only 100-continue" in answer
    assert not caplog.records


async def test_client_that_leaves_while_its_answer_is_written_is_not_logged(
    nothing_leaks: None, caplog: pytest.LogCaptureFixture
) -> None:
    listener = Listener()
    left = asyncio.Event()

    async def answer(http: web.Request) -> web.StreamResponse:
        assert http.transport is not None
        http.transport.close()  # as when it has hung up and that was not noticed yet
        left.set()
        return web.Response(text="too late")

    app = web.Application()
    app.add_routes([listener.route("GET", "/", answer)])
    port = await listener.start(app, "127.0.0.1", 0, logging.getLogger("of this test"))
    try:
        assert await answer_of(f"http://127.0.0.1:{port}", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n") == b""
        await asyncio.wait_for(left.wait(), WAIT_S)
        await asyncio.sleep(0)
    finally:
        await listener.close()
    assert not caplog.records


async def test_request_that_does_not_end_is_cut_off_when_the_listener_closes(caplog: pytest.LogCaptureFixture) -> None:
    listener = Listener()
    asked, cut = asyncio.Event(), asyncio.Event()

    async def answer(http: web.Request) -> web.StreamResponse:
        asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            cut.set()
        raise AssertionError

    app = web.Application()
    app.add_routes([listener.route("GET", "/", answer)])
    port = await listener.start(app, "127.0.0.1", 0, logging.getLogger("of this test"), handler_cancellation=True)
    client = asyncio.ensure_future(answer_of(f"http://127.0.0.1:{port}", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"))
    await asyncio.wait_for(asked.wait(), WAIT_S)
    await asyncio.wait_for(listener.close(), WAIT_S)
    assert cut.is_set() and await client == b"" and not caplog.records


async def test_client_that_waits_to_be_told_to_send_is_told(cluster: Cluster, url: str) -> None:
    asked = HEAD + b"Connection: close\r\nExpect: 100-Continue\r\nContent-Length: 2\r\n\r\n"
    assert (await answer_of(url, asked)).startswith(b"HTTP/1.1 100 ")


@pytest.mark.parametrize(
    ("said", "answer"),
    [(b"", b""), (HEAD, b"HTTP/1.1 408"), (HEAD + b'Content-Length: 100\r\n\r\n{"prompt"', b"HTTP/1.1 408")],
    ids=["nothing", "half a head", "half a body"],
)
async def test_client_that_does_not_go_on_is_cut_off(impatient: int, said: bytes, answer: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", impatient)
    writer.write(said)
    heard = await asyncio.wait_for(reader.read(), WAIT_S)  # until the connection ends
    assert heard[: len(answer)] == answer and bool(heard) == bool(answer)
    writer.close()


async def test_client_that_takes_nothing_is_cut_off_and_its_request_given_up(
    cluster: Cluster, impatient: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    await start(cluster)
    prepare = web.StreamResponse.prepare

    async def prepare_without_buffers(response: web.StreamResponse, request: web.Request) -> object:
        request.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        request.transport.set_write_buffer_limits(0)
        return await prepare(response, request)

    monkeypatch.setattr(web.StreamResponse, "prepare", prepare_without_buffers)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", impatient))
        data = json.dumps(body(max_tokens=450, stream=True)).encode()
        client.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(data) + data)
        await until(lambda: cluster.router.requests == 1, "the request is under way")
        await until(lambda: cluster.router.requests == 0, "the request is given up", ROUTER.request_timeout_s / 2)
    await quiet(cluster)
    assert cluster.router.counts.total() == 1


@pytest.mark.parametrize("before", [0, 60])
async def test_client_that_leaves_is_noticed_however_much_it_sent_behind_its_request(
    cluster: Cluster, url: str, before: int
) -> None:
    """So much that nothing more is read of it, and no end is seen."""
    await start(cluster)

    async def never(*_: object) -> tuple[object, bytes]:
        await asyncio.Event().wait()
        raise AssertionError

    cluster.nodes["d0"].model.step = never  # type: ignore[assignment]
    looks = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    data = json.dumps(body()).encode()
    asked = HEAD + b"Content-Length: %d\r\n\r\n" % len(data) + data
    async with connected(int(url.rpartition(":")[2])) as (_, writer):
        writer.write(before * looks + asked + 500 * looks)
        await until(lambda: cluster.router.requests == 1, "it is under way")
    await until(lambda: cluster.router.requests == 0, "it is given up", 5.0)
    assert cluster.router.counts["cancelled"] == 1


@pytest.mark.parametrize("pause_s", [0.0, 0.05])
@pytest.mark.parametrize("path", [b"/health", b"/v1/models", b"/nothing"])
async def test_client_that_ends_its_side_is_answered(url: str, path: bytes, pause_s: float) -> None:
    """As `nc -N` does, of a health check."""
    async with connected(int(url.rpartition(":")[2])) as (reader, writer):
        await asyncio.sleep(0.02)  # so that end and request come together
        writer.write(b"GET " + path + b" HTTP/1.1\r\nHost: x\r\n\r\n")
        await asyncio.sleep(pause_s)
        writer.write_eof()
        heard = await asyncio.wait_for(reader.read(), WAIT_S)
    assert heard.startswith(b"HTTP/1.1 ") and heard.endswith(b"}")


@pytest.mark.parametrize("count", [2, 40])
async def test_client_that_ends_its_side_behind_several_requests_has_all_their_answers(url: str, count: int) -> None:
    async with connected(int(url.rpartition(":")[2])) as (reader, writer):
        writer.write(count * b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
        writer.write_eof()
        heard = await asyncio.wait_for(reader.read(), WAIT_S)
    assert heard.count(b"HTTP/1.1 200 OK") == count


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("has_begun", [True, False])
async def test_client_that_ends_its_side_has_left_its_completion(
    cluster: Cluster, url: str, is_stream: bool, has_begun: bool
) -> None:
    """For all that TCP shows of it, it may be gone, and nobody read the tokens."""
    await start(cluster, token_s=SLOW_S)
    data = json.dumps(body(max_tokens=400, stream=is_stream)).encode()
    async with connected(int(url.rpartition(":")[2])) as (reader, writer):
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(data) + data)
        if has_begun:
            await until(lambda: cluster.router.requests == 1, "it is under way")
        writer.write_eof()
        assert b"DONE" not in await asyncio.wait_for(reader.read(), WAIT_S)
    await quiet(cluster)
    assert cluster.router.counts["cancelled"] == has_begun and cluster.router.requests == 0


@pytest.mark.parametrize("said", [b"", ASKED[:-1], HEAD + b"Content-Length: 9\r\n\r\n{"], ids=["none", "head", "body"])
async def test_client_that_ends_its_side_before_it_has_asked_is_let_go(url: str, said: bytes) -> None:
    async with connected(int(url.rpartition(":")[2])) as (reader, writer):
        writer.write(said)
        await asyncio.sleep(0.05)
        writer.write_eof()
        assert await asyncio.wait_for(reader.read(), WAIT_S) == b""


async def test_requests_sent_at_once_are_all_answered(url: str) -> None:
    looks = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
    async with connected(int(url.rpartition(":")[2])) as (reader, writer):
        writer.write(299 * looks + looks.replace(b"Host", b"Connection: close\r\nHost"))
        heard = await asyncio.wait_for(reader.read(), WAIT_S)
    assert heard.count(b"HTTP/1.1 200 OK") == 300


async def test_client_that_is_no_slower_than_its_tokens_is_waited_for(
    cluster: Cluster, impatient: int, client: aiohttp.ClientSession
) -> None:
    await start(cluster, token_s=PATIENCE_S / 40)
    address = f"http://127.0.0.1:{impatient}/v1/completions"
    for stream in (False, True):  # on one connection
        async with client.post(address, json=body(max_tokens=16, stream=stream)) as response:
            assert response.status == 200 and await response.read()
    assert cluster.router.counts["length"] == 2


@pytest.mark.skipif(
    int(Path("/proc/sys/net/core/somaxconn").read_text()) < 500, reason="the kernel keeps fewer connections waiting"
)
async def test_hundreds_of_clients_connect_while_the_router_is_busy(url: str) -> None:
    """No await in here: the router's loop does not run. Whom the kernel has no place for tries again after a second."""
    port = int(url.rpartition(":")[2])
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(socket.socket()) for _ in range(500)]
        poll = select.poll()
        for client in clients:
            client.setblocking(False)
            client.connect_ex(("127.0.0.1", port))
            poll.register(client, select.POLLOUT)
        connected = set()
        while ready := poll.poll(200):
            for descriptor, _ in ready:
                connected.add(descriptor)
                poll.unregister(descriptor)
        assert len(connected) == len(clients)


@asynccontextmanager
async def counting(listener: Listener) -> AsyncIterator[str]:
    """A server that says how many bytes it was sent."""

    async def count(http: web.Request) -> web.StreamResponse:
        async with listener.bodies.read(http) as data:
            return web.Response(text=str(len(data)))

    app = web.Application()
    app.add_routes([listener.route("POST", "/", count)])
    yield f"http://127.0.0.1:{await listener.start(app, '127.0.0.1', 0, logging.getLogger('of this test'))}/"
    await listener.close()


async def test_large_bodies_together_have_a_bound_and_small_ones_none(client: aiohttp.ClientSession) -> None:
    listener = Listener(bodies_bytes_max=1 << 20)
    go_on = asyncio.Event()

    async def halting() -> AsyncIterator[bytes]:
        yield b" " * (800 << 10)
        await go_on.wait()

    async with counting(listener) as url:
        first = asyncio.ensure_future(client.post(url, data=halting()))
        await until(lambda: listener.bodies.held_bytes > 700 << 10, "most of it is there")
        async with client.post(url, data=io.BytesIO(b" " * (800 << 10))) as response:
            assert (response.status, await response.text()) == (
                429, "bodies of requests take 1048576 bytes already, the most that is kept of all\n"
            )  # fmt: skip
        async with client.post(url, data=b" " * (60 << 10)) as response:
            assert response.status == 200
        go_on.set()
        async with await first as response:
            assert (response.status, await response.text()) == (200, str(800 << 10))
        async with client.post(url, data=io.BytesIO(b" " * (800 << 10))) as response:
            assert response.status == 200
        gone = asyncio.ensure_future(client.post(url, data=halting_for_ever()))
        await until(lambda: listener.bodies.held_bytes > 0, "some of it is there")
        gone.cancel()
        await until(lambda: listener.bodies.held_bytes == 0, "nothing is kept of who left")
        await asyncio.gather(gone, return_exceptions=True)


async def halting_for_ever() -> AsyncIterator[bytes]:
    yield b" " * (800 << 10)
    await asyncio.Event().wait()


async def test_nothing_is_kept_of_clients_that_leave_without_a_word() -> None:
    listener = Listener()
    async with counting(listener) as url:
        for said in (b"", b"POST / HTTP/1.1", b"no HTTP"):
            with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2].rstrip("/")))) as gone:
                await until(lambda: listener._silent, "it is there")
                gone.sendall(said)
            await until(lambda: not listener._silent, "it is forgotten")


@pytest.mark.parametrize("turns", range(5))
def test_client_whose_connection_is_being_accepted_at_the_end_is_cut_off(nothing_leaks: None, turns: int) -> None:
    """asyncio gives it a transport two turns after it has accepted it; its loop may be closed by then."""
    loop = asyncio.new_event_loop()
    client = socket.socket()
    client.settimeout(WAIT_S)

    async def serve() -> None:
        listener = Listener()
        port = await listener.start(web.Application(), "127.0.0.1", 0, logging.getLogger("of this test"))
        client.connect(("127.0.0.1", port))
        for _ in range(turns):
            await asyncio.sleep(0)
        await listener.close()

    try:
        loop.run_until_complete(serve())
        with contextlib.suppress(ConnectionResetError):  # nobody had accepted it
            assert client.recv(1) == b""
    finally:
        client.close()
        loop.close()
        gc.collect()  # an unclosed socket is an error

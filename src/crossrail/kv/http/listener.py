"""Accepts HTTP clients: a slow or silent one costs a file descriptor, and only for a limited time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import socket
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from crossrail._extras import needs
from crossrail.control.messages import clipped
from crossrail.kv.http.bodies import BODIES_BYTES_MAX, BODY_BYTES_MAX, Bodies, late_words
from crossrail.kv.http.connection import (
    FAULTS_OF_CLIENTS,
    HEAD_BYTES_MAX,
    HEAD_TOO_LARGE,
    LINE_BYTES_MAX,
    Connection,
    Refused,
)
from crossrail.kv.http.taking import Taking

with needs(__name__, "'crossrail[kv]'"):
    from aiohttp import web
    from aiohttp.http import HttpVersion11

PATIENCE_S = 60.0
_BACKLOG = 1024  # clients that connect while the loop is busy; further ones retry after a second
_AT_ONCE = 8  # of them, accepted by asyncio before it does anything else, and so before they are counted here
# Descriptors of the process that are left for its engine and files, and for connections not yet counted or closed.
_DESCRIPTORS_KEPT_SHARE, _DESCRIPTORS_KEPT_MIN = 0.25, 64
_ACCEPT_TURNS = 2  # of the event loop, until asyncio has made a connection of a socket that it accepted
_CLOSE_S = 1.0  # for answers on their way; aiohttp would wait a minute, twice

HttpHandler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Refuse = Callable[[int, str], web.Response]


def _in_plain_text(status: int, words: str) -> web.Response:
    return web.Response(status=status, text=words + "\n")


class Listener:
    """Listens for an aiohttp application. Threads: that of the event loop.

    patience_s: how long a client may take to send its first request, to send each body, and to read what is written to
    it, and how long it may be idle between requests; then it is cut off. aiohttp waits for ever for the first three.
    refuse: makes the answer with this status and text, for what HTTP itself refuses (an unknown path or method, a body
    that is too large, bytes that are not HTTP), and for what a handler raises, which is logged.
    body_bytes_max, bodies_bytes_max: of one body, and of all that are read or worked on at a time.
    connections_max: None: as many as the limit on open files leaves room for. When they are used up, the oldest one
    that has asked nothing is cut off; else the one that has been idle between requests the longest; else the new one is
    answered 503. Without a bound asyncio would meet the limit, and log some tens of thousands of lines a second.
    A client that sends so much behind a request that aiohttp reads no further is cut off unless the request is answered
    within a second, because its leaving could not be seen; so is one that sends heads of a MiB there. A head of more
    than 64 KiB is refused. A client that ends its sending side gets the answer to its request, unless the route
    is_long: then it counts as gone, since TCP shows nothing else when it is.
    Bodies are never unpacked, so they cost what is sent. What is refused by its headers is not read. A body that nobody
    reads is thrown away for up to 10 s and 64 MiB, then its connection ends.
    bodies: reads the bodies of requests.
    Lifecycle: 1. made. 2. an application of its route()s. 3. start(). 4. close().
    """

    def __init__(
        self,
        patience_s: float = PATIENCE_S,
        refuse: Refuse = _in_plain_text,
        body_bytes_max: int = BODY_BYTES_MAX,
        bodies_bytes_max: int = BODIES_BYTES_MAX,
        connections_max: int | None = None,
    ) -> None:
        self._patience_s = patience_s
        self.refuse = refuse
        self.bodies = Bodies(patience_s, body_bytes_max, bodies_bytes_max)
        self._connections_max = connections_max or _connections_max()
        self._connections: set[Connection] = set()
        self._silent: dict[Connection, asyncio.TimerHandle] = {}  # those that have sent no request yet, oldest first
        self._idle: dict[Connection, None] = {}  # connections whose requests are all answered, longest idle first
        self._log = logging.getLogger(__name__)
        self._runner: web.AppRunner | None = None
        self._server: asyncio.Server | None = None

    def route(self, method: str, path: str, handler: HttpHandler, *, is_long: bool = False) -> web.RouteDef:
        """A route of an application. The listener notes its clients' requests, and writes the answers.

        is_long: a client that ends its sending side is taken for gone, which cancels the handler; otherwise it gets
        its answer.
        """

        async def answer(request: web.Request) -> web.StreamResponse:
            if isinstance(request.protocol, Connection):
                self.note_heard(request.protocol)
                request.protocol.begin(request, is_long)
            large = _head_bytes(request) > HEAD_BYTES_MAX
            response = self.refuse(431, HEAD_TOO_LARGE) if large else await self._answer(handler, request)
            with contextlib.closing(self.taking(request)) as taking, taking:
                await response.prepare(request)
                await response.write_eof()
            return response

        return web.RouteDef(method, path, answer, {"expect_handler": self._expected})

    def note_heard(self, connection: Connection) -> None:
        """Notes that a connection has sent a request, or is gone."""
        if (timer := self._silent.pop(connection, None)) is not None:
            timer.cancel()

    def note_answered(self, connection: Connection) -> None:
        """Notes that a connection's request is answered; the next may follow."""
        self.note_heard(connection)
        self._idle.pop(connection, None)
        if connection in self._connections:
            self._idle[connection] = None

    def note_asking(self, connection: Connection) -> None:
        """Notes that a connection's next request is arriving."""
        self._idle.pop(connection, None)

    def note_gone(self, connection: Connection) -> None:
        """Notes that a connection is closed, or is being cut off."""
        self.note_heard(connection)
        self.note_asking(connection)
        self._connections.discard(connection)

    @property
    def patience_s(self) -> float:
        return self._patience_s

    def taking(self, request: web.Request) -> Taking:
        """Bounds the writing of the answer to this request. Close it after the answer."""
        return Taking(request.transport, self._patience_s)

    async def start(self, app: web.Application, host: str, port: int, log: logging.Logger, **options: Any) -> int:
        """Listens; returns the port, chosen by the system if 0 was given. OSError if it cannot.

        log: where aiohttp and we report; what clients send is not reported. options: of AppRunner.
        """
        app.add_routes([self.route("*", "/{path:.*}", self._not_there)])
        self._log = log
        self._runner = web.AppRunner(app, access_log=None, logger=log, shutdown_timeout=_CLOSE_S, **options)
        await self._runner.setup()
        try:
            self._server = await asyncio.get_running_loop().create_server(self._accept, host, port, backlog=_AT_ONCE)
        except BaseException:
            await self.close()
            raise
        for listening in self._server.sockets:  # asyncio passes the same number to listen()
            with socket.socket(fileno=os.dup(listening.fileno())) as same:
                same.listen(_BACKLOG)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stops listening; requests in progress are cut off unless they end within a second. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            await _stop_accepting(server)
            server.close()
        runner, self._runner = self._runner, None
        for timer in self._silent.values():
            timer.cancel()
        self._silent.clear()
        if runner is not None:
            await runner.cleanup()

    async def _answer(self, handler: HttpHandler, request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        except web.HTTPException as error:
            return self.refusal_of(error)
        except Exception as error:
            if isinstance(error, FAULTS_OF_CLIENTS) or request.writer.output_size > 0:
                raise
            self._log.exception("%s %s failed", request.method, request.path)
            return self.refuse(500, failure(error))

    def refusal_of(self, error: web.HTTPException) -> web.StreamResponse:
        refusal = self.refuse(error.status, (error.text or error.reason).rstrip())
        if (taken := error.headers.get("Accept-Encoding")) is not None:
            refusal.headers["Accept-Encoding"] = taken
        if error.keep_alive is False:
            refusal.force_close()
        return refusal

    async def _not_there(self, request: web.Request) -> web.StreamResponse:
        """Answers requests for which there is no route."""
        own = request.match_info.route.resource
        methods: set[str] = set()
        for other in request.app.router.resources():
            if other is not own:
                methods |= (await other.resolve(request))[1]
        if not methods:
            return self.refuse(404, f"there is no {request.path} here")
        refusal = self.refuse(405, f"{request.path} takes {' or '.join(sorted(methods))}, not {request.method}")
        refusal.headers["Allow"] = ", ".join(sorted(methods))
        return refusal

    async def _expected(self, request: web.Request) -> web.StreamResponse | None:
        """Like aiohttp's own, which cannot report an unknown value of Expect that is not text."""
        if request.headers["Expect"].lower() != "100-continue":
            return self.refuse(417, "Expect: only 100-continue is known")
        if (refusal := self.bodies.refused_by_head(request)) is not None:
            return self.refusal_of(refusal)
        if request.version == HttpVersion11 and request.transport is not None:
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        return None

    def _accept(self) -> asyncio.Protocol:
        assert self._runner is not None
        assert self._runner.server is not None  # set by setup()
        if len(self._connections) >= self._connections_max:
            spare = self._spare()
            if spare is None:
                return Refused(self.refuse(503, f"{len(self._connections)} connections are open, the most that may be"))
            self._cut_off(spare)
        connection = Connection(
            self,
            self._runner.server,
            access_log=None,
            logger=self._log,
            keepalive_timeout=self._patience_s,
            lingering_time=0,  # aiohttp's own lingering does not bound the bytes
            max_line_size=LINE_BYTES_MAX,
            max_field_size=LINE_BYTES_MAX,
            auto_decompress=False,  # aiohttp would decompress even refused bodies
        )
        self._connections.add(connection)
        loop = asyncio.get_running_loop()
        self._silent[connection] = loop.call_later(
            self._patience_s, self._cut_off, connection, late_words(self._patience_s)
        )
        return connection

    def _spare(self) -> Connection | None:
        """A connection without a request in progress that can be given up."""
        silent = next(iter(self._silent), None)
        return silent or next((connection for connection in self._idle if connection.is_idle), None)

    def _cut_off(self, connection: Connection, why: str = "") -> None:
        self.note_gone(connection)
        connection.cut_off(why)


def _connections_max() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return sys.maxsize
    return max(soft - max(int(soft * _DESCRIPTORS_KEPT_SHARE), _DESCRIPTORS_KEPT_MIN), 1)


def failure(error: Exception) -> str:
    """The message to a client for an error that is not the client's mistake; all of it is logged."""
    return clipped(f"{type(error).__name__}: {error}; the server's log says where")


async def _stop_accepting(server: asyncio.Server) -> None:
    """A socket that asyncio has accepted and not yet made a connection of would stay open after Server.close()."""
    loop = asyncio.get_running_loop()
    if isinstance(loop, asyncio.SelectorEventLoop):  # uvloop does both at once
        for listening in server.sockets:
            loop.remove_reader(listening.fileno())
        for _ in range(_ACCEPT_TURNS):
            await asyncio.sleep(0)


def _head_bytes(request: web.Request) -> int:
    return len(request.path_qs) + sum(len(name) + len(value) + 4 for name, value in request.raw_headers)

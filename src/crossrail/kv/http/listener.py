"""Accepts HTTP clients: a slow or silent one costs a file descriptor, and only for a limited time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

from crossrail._extras import needs
from crossrail.control.deadlines import in_time
from crossrail.control.messages import clipped
from crossrail.kv.http.taking import Taking

with needs(__name__, "'crossrail[kv]'"):
    from aiohttp import StreamReader, web
    from aiohttp.http import HttpProcessingError, HttpVersion11
    from aiohttp.http_exceptions import LineTooLong

PATIENCE_S = 60.0
_BACKLOG = 1024  # clients that connect while the loop is busy; those behind them try again after a second
_AT_ONCE = 8  # of them, that asyncio accepts before it looks at anything else, so before they are counted here
# Of the process, for its engine and its files, and for connections that are not counted yet, or not closed yet.
_DESCRIPTORS_KEPT_SHARE, _DESCRIPTORS_KEPT_MIN = 0.25, 64
_CLOSE_S = 1.0  # for answers that are on their way; aiohttp would wait a minute, and the same again
# For a request behind which more was sent than is read ahead: meanwhile no end is seen of its client.
_PIPELINED_S = 1.0
# For the rest of a body that nobody wants, so that its sender, who may look for no answer before he has sent it all,
# reads one. Who sends more is cut off.
_LINGER_S, _LINGER_BYTES_MAX = 10.0, 64 << 20
# Of a head, which takes twice that here, for as long as its client likes to take; aiohttp bounds only each line of it,
# and their number. Of further requests that wait behind one that runs, likewise.
_HEAD_BYTES_MAX = 64 << 10
_LINE_BYTES_MAX = 8190
_AHEAD_BYTES_MAX = 1 << 20
_BODY_BYTES_MAX = 16 << 20
_BODIES_BYTES_MAX = 256 << 20
_SMALL_BYTES = 64 << 10  # of each body, which are not counted: whoever holds back large ones keeps nobody else out

_LINE_END = "\n"
_HEAD_TOO_LARGE = f"the request's head has more than {_HEAD_BYTES_MAX} bytes"
_TOO_MANY_FIELDS = "Too many headers received"  # what aiohttp says of them; its error is as of any other nonsense
_OF_CLIENTS = (HttpProcessingError, web.RequestPayloadError, ConnectionResetError)  # what they do to us

HttpHandler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Refuse = Callable[[int, str], web.Response]


def _in_plain_text(status: int, words: str) -> web.Response:
    return web.Response(status=status, text=words + "\n")


class Listener:
    """Listens for an application, of aiohttp. Threads: that of the event loop.

    patience_s: in which a client must have sent its first request, the body of each, and have taken what is written to
    it; slower ones are cut off, and idle ones between requests. aiohttp waits for ever for the first three.
    refuse: makes the answer with this status and words, for what HTTP itself refuses: a path that is not there, a
    method, a body that is too large, bytes that are no HTTP; and for what a handler raises, which is logged.
    body_bytes_max, bodies_bytes_max: of a body, and of all that are read or worked on at a time.
    connections_max: None: as many as the limit of open files leaves room for. Beyond them, the oldest that has asked
    nothing is cut off; if there is none, the one that has been idle between requests the longest; if there is none
    either, the new one is answered 503. Without a bound asyncio would meet the limit, and log some tens of thousands
    of lines a second.
    Who sends so much behind a request that aiohttp reads no further is cut off unless that is answered within a second:
    that he leaves could not be seen. So is who sends heads of a MiB there. A head of more than 64 KiB is refused.
    Who ends his sending side gets the answer to what he has asked, unless its route is_long: then he has left, of which
    TCP shows nothing else.
    Bodies are taken as they are: nothing is unpacked, so what comes is what it costs. What is refused for its headers
    is not read; a body that nobody reads is thrown away for 10 s and 64 MiB, then its connection ends.
    Lifecycle: 1. made. 2. an application of its route()s. 3. start(). 4. close().
    """

    def __init__(
        self,
        patience_s: float = PATIENCE_S,
        refuse: Refuse = _in_plain_text,
        body_bytes_max: int = _BODY_BYTES_MAX,
        bodies_bytes_max: int = _BODIES_BYTES_MAX,
        connections_max: int | None = None,
    ) -> None:
        self._patience_s = patience_s
        self.refuse = refuse
        self._body_bytes_max = body_bytes_max
        self._bodies_bytes_max = bodies_bytes_max
        self._bodies_bytes = 0
        self._connections_max = connections_max or _connections_max()
        self._connections: set[_Connection] = set()
        self._silent: dict[_Connection, asyncio.TimerHandle] = {}  # those that have asked nothing so far, oldest first
        self._idle: dict[_Connection, None] = {}  # those whose requests are all answered, since the longest first
        self._log = logging.getLogger(__name__)
        self._runner: web.AppRunner | None = None
        self._server: asyncio.Server | None = None

    def route(self, method: str, path: str, handler: HttpHandler, *, is_long: bool = False) -> web.RouteDef:
        """Of an application. Of its clients it is known that they have asked something; answers are written here.

        is_long: who ends his sending side is taken for gone, which cancels the handler; others get their answer.
        """

        async def answer(request: web.Request) -> web.StreamResponse:
            if isinstance(request.protocol, _Connection):
                self.is_heard(request.protocol)
                request.protocol.begin(request, is_long)
            large = _head_bytes(request) > _HEAD_BYTES_MAX
            response = self.refuse(431, _HEAD_TOO_LARGE) if large else await self._answer(handler, request)
            with contextlib.closing(self.taking(request)) as taking, taking:
                await response.prepare(request)
                await response.write_eof()
            return response

        return web.RouteDef(method, path, answer, {"expect_handler": self._expected})

    def is_heard(self, connection: _Connection) -> None:
        """Whether it has asked something, or is gone."""
        if (timer := self._silent.pop(connection, None)) is not None:
            timer.cancel()

    def is_answered(self, connection: _Connection) -> None:
        """Its request is answered; the next may follow."""
        self.is_heard(connection)
        self._idle.pop(connection, None)
        if connection in self._connections:
            self._idle[connection] = None

    def is_asking(self, connection: _Connection) -> None:
        """Its next request comes."""
        self._idle.pop(connection, None)

    def is_gone(self, connection: _Connection) -> None:
        self.is_heard(connection)
        self.is_asking(connection)
        self._connections.discard(connection)

    @property
    def patience_s(self) -> float:
        return self._patience_s

    @property
    def late_words(self) -> str:
        return f"the request did not come in {self._patience_s:g} s"

    @asynccontextmanager
    async def body(self, request: web.Request) -> AsyncIterator[bytearray]:
        """All of it, for as long as the context lasts: it takes room of bodies_bytes_max until then, and is empty
        behind it. Raises what is answered when it is too large or packed, by its headers before any of it is read,
        there is no room, it does not come in time, or is not framed as its headers say; after that the connection ends.
        """
        if (early := self.refused_by_head(request)) is not None:
            raise early
        data = bytearray()
        refusal: web.HTTPException
        try:
            try:
                await in_time(self._read(request, data), self._patience_s)
            except asyncio.TimeoutError:
                refusal = web.HTTPRequestTimeout(text=self.late_words)
            except web.RequestPayloadError as error:
                cause = error.__cause__
                why = cause.message if isinstance(cause, HttpProcessingError) else "it was cut off"
                refusal = web.HTTPBadRequest(text=f"the request's body cannot be read: {why}")
            else:
                yield data
                return
            refusal.force_close()
            raise refusal
        finally:
            self._release(data)

    async def _read(self, request: web.Request, data: bytearray) -> None:
        while piece := await request.content.readany():
            self._bodies_bytes -= _counted(data)
            data += piece
            self._bodies_bytes += _counted(data)
            if len(data) > self._body_bytes_max:
                raise self._too_large()
            if self._bodies_bytes > self._bodies_bytes_max and _counted(data):
                self._release(data)  # before another one is read, which may have room then
                raise web.HTTPTooManyRequests(
                    text=f"bodies of requests take {self._bodies_bytes_max} bytes already, the most that is kept of all"
                )

    def refused_by_head(self, request: web.BaseRequest) -> web.HTTPException | None:
        """What its headers say of the body is enough to refuse it."""
        refusal: web.HTTPException
        codings = [coding.strip().lower() for coding in request.headers.getall("Content-Encoding", ())]
        if any(coding not in ("", "identity") for coding in codings):
            coding = clipped(", ".join(codings))
            text = f"the body has Content-Encoding: {coding}, and is taken only as it is, without one"
            refusal = web.HTTPUnsupportedMediaType(text=text, headers={"Accept-Encoding": "identity"})
            refusal.force_close()
            return refusal
        return self._too_large() if (request.content_length or 0) > self._body_bytes_max else None

    def _too_large(self) -> web.HTTPException:
        refusal = web.HTTPRequestEntityTooLarge(
            self._body_bytes_max, text=f"the body has more than {self._body_bytes_max} bytes"
        )
        refusal.force_close()
        return refusal

    def _release(self, data: bytearray) -> None:
        self._bodies_bytes -= _counted(data)
        data.clear()

    def taking(self, request: web.Request) -> Taking:
        """For all that is written as the answer to it. To be closed behind it."""
        return Taking(request.transport, self._patience_s)

    async def start(self, app: web.Application, host: str, port: int, log: logging.Logger, **options: Any) -> int:
        """Listens; returns the port, which the system chooses for 0. OSError when it cannot.

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
        for listening in self._server.sockets:  # asyncio takes one number for both
            with socket.socket(fileno=os.dup(listening.fileno())) as same:
                same.listen(_BACKLOG)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stops listening; requests under way are cut off, unless they end within a second. Idempotent."""
        server, self._server = self._server, None
        runner, self._runner = self._runner, None
        if server is not None:
            server.close()
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
            if isinstance(error, _OF_CLIENTS) or request.writer.output_size > 0:
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
        """Answers what no other route takes."""
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
        """As aiohttp's own, which cannot say of bytes that are no text that it does not know them."""
        if request.headers["Expect"].lower() != "100-continue":
            return self.refuse(417, "Expect: only 100-continue is known")
        if (refusal := self.refused_by_head(request)) is not None:
            return self.refusal_of(refusal)
        if request.version == HttpVersion11 and request.transport is not None:
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        return None

    def _accept(self) -> asyncio.Protocol:
        assert self._runner is not None
        assert self._runner.server is not None  # since its setup()
        if len(self._connections) >= self._connections_max:
            spare = self._spare()
            if spare is None:
                return _Refused(
                    self.refuse(503, f"{len(self._connections)} connections are open, the most that may be")
                )
            self._cut_off(spare)
        connection = _Connection(
            self,
            self._runner.server,
            access_log=None,
            logger=self._log,
            keepalive_timeout=self._patience_s,
            lingering_time=0,  # its own has no bound of bytes
            max_line_size=_LINE_BYTES_MAX,
            max_field_size=_LINE_BYTES_MAX,
            auto_decompress=False,  # it would go on for what was refused
        )
        self._connections.add(connection)
        loop = asyncio.get_running_loop()
        self._silent[connection] = loop.call_later(self._patience_s, self._cut_off, connection, self.late_words)
        return connection

    def _spare(self) -> _Connection | None:
        """A connection that has no request in progress."""
        silent = next(iter(self._silent), None)
        return silent or next((connection for connection in self._idle if connection.is_idle), None)

    def _cut_off(self, connection: _Connection, why: str = "") -> None:
        self.is_gone(connection)
        connection.cut_off(why)


class _Connection(web.RequestHandler):
    """aiohttp's, whose own answers and reports are the listener's affair."""

    __slots__ = (
        "_ahead_bytes", "_ending", "_half_bytes", "_has_ended", "_is_cut_off", "_is_long", "_listener", "_looked_at",
        "_looking", "_pipe",
    )  # fmt: skip

    def __init__(self, listener: Listener, server: web.Server, **options: Any) -> None:
        super().__init__(server, loop=asyncio.get_running_loop(), **options)
        self._listener = listener
        self._is_cut_off = False
        self._is_long = False  # the request that runs
        self._has_ended = False  # its client sends no more
        self._half_bytes = 0  # of a head that has begun, and not ended
        self._ahead_bytes = 0  # since requests wait behind the one that runs
        self._looking: asyncio.TimerHandle | None = None  # while nothing is read because too much is here
        self._looked_at: web.BaseRequest | None = None  # which request ran then
        self._pipe: asyncio.Transport | None = None  # its transport, also while that is closing
        self._ending: asyncio.TimerHandle | None = None  # while it is, with something left that nobody took yet

    @property
    def is_idle(self) -> bool:
        """Whether it waits for a request, and no byte of the next is there."""
        return self._waiter is not None and not self._waiter.done()

    def cut_off(self, why: str = "") -> None:
        """Also where it has no transport yet: asyncio accepts several before it connects the first.

        why: told to a client whose request is half here.
        """
        self._is_cut_off = True
        if why and self._half_bytes:
            self._end_half(408, why)
        self.force_close()

    def _end_half(self, status: int, why: str) -> None:
        if self.is_idle and self.transport is not None:
            self.transport.write(_closing(self._listener.refuse(status, why)))
        self.force_close()

    def _process_keepalive(self) -> None:
        if self.is_idle and asyncio.get_running_loop().time() >= self._next_keepalive_close_time:
            self.cut_off(self._listener.late_words)
        super()._process_keepalive()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._pipe = cast(asyncio.Transport, transport)  # uvloop's is one, but of no common class
        if self._is_cut_off:
            self._pipe.abort()
        super().connection_made(transport)

    def begin(self, request: web.Request, is_long: bool) -> None:
        """It runs now, and is of that kind."""
        self._is_long = is_long
        if self._has_ended and self._is_over_at_end(request):
            _abort(self.transport)

    def _is_over_at_end(self, request: web.BaseRequest) -> bool:
        """Nobody waits for its answer, or its body will not come."""
        return self._is_long or not request.content.is_eof()

    def eof_received(self) -> bool:  # type: ignore[override]  # asyncio's contract, of which aiohttp uses None alone
        """Whether the connection stays open for the answers to what runs, or waits. Its client may be gone as well."""
        is_asked = self._request_count > 0 and not self.is_idle
        running = self._current_request
        self._has_ended = is_asked and (running is None or not self._is_over_at_end(running))
        self._close_if_last()
        return self._has_ended

    def _close_if_last(self) -> None:
        """Behind the answer to what runs, if its client sends no more, and nothing waits."""
        if self._has_ended and not self._messages:
            self.close()

    async def start(self) -> None:
        try:
            await super().start()
        finally:
            self._end_in_time()

    def force_close(self) -> None:
        super().force_close()
        self._end_in_time()

    def _end_in_time(self) -> None:
        """A transport that closes waits for ever until what was written is taken."""
        if self._ending is None and self._pipe is not None and self._pipe.get_write_buffer_size() > 0:
            loop = asyncio.get_running_loop()
            self._ending = loop.call_later(self._listener.patience_s, self._pipe.abort)

    def data_received(self, data: bytes) -> None:
        if self.is_idle:
            self._listener.is_asking(self)
        super().data_received(data)
        # Line ends before a head are none of it.
        self._half_bytes = self._half_bytes + len(data) if self.is_idle and (self._half_bytes or data.strip()) else 0
        if self._half_bytes > _HEAD_BYTES_MAX:
            self._end_half(431, _HEAD_TOO_LARGE)
        self._ahead_bytes = self._ahead_bytes + len(data) if self._messages else 0
        if self._ahead_bytes > _AHEAD_BYTES_MAX:
            _abort(self.transport)
        if self._is_deaf and self._looking is None:
            self._look_later()

    @property
    def _is_deaf(self) -> bool:
        """Requests wait behind the one that runs, and nothing more is read."""
        transport = self.transport
        return bool(self._messages) and transport is not None and not transport.is_reading()

    def _look_later(self) -> None:
        self._looked_at = self._current_request
        self._looking = asyncio.get_running_loop().call_later(_PIPELINED_S, self._look)

    def _look(self) -> None:
        self._looking = None
        if self._is_deaf and self._current_request is not None and self._current_request is self._looked_at:
            _abort(self.transport)
        elif self._is_deaf:
            self._look_later()
        else:
            self._looked_at = None

    def connection_lost(self, exc: BaseException | None) -> None:
        self._listener.is_gone(self)
        if self._looking is not None:
            self._looking.cancel()
        self._looking = self._looked_at = None
        self._pipe = None
        super().connection_lost(exc)
        if self._ending is not None:
            self._ending.cancel()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answers bytes that are not HTTP, and what a handler raises in the middle of its answer."""
        if not isinstance(exc, HttpProcessingError) or request.writer.output_size > 0:
            return super().handle_error(request, status, exc, message)
        self._listener.is_heard(self)
        why = (message or "it is no HTTP").partition(_LINE_END)[0].rstrip(":")
        if isinstance(exc, LineTooLong):
            status, why = 431, f"a line of its head has more than {_LINE_BYTES_MAX} bytes"
        elif why == _TOO_MANY_FIELDS:
            status, why = 431, "its head has more fields than are taken"
        refusal = self._listener.refuse(status, f"the request cannot be read: {why}")
        refusal.force_close()
        return refusal

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, *more: Any
    ) -> tuple[web.StreamResponse, bool]:
        """What no route was found for has no path: OPTIONS *, CONNECT."""
        if isinstance(resp, web.HTTPException):
            resp = self._listener.refusal_of(resp)
        finished = await super().finish_response(request, resp, *more)
        if not request.content.is_eof() and not await self._thrown_away(request.content):
            self.force_close()
        self._listener.is_answered(self)
        self._close_if_last()
        return finished

    async def _thrown_away(self, content: StreamReader) -> bool:
        """Whether the rest of a body that nobody read came to its end, within the time and the bytes for that."""

        async def read() -> None:
            left = _LINGER_BYTES_MAX
            while left > 0 and (piece := await content.readany()):
                left -= len(piece)

        with contextlib.suppress(asyncio.TimeoutError, web.RequestPayloadError):
            await in_time(read(), min(_LINGER_S, self._listener.patience_s))
        return content.is_eof()

    def log_exception(self, *words: Any, **options: Any) -> None:
        """Clients that are gone are no events: aiohttp would report a traceback for each."""
        if not isinstance(options.get("exc_info"), _OF_CLIENTS):
            super().log_exception(*words, **options)


class _Refused(asyncio.Protocol):
    """A connection that there is no room for: it is told so, whatever it asks, and ends."""

    def __init__(self, refusal: web.Response) -> None:
        self._answer = _closing(refusal)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        pipe = cast(asyncio.Transport, transport)
        pipe.write(self._answer)
        pipe.close()


def _closing(refusal: web.Response) -> bytes:
    """All of it, as the last of a connection."""
    body = (refusal.text or "").encode()
    head = [
        f"HTTP/1.1 {refusal.status} {refusal.reason}",
        *(f"{name}: {value}" for name, value in refusal.headers.items() if name != "Content-Length"),
        f"Content-Length: {len(body)}",
        "Connection: close",
    ]
    return "\r\n".join([*head, "", ""]).encode() + body


def _connections_max() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return sys.maxsize
    return max(soft - max(int(soft * _DESCRIPTORS_KEPT_SHARE), _DESCRIPTORS_KEPT_MIN), 1)


def failure(error: Exception) -> str:
    """What a client is told of what is no mistake of its own; the whole of it is logged."""
    return clipped(f"{type(error).__name__}: {error}; the server's log says where")


def _head_bytes(request: web.Request) -> int:
    return len(request.path_qs) + sum(len(name) + len(value) + 4 for name, value in request.raw_headers)


def _counted(body: bytearray) -> int:
    return max(len(body) - _SMALL_BYTES, 0)


def _abort(transport: asyncio.Transport | None) -> None:
    """None: its client is gone already."""
    if transport is not None:
        transport.abort()

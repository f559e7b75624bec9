"""Where HTTP clients connect: one that is slow or silent costs a descriptor, and does not keep it for ever."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from crossrail._extras import needs
from crossrail.control.deadlines import in_time

with needs(__name__, "'crossrail[kv]'"):
    from aiohttp import web
    from aiohttp.http import HttpProcessingError, HttpVersion11

PATIENCE_S = 60.0
_BACKLOG = 1024  # clients that connect while the loop is busy; those behind them try again after a second
_LINGER_S = 10.0  # for the rest of a body that was refused, so that its sender reads why

HttpHandler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Refuse = Callable[[int, str], web.Response]


def _in_plain_text(status: int, words: str) -> web.Response:
    return web.Response(status=status, text=words + "\n")


class Listener:
    """Listens for an application, of aiohttp. Threads: that of the event loop.

    patience_s: in which a client must have sent its first request, the body of each, and have taken what is written to
    it; slower ones are cut off, and idle ones between requests. aiohttp waits for ever for the first three.
    refuse: makes the answer with this status and words, for what HTTP itself refuses: a path that is not there, a
    method, a body that is too large.
    Lifecycle: 1. made. 2. an application of its route()s. 3. start(). 4. close().
    """

    def __init__(self, patience_s: float = PATIENCE_S, refuse: Refuse = _in_plain_text) -> None:
        self._patience_s = patience_s
        self._refuse = refuse
        self._silent: dict[object, asyncio.TimerHandle] = {}  # connections that have asked nothing so far
        self._runner: web.AppRunner | None = None
        self._server: asyncio.Server | None = None

    def route(self, method: str, path: str, handler: HttpHandler) -> web.RouteDef:
        """Of an application. Of its clients it is known that they have asked something; answers are written here."""

        async def answer(request: web.Request) -> web.StreamResponse:
            if (timer := self._silent.pop(request.protocol, None)) is not None:
                timer.cancel()
            response = await self._answer(handler, request)
            with self.taking(request):
                await response.prepare(request)
                await response.write_eof()
            return response

        return web.RouteDef(method, path, answer, {"expect_handler": self._expected})

    async def body(self, request: web.Request) -> bytes:
        """All of it. HTTPRequestTimeout when it does not come, HTTPBadRequest when it is not encoded as its headers
        say; the connection ends then.
        """
        refusal: web.HTTPException
        try:
            return await in_time(request.read(), self._patience_s)
        except asyncio.TimeoutError:
            refusal = web.HTTPRequestTimeout(text=f"the request did not come in {self._patience_s:g} s")
        except web.RequestPayloadError as error:
            cause = error.__cause__
            why = cause.message if isinstance(cause, HttpProcessingError) else "it was cut off"
            refusal = web.HTTPBadRequest(text=f"the request's body cannot be read: {why}")
        refusal.force_close()
        raise refusal

    @contextmanager
    def taking(self, request: web.Request) -> Iterator[None]:
        """While the answer to it is written: a client that does not take that is cut off, which cancels the handler, or
        raises ConnectionResetError.
        """
        timer = asyncio.get_running_loop().call_later(self._patience_s, _abort, request.transport)
        try:
            yield
        finally:
            timer.cancel()

    async def start(self, app: web.Application, host: str, port: int, log: logging.Logger, **options: Any) -> int:
        """Listens; returns the port, which the system chooses for 0. OSError when it cannot.

        log: where aiohttp reports; what clients send is not reported. options: of AppRunner.
        """
        app.add_routes([self.route("*", "/{path:.*}", self._not_there)])
        linger_s = min(_LINGER_S, self._patience_s)
        log.addFilter(_is_ours)
        self._runner = web.AppRunner(
            app, access_log=None, keepalive_timeout=self._patience_s, lingering_time=linger_s, logger=log, **options
        )
        await self._runner.setup()
        try:
            self._server = await asyncio.get_running_loop().create_server(self._accept, host, port, backlog=_BACKLOG)
        except BaseException:
            await self.close()
            raise
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stops listening; requests under way are cut off. Idempotent."""
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
            refusal = self._refuse(error.status, (error.text or error.reason).rstrip())
            if error.keep_alive is False:
                refusal.force_close()
            return refusal

    async def _not_there(self, request: web.Request) -> web.StreamResponse:
        """For what no other route takes."""
        own = request.match_info.route.resource
        methods: set[str] = set()
        for resource in request.app.router.resources():
            if resource is not own:
                methods |= (await resource.resolve(request))[1]
        if not methods:
            return self._refuse(404, f"there is no {request.path} here")
        refusal = self._refuse(405, f"{request.path} takes {' or '.join(sorted(methods))}, not {request.method}")
        refusal.headers["Allow"] = ", ".join(sorted(methods))
        return refusal

    async def _expected(self, request: web.Request) -> web.StreamResponse | None:
        """As aiohttp's own, which cannot say of bytes that are no text that it does not know them."""
        if request.headers["Expect"].lower() != "100-continue":
            return self._refuse(417, "Expect: only 100-continue is known")
        if request.version == HttpVersion11 and request.transport is not None:
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        return None

    def _accept(self) -> asyncio.Protocol:
        assert self._runner is not None
        assert self._runner.server is not None  # since its setup()
        connection = self._runner.server()
        loop = asyncio.get_running_loop()
        self._silent[connection] = loop.call_later(self._patience_s, self._cut_off, connection)
        return connection

    def _cut_off(self, connection: web.RequestHandler) -> None:
        del self._silent[connection]
        connection.force_close()


def _abort(transport: asyncio.Transport | None) -> None:
    """None: its client is gone already."""
    if transport is not None:
        transport.abort()


def _is_ours(record: logging.LogRecord) -> bool:
    """What is no HTTP, and a client that is gone, are no events: aiohttp would log a traceback for each."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError | web.RequestPayloadError | ConnectionResetError)

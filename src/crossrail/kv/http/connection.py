"""One HTTP client's connection: aiohttp's protocol, with bounds on what a client sends, leaves unread or keeps open."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, cast

from crossrail._extras import needs
from crossrail.control.deadlines import in_time
from crossrail.kv.http.bodies import late_words

with needs(__name__, "'crossrail[kv]'"):
    from aiohttp import StreamReader, web
    from aiohttp.http import HttpProcessingError
    from aiohttp.http_exceptions import LineTooLong

if TYPE_CHECKING:
    from crossrail.kv.http.listener import Listener

# For a request with more data pipelined behind it than is read ahead: we cannot see the client leave meanwhile.
_PIPELINED_S = 1.0
# For discarding the rest of a body that nobody reads: its sender may not look for an answer before everything is sent.
# A sender that exceeds this is cut off.
_LINGER_S, _LINGER_BYTES_MAX = 10.0, 64 << 20
# Of a request's head, which takes twice that in memory for as long as the client likes; aiohttp bounds only the length
# and number of its lines. The same bound applies to further requests that are queued behind a running one.
HEAD_BYTES_MAX = 64 << 10
LINE_BYTES_MAX = 8190
_AHEAD_BYTES_MAX = 1 << 20

HEAD_TOO_LARGE = f"the request's head has more than {HEAD_BYTES_MAX} bytes"
_LINE_END = "\n"
_TOO_MANY_FIELDS = "Too many headers received"  # aiohttp's message; its class is that of any bad request
FAULTS_OF_CLIENTS = (HttpProcessingError, web.RequestPayloadError, ConnectionResetError)


class Connection(web.RequestHandler):
    """aiohttp's protocol; the answers and reports that aiohttp makes by itself are left to the listener."""

    __slots__ = (
        "_ahead_bytes", "_ending", "_half_bytes", "_has_ended", "_is_cut_off", "_is_long", "_listener", "_looked_at",
        "_looking", "_pipe",
    )  # fmt: skip

    def __init__(self, listener: Listener, server: web.Server, **options: Any) -> None:
        super().__init__(server, loop=asyncio.get_running_loop(), **options)
        self._listener = listener
        self._is_cut_off = False
        self._is_long = False  # of the running request
        self._has_ended = False  # the client sends no more
        self._half_bytes = 0  # received of an unfinished head
        self._ahead_bytes = 0  # received since requests are queued behind the running one
        self._looking: asyncio.TimerHandle | None = None  # set while reading is paused because too much is queued
        self._looked_at: web.BaseRequest | None = None  # the request that was running when that timer was set
        self._pipe: asyncio.Transport | None = None  # kept also while it is closing
        self._ending: asyncio.TimerHandle | None = None  # set while it is closing with unsent data left

    @property
    def is_idle(self) -> bool:
        """Whether it waits for a request, and no byte of the next one has arrived."""
        return self._waiter is not None and not self._waiter.done()

    def cut_off(self, why: str = "") -> None:
        """Aborts the connection, even before it has a transport: asyncio accepts several before it connects the first.

        why: told to a client whose request has partly arrived.
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
            self.cut_off(late_words(self._listener.patience_s))
        super()._process_keepalive()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._pipe = cast(asyncio.Transport, transport)  # uvloop's has the methods, but no common base class
        if self._is_cut_off:
            self._pipe.abort()
        super().connection_made(transport)

    def begin(self, request: web.Request, is_long: bool) -> None:
        """Marks a request as running. is_long: as in Listener.route."""
        self._is_long = is_long
        if self._has_ended and self._is_over_at_end(request):
            _abort(self.transport)

    def _is_over_at_end(self, request: web.BaseRequest) -> bool:
        """Whether end of file makes the request pointless: nobody waits for its answer, or its body cannot arrive."""
        return self._is_long or not request.content.is_eof()

    def eof_received(self) -> bool:  # type: ignore[override]  # asyncio's contract, of which aiohttp uses None alone
        """Whether to keep the connection for the answers to running and queued requests. The client may be gone as
        well.
        """
        is_asked = self._request_count > 0 and not self.is_idle
        running = self._current_request
        self._has_ended = is_asked and (running is None or not self._is_over_at_end(running))
        self._close_if_last()
        return self._has_ended

    def _close_if_last(self) -> None:
        """Closes after the running request's answer, if the client sends no more and nothing is queued."""
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
        """Bounds the time to close: a closing transport would wait for ever for the client to take what was written."""
        if self._ending is None and self._pipe is not None and self._pipe.get_write_buffer_size() > 0:
            loop = asyncio.get_running_loop()
            self._ending = loop.call_later(self._listener.patience_s, self._pipe.abort)

    def data_received(self, data: bytes) -> None:
        if self.is_idle:
            self._listener.note_asking(self)
        super().data_received(data)
        # Empty lines before a head do not belong to it.
        self._half_bytes = self._half_bytes + len(data) if self.is_idle and (self._half_bytes or data.strip()) else 0
        if self._half_bytes > HEAD_BYTES_MAX:
            self._end_half(431, HEAD_TOO_LARGE)
        self._ahead_bytes = self._ahead_bytes + len(data) if self._messages else 0
        if self._ahead_bytes > _AHEAD_BYTES_MAX:
            _abort(self.transport)
        if self._is_deaf and self._looking is None:
            self._look_later()

    @property
    def _is_deaf(self) -> bool:
        """Whether reading is paused because requests are queued behind the running one."""
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
        self._listener.note_gone(self)
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
        """Answers bytes that are not HTTP, and handlers that raise in the middle of their answer."""
        if not isinstance(exc, HttpProcessingError) or request.writer.output_size > 0:
            return super().handle_error(request, status, exc, message)
        self._listener.note_heard(self)
        why = (message or "it is no HTTP").partition(_LINE_END)[0].rstrip(":")
        if isinstance(exc, LineTooLong):
            status, why = 431, f"a line of its head has more than {LINE_BYTES_MAX} bytes"
        elif why == _TOO_MANY_FIELDS:
            status, why = 431, "its head has more fields than are taken"
        refusal = self._listener.refuse(status, f"the request cannot be read: {why}")
        refusal.force_close()
        return refusal

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, *more: Any
    ) -> tuple[web.StreamResponse, bool]:
        """Requests for which there is no route have no path: OPTIONS *, CONNECT."""
        if isinstance(resp, web.HTTPException):
            resp = self._listener.refusal_of(resp)
        finished = await super().finish_response(request, resp, *more)
        if not request.content.is_eof() and not await self._thrown_away(request.content):
            self.force_close()
        self._listener.note_answered(self)
        self._close_if_last()
        return finished

    async def _thrown_away(self, content: StreamReader) -> bool:
        """Whether the rest of an unread body ended within the limits on time and bytes."""

        async def read() -> None:
            left = _LINGER_BYTES_MAX
            while left > 0 and (piece := await content.readany()):
                left -= len(piece)

        with contextlib.suppress(asyncio.TimeoutError, web.RequestPayloadError):
            await in_time(read(), min(_LINGER_S, self._listener.patience_s))
        return content.is_eof()

    def log_exception(self, *words: Any, **options: Any) -> None:
        """Clients that disconnect are no events: aiohttp would log a traceback for each."""
        if not isinstance(options.get("exc_info"), FAULTS_OF_CLIENTS):
            super().log_exception(*words, **options)


class Refused(asyncio.Protocol):
    """A connection for which there is no room: it is told so, whatever it asks, and closed."""

    def __init__(self, refusal: web.Response) -> None:
        self._answer = _closing(refusal)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        pipe = cast(asyncio.Transport, transport)
        pipe.write(self._answer)
        pipe.close()


def _closing(refusal: web.Response) -> bytes:
    """The bytes of this answer, as the last one of a connection."""
    body = (refusal.text or "").encode()
    head = [
        f"HTTP/1.1 {refusal.status} {refusal.reason}",
        *(f"{name}: {value}" for name, value in refusal.headers.items() if name != "Content-Length"),
        f"Content-Length: {len(body)}",
        "Connection: close",
    ]
    return "\r\n".join([*head, "", ""]).encode() + body


def _abort(transport: asyncio.Transport | None) -> None:
    """Cuts the client off; None: it is gone already."""
    if transport is not None:
        transport.abort()

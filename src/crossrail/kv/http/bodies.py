"""Reads the bodies of requests: each one, and all that are held at a time, within bounds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from crossrail._extras import needs
from crossrail.control.deadlines import in_time
from crossrail.control.messages import clipped

with needs(__name__, "'crossrail[kv]'"):
    from aiohttp import web
    from aiohttp.http import HttpProcessingError

BODY_BYTES_MAX = 16 << 20
BODIES_BYTES_MAX = 256 << 20
_SMALL_BYTES = 64 << 10  # of each body, not counted: a client that holds back large bodies does not lock out small ones


class Bodies:
    """The bodies of one listener's requests. Threads: that of the event loop.

    patience_s: time for each body to arrive. bytes_max: of one body. held_bytes_max: of all bodies held at a time.
    held_bytes: how many are held now, not counting the first 64 KiB of each.
    """

    def __init__(self, patience_s: float, bytes_max: int, held_bytes_max: int) -> None:
        self._patience_s = patience_s
        self._bytes_max = bytes_max
        self._held_bytes_max = held_bytes_max
        self.held_bytes = 0

    @asynccontextmanager
    async def read(self, request: web.Request) -> AsyncIterator[bytearray]:
        """The whole body, valid inside the context. Meanwhile it counts in held_bytes; afterwards it is empty.

        Raises the HTTP answer if the body is too large or compressed (known from its headers, before any of it is
        read), if there is no room for it, if it does not arrive in time, or is not framed as its headers say. Then the
        connection ends.
        """
        if (early := self.refused_by_head(request)) is not None:
            raise early
        data = bytearray()
        refusal: web.HTTPException
        try:
            try:
                await in_time(self._fill(data, request), self._patience_s)
            except asyncio.TimeoutError:
                refusal = web.HTTPRequestTimeout(text=late_words(self._patience_s))
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

    async def _fill(self, data: bytearray, request: web.Request) -> None:
        while piece := await request.content.readany():
            self.held_bytes -= _counted(data)
            data += piece
            self.held_bytes += _counted(data)
            if len(data) > self._bytes_max:
                raise self._too_large()
            if self.held_bytes > self._held_bytes_max and _counted(data):
                self._release(data)  # before another body is read, which may have room then
                raise web.HTTPTooManyRequests(
                    text=f"bodies of requests take {self._held_bytes_max} bytes already, the most that is kept of all"
                )

    def refused_by_head(self, request: web.BaseRequest) -> web.HTTPException | None:
        """The refusal of a body whose headers suffice to refuse it; None: its headers are fine."""
        refusal: web.HTTPException
        codings = [coding.strip().lower() for coding in request.headers.getall("Content-Encoding", ())]
        if any(coding not in ("", "identity") for coding in codings):
            coding = clipped(", ".join(codings))
            text = f"the body has Content-Encoding: {coding}, and is taken only as it is, without one"
            refusal = web.HTTPUnsupportedMediaType(text=text, headers={"Accept-Encoding": "identity"})
            refusal.force_close()
            return refusal
        return self._too_large() if (request.content_length or 0) > self._bytes_max else None

    def _too_large(self) -> web.HTTPException:
        refusal = web.HTTPRequestEntityTooLarge(self._bytes_max, text=f"the body has more than {self._bytes_max} bytes")
        refusal.force_close()
        return refusal

    def _release(self, data: bytearray) -> None:
        self.held_bytes -= _counted(data)
        data.clear()


def late_words(patience_s: float) -> str:
    """The message for a client whose request did not arrive in time."""
    return f"the request did not come in {patience_s:g} s"


def _counted(body: bytearray) -> int:
    return max(len(body) - _SMALL_BYTES, 0)

"""How a completion gets to its client: whole, or as a stream of events."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec

from crossrail._extras import needs
from crossrail.kv.errors import RequestFailed
from crossrail.kv.http.errors import error_object, refusal
from crossrail.kv.http.listener import failure
from crossrail.kv.http.taking import Taking
from crossrail.kv.http.text import TextStream
from crossrail.kv.router.requests import Chunk

with needs(__name__, "'crossrail[kv]'"):
    from aiohttp import web

_END_STATUS: dict[str, int] = {"error": 502, "overloaded": 429, "unavailable": 503, "deadline": 504, "cancelled": 499}

_log = logging.getLogger("crossrail.kv.http")


class Answer:
    """How one request's tokens get back to its client.

    stop: tells the router that no more are wanted. on_first_token: called when the first token has arrived.
    """

    def __init__(
        self,
        name: str,
        prompt_tokens: int,
        text: TextStream,
        stop: Callable[[], object],
        on_first_token: Callable[[], object],
    ) -> None:
        self._frame = {"id": name, "object": "text_completion", "created": int(time.time()), "model": ""}
        self._on_first_token: Callable[[], object] | None = on_first_token
        self._prompt_tokens = prompt_tokens
        self._text = text
        self._stop = stop
        self._count = 0  # tokens given to the client so far

    async def whole(self, chunks: AsyncIterator[Chunk]) -> web.Response:
        tokens: list[int] = []
        text = ""
        async for chunk in chunks:
            taken, words, reason = self._take(chunk)
            tokens += taken
            self._count += len(taken)
            text += words
            if chunk.end is not None and (status := _END_STATUS.get(reason or "")):
                return refusal(status, f"{reason}: {chunk.end.detail}")
            if reason is not None:
                return web.json_response(self._object(tokens, text, reason) | self._usage())
        raise RequestFailed("its tokens stopped before it was finished")

    async def stream(
        self, http: web.Request, chunks: AsyncIterator[Chunk], taking: Taking, tells_usage: bool
    ) -> web.StreamResponse:
        """Streams the answer. Errors before the first token become statuses; later ones are sent as an event.

        tells_usage: as include_usage of StreamOptions.
        """
        first = await anext(chunks)
        if first.end is not None and (status := _END_STATUS.get(first.end.reason)):
            return refusal(status, f"{first.end.reason}: {first.end.detail}")
        event = self._event(first, tells_usage)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(http)
        while True:
            with taking:
                await response.write(_line(event))
            if "error" in event or event["choices"][0]["finish_reason"] is not None:
                break
            try:
                event = self._event(await anext(chunks), tells_usage)
            except Exception as error:  # the tokenizer's, for example
                _log.exception("request %s failed in the middle of its stream", self._frame["id"])
                event = error_object(500, failure(error))
        with taking:
            if tells_usage and "error" not in event:
                await response.write(_line(self._frame | {"choices": []} | self._usage()))
            await response.write(b"data: [DONE]\n\n")
            await response.write_eof()
        return response

    def _event(self, chunk: Chunk, tells_usage: bool) -> dict[str, Any]:
        tokens, text, reason = self._take(chunk)
        self._count += len(tokens)
        if chunk.end is not None and (status := _END_STATUS.get(reason or "")):
            return error_object(status, f"{reason}: {chunk.end.detail}")
        event = self._object(tokens, text, reason)
        if tells_usage:
            event["usage"] = None
        elif reason is not None:
            event |= self._usage()
        return event

    def _take(self, chunk: Chunk) -> tuple[list[int], str, str | None]:
        """A chunk's tokens up to the one that completes a stop, their text as far as it is known, and the reason to
        stop if any.
        """
        text = ""
        self._frame["model"] = chunk.model
        if chunk.tokens and self._on_first_token is not None:
            self._on_first_token()
            self._on_first_token = None
        for count, token in enumerate(chunk.tokens, 1):
            text += self._text.add([token])
            if self._text.stopped:
                self._stop()
                return chunk.tokens[:count], text, "stop"
        if chunk.end is None:
            return chunk.tokens, text, None
        return chunk.tokens, text + self._text.end(), "stop" if self._text.stopped else chunk.end.reason

    def _object(self, tokens: list[int], text: str, finish_reason: str | None) -> dict[str, Any]:
        choice = {"index": 0, "text": text, "token_ids": tokens, "finish_reason": finish_reason, "logprobs": None}
        return self._frame | {"choices": [choice]}

    def _usage(self) -> dict[str, Any]:
        asked, count = self._prompt_tokens, self._count
        return {"usage": {"prompt_tokens": asked, "completion_tokens": count, "total_tokens": asked + count}}


def _line(content: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"

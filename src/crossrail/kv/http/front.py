"""The router's HTTP front: OpenAI's completions API, streamed or whole, and endpoints for operators.

    POST /v1/completions        prompt (text or token ids), max_tokens, temperature, top_p, seed, stop, stream,
                                stream_options, ignore_eos
    GET  /v1/models, /v1/nodes  what is served, and by whom; /v1/models/NAME: one of them
    GET  /v1/requests/ID        how it ended, its timeline; also /trace (Chrome trace) and /timeline.svg below it
    GET  /health, /metrics      200 or 503; Prometheus
    GET  /kv/router             the address of the router's engine, for nodes (rendezvous.py)

X-Request-Id names a completions request, and is in every answer to it: the client's, or one made up here. All nodes log
and trace the request by it.

Statuses: 400 the request makes no sense or is not supported; 404 no node has that model; 408 the request did not arrive
in time; 409 the name was used before; 413 the body is too large; 415 the body is compressed; 429 no room now; 431 the
head is too large; 500 our mistake, or the tokenizer's; 502 a node failed; 503 no node; 504 the request's time was up. A
client that hangs up, or does not read what it is sent, cancels its request.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec
import numpy as np

from crossrail._extras import needs
from crossrail.control.deadlines import loop_time_s
from crossrail.errors import CrossrailError, UsageError
from crossrail.kv import messages as m
from crossrail.kv.errors import DuplicateRequest, Overloaded, Unavailable, UnknownModel
from crossrail.kv.foreign import exceptions_only
from crossrail.kv.http import rendezvous
from crossrail.kv.http.answer import Answer
from crossrail.kv.http.completion import CompletionBody
from crossrail.kv.http.errors import FieldError, refusal
from crossrail.kv.http.listener import PATIENCE_S, HttpHandler, Listener
from crossrail.kv.http.text import TextStream
from crossrail.kv.model import Tokenizer, Tokens
from crossrail.kv.router.metrics import RouterCollector
from crossrail.kv.router.router import Router
from crossrail.kv.timeline import chrome_trace, picture
from crossrail.kv.tracing import RequestSpan

with needs(__name__, "'crossrail[kv]'"):
    from aiohttp import web
    from prometheus_client import CollectorRegistry, generate_latest

_REQUEST_NAME = web.RequestKey("crossrail.request", str)
_TEXT_SHORT = 1 << 14  # characters; encoding so many takes some milliseconds at most and is not worth a thread
# The status of each error, and the field to blame: what routers, decoders and tokenizers refuse is the prompt.
_STATUS: dict[type[Exception], tuple[int, str | None]] = {
    DuplicateRequest: (409, None),
    UsageError: (400, "prompt"),
    UnknownModel: (404, "model"),
    Overloaded: (429, None),
    Unavailable: (503, None),
    CrossrailError: (502, None),
}

_log = logging.getLogger("crossrail.kv.http")


class Front:
    """Serves one router over HTTP. Threads: the event loop's.

    tokenizer: None: prompts are token ids, and answers have no text. secret: the cluster's; nodes use it to prove that
    they may know the router's address. patience_s: Listener's, for slow clients.
    """

    def __init__(
        self, router: Router, tokenizer: Tokenizer | None, secret: bytes, patience_s: float = PATIENCE_S
    ) -> None:
        self._router = router
        self._tokenizer = tokenizer
        self._token = rendezvous.token(secret)
        self._collector = RouterCollector(router)
        self._registry = CollectorRegistry()  # one per front, so that several routers of one process do not mix
        self._registry.register(self._collector)
        self._listener = Listener(patience_s, refusal)
        self._encoding = ThreadPoolExecutor(1, "crossrail-encode")
        self._begun_at = int(time.time())

    async def start(self, host: str, port: int) -> int:
        """Listens; returns the port, chosen by the system if 0 was given. OSError if it cannot."""
        app = web.Application()
        handlers: dict[str, HttpHandler] = {
            "/v1/models": self._models,
            "/v1/models/{model:.+}": self._model,  # model names may contain slashes
            "/v1/nodes": self._nodes,
            "/v1/requests/{request}": self._request,
            "/v1/requests/{request}/trace": self._trace,
            "/v1/requests/{request}/timeline.svg": self._picture,
            "/health": self._health,
            "/metrics": self._metrics,
            rendezvous.PATH: self._address,
        }
        app.add_routes([self._listener.route("GET", path, handler) for path, handler in handlers.items()])
        app.add_routes([self._listener.route("POST", "/v1/completions", _in_words(self._complete), is_long=True)])
        app.on_response_prepare.append(_tell_name)
        # When a client is gone its handler is cancelled, and with it the request.
        return await self._listener.start(app, host, port, _log, handler_cancellation=True)

    async def close(self) -> None:
        """Stops listening; requests in progress are cut off and cancelled, unless they end within a second. Idempotent.

        After Router.close() they have all ended, and only their clients have yet to be told.
        """
        await self._listener.close()
        self._encoding.shutdown(wait=False, cancel_futures=True)

    # --- completions ---

    async def _complete(self, http: web.Request) -> web.StreamResponse:
        begun_s = loop_time_s()
        name = http[_REQUEST_NAME] = _given_name(http) or self._router.new_name()
        body, prompt = await self._read(http)
        sampling = body.sampling()
        about: dict[str, str | int] = {"crossrail.request": name, "crossrail.prompt_tokens": len(prompt)}
        traceparent = http.headers.get("traceparent", "")
        span = RequestSpan("crossrail.kv.request", traceparent if traceparent.isascii() else "", about)
        failure = "cut off"  # unless it completes
        try:
            chunks = self._router.complete(
                prompt, sampling, model=body.model, request=name, traceparent=span.traceparent
            )
            response: web.StreamResponse
            async with contextlib.aclosing(chunks):
                stop = partial(self._router.stop_request, name, "a stop text came")
                answer = Answer(name, len(prompt), self._text(body), stop, self._on_first_token(begun_s))
                if body.stream:
                    tells_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
                    with contextlib.closing(self._listener.taking(http)) as taking:
                        response = await answer.stream(http, chunks, taking, tells_usage)
                else:
                    response = await answer.whole(chunks)
            end = self._router.ended(name)
            failure = "" if end is None or end.reason in ("stop", "length") else end.detail or end.reason
            return response
        except Exception as error:
            failure = str(error) or type(error).__name__
            raise
        finally:
            span.end(failure)
            self._collector.whole.add(loop_time_s() - begun_s)

    async def _read(self, http: web.Request) -> tuple[CompletionBody, Tokens]:
        """The body without its prompt, which may be long, and the prompt as tokens."""
        async with self._listener.bodies.read(http) as data:
            body = CompletionBody.from_json(data)
            prompt = await self._tokens(body.one_prompt())
            body.prompt = ""
            return body, prompt

    async def _tokens(self, prompt: str | list[int]) -> Tokens:
        if not isinstance(prompt, str):
            return np.array(prompt, np.int32)
        if self._tokenizer is None:
            raise FieldError("this router has no tokenizer: the prompt must be token ids", "prompt")
        if len(prompt) <= _TEXT_SHORT:
            with exceptions_only():
                return _checked(self._tokenizer.encode(prompt))
        # Tokenizing can take seconds, so it must not block other requests and the nodes; long prompts are tokenized one
        # at a time. Only tokens tell whether a text fits: one token may stand for any number of characters.
        loop = asyncio.get_running_loop()
        with exceptions_only(awaits=True):
            return _checked(await loop.run_in_executor(self._encoding, self._tokenizer.encode, prompt))

    def _text(self, body: CompletionBody) -> TextStream:
        if body.stops and self._tokenizer is None:
            raise FieldError("this router has no tokenizer: `stop` needs one", "stop")
        return TextStream(self._tokenizer, body.stops)

    def _on_first_token(self, begun_s: float) -> Callable[[], None]:
        return lambda: self._collector.first_token.add(loop_time_s() - begun_s)

    # --- status ---

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [self._model_object(name) for name in self._model_names()]})

    async def _model(self, http: web.Request) -> web.Response:
        name = http.match_info["model"]
        if name not in (names := self._model_names()):
            raise web.HTTPNotFound(text=f"no decoder has model {name!r}; there are {', '.join(names) or 'none'}")
        return web.json_response(self._model_object(name))

    def _model_names(self) -> list[str]:
        return sorted({member.record.model for member in self._router.roster.members("decoder")})

    def _model_object(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self._begun_at, "owned_by": "crossrail"}

    async def _nodes(self, _: web.Request) -> web.Response:
        members = [*self._router.roster.members("prefiller"), *self._router.roster.members("decoder")]
        nodes = [
            {"node": member.name, "role": member.record.role, "model": member.record.model}
            | {"layout": member.layout.describe(), "heard_s_ago": round(loop_time_s() - member.heard_s, 3)}
            | msgspec.to_builtins(member.load)
            for member in members
        ]
        return web.json_response({"router": self._router.name, "requests": self._router.requests, "nodes": nodes})

    async def _request(self, http: web.Request) -> web.Response:
        name = http.match_info["request"]
        adopted = self._router.adopted(name)
        if adopted is not None:
            end = None if adopted.end is None else msgspec.to_builtins(adopted.end)
            return web.json_response({"id": name, "tokens": adopted.tokens, "end": end})
        return web.json_response({"id": name, "end": msgspec.to_builtins(self._ended(name))})

    async def _trace(self, http: web.Request) -> web.Response:
        name = http.match_info["request"]
        text = chrome_trace({name: self._ended(name).timeline})
        return web.Response(text=text, content_type="application/json")

    async def _picture(self, http: web.Request) -> web.Response:
        name = http.match_info["request"]
        return web.Response(text=picture(name, self._ended(name).timeline), content_type="image/svg+xml")

    def _ended(self, name: str) -> m.End:
        end = self._router.ended(name)
        if end is None:
            raise web.HTTPNotFound(text=f"no request {name!r} has ended at this router, or not recently")
        return end

    async def _health(self, _: web.Request) -> web.Response:
        roles: tuple[m.Role, ...] = ("prefiller", "decoder")
        counts = {
            f"{role}s": sum(member.load.takes_requests for member in self._router.roster.members(role))
            for role in roles
        }
        is_ready = all(counts.values()) and not self._router.is_closing
        return web.json_response(counts, status=200 if is_ready else 503)

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._registry), headers={"Content-Type": "text/plain; version=0.0.4"})

    async def _address(self, http: web.Request) -> web.Response:
        given = http.headers.get("Authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(errors="surrogateescape"), self._token.encode()):
            # This is for a node's log, not for an OpenAI client.
            return web.Response(status=403, text="its secret is not this router's: all nodes need the same one\n")
        return web.Response(body=self._router.mailbox.address)


def _given_name(http: web.Request) -> str:
    """The request's name as given by the client or a proxy; may be empty. FieldError if it is not a valid name."""
    name = http.headers.get("X-Request-Id", "")
    if len(name) > m.NAME_CHARS_MAX:
        raise FieldError(f"X-Request-Id has {len(name)} characters, at most {m.NAME_CHARS_MAX} are taken", None)
    if not name.isprintable():
        raise FieldError("X-Request-Id must be printable text in UTF-8", None)
    return name


async def _tell_name(http: web.Request, response: web.StreamResponse) -> None:
    """Adds the name to every answer, even a refusal: OpenAI's clients show it with their errors."""
    if (name := http.get(_REQUEST_NAME)) is not None:
        response.headers["X-Request-Id"] = name


def _checked(encoded: Any) -> Tokens:
    """The tokens. TypeError if it is not a sequence of token ids: tokenizers are the user's own."""
    tokens = np.asarray(encoded)
    if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
        raise TypeError(f"the tokenizer's encode() returned {type(encoded).__name__} of {tokens.dtype}, no token ids")
    return tokens.astype(np.int32)


def _in_words(handler: HttpHandler) -> HttpHandler:
    """Maps our errors to statuses. Not a middleware: aiohttp keeps those of dead applications, and all
    they refer to.
    """

    async def answer(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        except CrossrailError as error:
            status, param = next(answer for kind, answer in _STATUS.items() if isinstance(error, kind))
            return refusal(status, str(error), error.param if isinstance(error, FieldError) else param)

    return answer

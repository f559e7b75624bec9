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
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Annotated, Any, cast

import msgspec
import numpy as np

from crossrail._extras import needs
from crossrail.control.deadlines import loop_time_s
from crossrail.errors import CrossrailError, UsageError
from crossrail.kv import messages as m
from crossrail.kv.errors import DuplicateRequest, Overloaded, RequestFailed, Unavailable, UnknownModel
from crossrail.kv.foreign import exceptions_only
from crossrail.kv.http import rendezvous
from crossrail.kv.http.errors import FieldError, error_object, refusal
from crossrail.kv.http.listener import PATIENCE_S, HttpHandler, Listener, failure
from crossrail.kv.http.taking import Taking
from crossrail.kv.http.text import TextStream
from crossrail.kv.model import Tokenizer, Tokens
from crossrail.kv.services.metrics import RouterCollector
from crossrail.kv.services.router import Router
from crossrail.kv.services.router_requests import Chunk
from crossrail.kv.services.timeline import chrome_trace, picture
from crossrail.kv.services.tracing import RequestSpan

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
_END_STATUS: dict[str, int] = {"error": 502, "overloaded": 429, "unavailable": 503, "deadline": 504, "cancelled": 499}

_log = logging.getLogger("crossrail.kv.http")

StopText = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
ModelName = Annotated[str, msgspec.Meta(max_length=1024)]
PromptText = Annotated[str, msgspec.Meta(max_length=4 << 20)]
Token = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
PromptTokens = Annotated[list[Token], msgspec.Meta(max_length=m.TOKENS_MAX)]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """include_usage: usage comes in an event of its own after the others, which have null there, as in OpenAI's API.
    Without it, the last event with a choice carries the usage. include_obfuscation: OpenAI's padding against
    eavesdroppers, which is not implemented: only false is accepted.
    """

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class CompletionBody(msgspec.Struct, forbid_unknown_fields=True):
    """What a client may ask for. OpenAI's other fields are refused, not ignored; null means not given.

    The fields from n on are accepted if they ask for what is done anyway: clients send them with their defaults.
    """

    # A prompt, or a list with one prompt.
    prompt: PromptText | Annotated[list[Token | PromptText | PromptTokens], msgspec.Meta(max_length=m.TOKENS_MAX)]
    model: ModelName | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=m.TOKENS_MAX)] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0.0, le=100.0)] | None = None
    top_p: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] | None = None
    seed: Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    stop: StopText | Annotated[list[StopText], msgspec.Meta(max_length=4)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    user: str | None = None
    n: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logprobs: int | None = None
    suffix: str | None = None
    logit_bias: dict[str, float] | None = None
    repetition_penalty: float | None = None
    top_k: int | None = None
    min_p: float | None = None

    def one_prompt(self) -> str | list[int]:
        """The only prompt. UsageError for several."""
        if isinstance(self.prompt, str):
            return self.prompt
        if set(map(type, self.prompt)) <= {int}:
            return cast(list[int], self.prompt)
        if len(self.prompt) > 1:
            count = len(self.prompt)
            words = f"`prompt` has {count} entries, not all of them token ids: a list of prompts may have one"
            raise FieldError(words, "prompt")
        return cast("str | list[int]", self.prompt[0])

    def sampling(self) -> m.Sampling:
        """The sampling options, with OpenAI's defaults. UsageError for unsupported values."""
        for name, done in _DONE_ANYWAY.items():
            if (value := getattr(self, name)) is not None and value not in done:
                only = f", only {' or '.join(map(json.dumps, done))}" if done else ""
                raise FieldError(f"`{name}` = {m.clipped(json.dumps(value))} is not supported{only}", name)
        if self.stream_options is not None and not self.stream:
            raise FieldError("`stream_options` is given, and `stream` is not true", "stream_options")
        if self.stream_options is not None and self.stream_options.include_obfuscation:
            raise FieldError("`include_obfuscation` = true is not supported, only false", "stream_options")
        given = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        # Drawn here, not at a decoder: a decoder that takes over from a dead one has to draw the same tokens.
        given.setdefault("seed", secrets.randbits(63))
        given["seed"] %= 1 << 63  # negative seeds are as good as others
        if given.get("top_p") == 0.0:  # keep only the likeliest token
            given |= {"top_p": 1.0, "temperature": 0.0}
        return m.Sampling(**{**_DEFAULTS, **given}, ignore_end=bool(self.ignore_eos))


_SAMPLING = ("max_tokens", "temperature", "top_p", "seed")
_DEFAULTS = {"max_tokens": 16, "temperature": 1.0}
_DONE_ANYWAY: dict[str, tuple[object, ...]] = {
    "n": (1,), "best_of": (1,), "echo": (False,), "presence_penalty": (0,), "frequency_penalty": (0,), "logprobs": (),
    "suffix": ("",), "logit_bias": ({},), "repetition_penalty": (1,), "top_k": (0, -1), "min_p": (0,),
}  # fmt: skip


_decoder = msgspec.json.Decoder(CompletionBody)


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
                answer = _Answer(name, len(prompt), self._text(body), stop, self._on_first_token(begun_s))
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
            try:
                body = _decoder.decode(data)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise FieldError.of_json(error) from None
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
        stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
        if stops and self._tokenizer is None:
            raise FieldError("this router has no tokenizer: `stop` needs one", "stop")
        return TextStream(self._tokenizer, stops)

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


class _Answer:
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


def _line(content: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


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

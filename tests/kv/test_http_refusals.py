"""What the router's front does not do, and how it says so."""

import asyncio
import io
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from crossrail.kv import messages as m
from crossrail.kv.http.front import Front
from crossrail.kv.model import Tokens
from crossrail.kv.toy import ToyTokenizer
from tests.kv.asking import SLOW_S, TEXT, answer_of, body, expected
from tests.kv.conftest import quiet, start, until
from tests.kv.steps import hold
from tests.support.kv_cluster import NODE, ROUTER, SECRET, Cluster, prompt_of
from tests.support.limits import WAIT_S


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"stream_options": {"include_usage": True}}, "`stream` is not true"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "include_obfuscation"),
    ],
    ids=["whole", "unknown"],
)
async def test_options_of_a_stream_that_make_no_sense_are_refused(
    cluster: Cluster, url: str, client: aiohttp.ClientSession, changes: dict[str, object], why: str
) -> None:
    await start(cluster)
    async with client.post(url + "/v1/completions", json=body(**changes)) as response:
        assert response.status == 400
        assert why in (await response.json())["error"]["message"]


@pytest.mark.parametrize("changes", [{"prompt": TEXT}, {"prompt": [1, 2], "stop": "x"}], ids=["text", "stop"])
async def test_router_without_a_tokenizer_takes_token_ids_alone(
    cluster: Cluster, client: aiohttp.ClientSession, changes: dict[str, object]
) -> None:
    await start(cluster)
    front = Front(cluster.router, None, SECRET)
    url = f"http://127.0.0.1:{await front.start('127.0.0.1', 0)}/v1/completions"
    async with client.post(url, json=body(**changes)) as response:
        assert response.status == 400
        assert "this router has no tokenizer" in (await response.json())["error"]["message"]
    prompt = ToyTokenizer().encode(TEXT).tolist()
    async with client.post(url, json=body(prompt=prompt)) as response:
        choice = (await response.json())["choices"][0]
    assert (choice["token_ids"], choice["text"]) == (await expected(), "")
    await front.close()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"max_tokens": 0}, "`int` >= 1 - at `$.max_tokens`"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": [-1]}, ">= 0"),
        ({"temperature": "hot"}, "Expected `float | null`"),
        ({"n": 2}, "`n` = 2 is not supported, only 1"),
        ({"echo": True}, "`echo` = true is not supported, only false"),
        ({"logprobs": 0}, "`logprobs` = 0 is not supported"),
        ({"logit_bias": {"3": 1}}, '`logit_bias` = {"3": 1.0} is not supported, only {}'),
        ({"presence_penalty": 0.5}, "`presence_penalty` = 0.5 is not supported, only 0"),
        ({"tools": []}, "unknown field `tools`"),
        ({"stop": ""}, "length >= 1 - at `$.stop`"),
        ({"prompt": [1, 2, 300]}, "tokens must be in 0..256, and 300 is not"),
        ({"prompt": "x" * 700}, "take 88 pages"),
        ({"prompt": "x" * 500, "max_tokens": 200}, "take 88 pages, node 'd0' has 64"),
        ({"prompt": ["a", "b"]}, "`prompt` has 2 entries, not all of them token ids: a list of prompts may"),
        ({"prompt": [1, "b"]}, "`prompt` has 2 entries, not all of them token ids"),
        ({"prompt": [[]]}, "the prompt is empty"),
        ({"top_k": 5}, "`top_k` = 5 is not supported, only 0 or -1"),
        ({"min_p": 0.1}, "`min_p` = 0.1 is not supported, only 0"),
        ({"repetition_penalty": 1.1}, "`repetition_penalty` = 1.1 is not supported, only 1"),
        ({"top_p": -0.1}, ">= 0.0 - at `$.top_p`"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else next(iter(value)),
)
async def test_what_makes_no_sense_is_refused_in_words(
    cluster: Cluster, url: str, client: aiohttp.ClientSession, wrong: dict[str, object], words: str
) -> None:
    await start(cluster)
    async with client.post(url + "/v1/completions", json=body(**wrong)) as response:
        answer = await response.json()
    assert words in answer["error"]["message"]
    assert (response.status, answer["error"]["param"]) == (400, next(iter(wrong)))


@pytest.mark.parametrize(
    ("sent", "param"),
    [
        ('{"prompt": "x", "max_tokens": 0}', "max_tokens"),
        ('{"prompt": [1, -1]}', "prompt"),
        ('{"prompt": "x", "tools": []}', "tools"),
        ("{}", "prompt"),
        ('{"prompt": "x", "n": 2}', "n"),
        ('{"prompt": ["x", "y"]}', "prompt"),
        ('{"prompt": "x", "stream_options": {}}', "stream_options"),
        ('{"prompt": "x", "stream": true, "stream_options": {"x": 1}}', "stream_options"),
        ('{"prompt": ""}', "prompt"),
        ('{"prompt": ', None),
        ("[]", None),
        ("", None),
    ],
)
async def test_error_names_the_field(url: str, client: aiohttp.ClientSession, sent: str, param: str | None) -> None:
    async with client.post(url + "/v1/completions", data=sent) as response:
        error = (await response.json())["error"]
    assert (error["param"], error["code"], error["type"]) == (param, 400, "invalid_request_error")
    assert param is not None or error["message"].startswith(("the prompt is empty", "the body is no JSON"))


@pytest.mark.parametrize(
    ("method", "path", "status", "words"),
    [
        ("GET", "/", 404, "there is no / here"),
        ("POST", "/v1/chat/completions", 404, "there is no /v1/chat/completions here"),
        ("GET", "/v1/models/other", 404, "no decoder has model 'other'; there are none"),
        ("GET", "/v1/requests/other", 404, "no request 'other' has ended at this router, or not recently"),
        ("OPTIONS", "/v1/completions", 405, "/v1/completions takes POST, not OPTIONS"),
        ("POST", "/v1/models", 405, "/v1/models takes GET or HEAD, not POST"),
        ("POST", "/v1/completions", 413, "the body has more than 16777216 bytes"),
    ],
)
async def test_what_http_itself_refuses_is_an_error_as_any_other(
    url: str, client: aiohttp.ClientSession, method: str, path: str, status: int, words: str
) -> None:
    data = io.BytesIO(b" " * (17 << 20 if status == 413 else 0))
    async with client.request(method, url + path, data=data) as response:
        error = {"message": words, "type": "invalid_request_error", "param": None, "code": status}
        assert (response.status, await response.json()) == (status, {"error": error})
        if status == 405:
            assert response.headers["Allow"] == ("POST" if "completions" in path else "GET, HEAD")


async def test_statuses_say_what_to_do(cluster: Cluster, url: str, client: aiohttp.ClientSession) -> None:
    cluster.router.options = replace(ROUTER, requests_max=1, queue_s=0.1)
    async with client.post(url + "/v1/completions", json=body()) as response:
        assert response.status == 503
    async with client.get(url + "/health") as response:
        assert response.status == 503
    await start(cluster, token_s=SLOW_S)
    async with client.get(url + "/health") as response:
        assert (response.status, await response.json()) == (200, {"prefillers": 1, "decoders": 1})
    named = {"X-Request-Id": "mine"}
    first = asyncio.ensure_future(client.post(url + "/v1/completions", json=body(), headers=named))
    await until(lambda: cluster.router.requests == 1, "the request is under way")
    async with client.post(url + "/v1/completions", json=body()) as response:
        assert response.status == 429 and response.headers["Retry-After"] == "1"
    async with await first as response:
        assert (await response.json())["id"] == "mine"
    async with client.post(url + "/v1/completions", json=body(), headers=named) as response:
        assert response.status == 409


async def test_router_that_drains_finishes_and_takes_nothing_new(
    cluster: Cluster, url: str, client: aiohttp.ClientSession
) -> None:
    await start(cluster, token_s=SLOW_S)
    first = asyncio.ensure_future(client.post(url + "/v1/completions", json=body()))
    await until(lambda: cluster.router.requests == 1, "the request is under way")
    assert not await cluster.router.drain(0.0)
    drained = asyncio.ensure_future(cluster.router.drain(WAIT_S))
    async with client.post(url + "/v1/completions", json=body()) as response:
        assert response.status == 503 and response.headers["Retry-After"] == "1"
        assert "is closing" in (await response.json())["error"]["message"]
    async with client.get(url + "/health") as response:
        assert (response.status, await response.json()) == (503, {"prefillers": 1, "decoders": 1})
    async with await first as response:
        assert (await response.json())["choices"][0]["token_ids"] == await expected()
    assert await drained


async def test_request_that_waits_is_told_that_the_router_is_closing(
    cluster: Cluster, url: str, client: aiohttp.ClientSession
) -> None:
    """In the time that its connection is left."""
    cluster.router.options = replace(ROUTER, queue_s=2 * WAIT_S)
    waiting = asyncio.ensure_future(client.post(url + "/v1/completions", json=body()))
    await until(lambda: cluster.router.requests == 1, "it waits for a decoder")
    await cluster.router.close()
    async with await asyncio.wait_for(waiting, 1.0) as response:
        assert response.status == 502
        assert "the router is closing" in (await response.json())["error"]["message"]


async def test_nodes_that_drain_make_no_router_ready(cluster: Cluster, url: str, client: aiohttp.ClientSession) -> None:
    await start(cluster)
    goes_on = hold(cluster.nodes["d0"])
    running = asyncio.ensure_future(cluster.complete(prompt_of(100), m.Sampling(8)))
    await until(lambda: cluster.nodes["d0"].load().requests, "the decoder has something to do")
    drained = asyncio.ensure_future(cluster.nodes["d0"].drain(WAIT_S))
    await until(lambda: cluster.router.roster.members("decoder")[0].load.draining, "the router has heard of it")
    async with client.get(url + "/health") as response:
        assert (response.status, await response.json()) == (503, {"prefillers": 1, "decoders": 0})
    goes_on.set()
    await asyncio.gather(running, drained)


async def test_nodes_whose_models_hang_make_no_router_ready(
    cluster: Cluster, url: str, client: aiohttp.ClientSession
) -> None:
    await start(cluster)
    (member,) = cluster.router.roster.members("decoder")
    cluster.nodes["d0"].load = lambda: m.Load(hangs=True)  # type: ignore[method-assign]
    await until(lambda: member.load.hangs, "the router has heard of it")
    async with client.get(url + "/health") as response:
        assert (response.status, await response.json()) == (503, {"prefillers": 1, "decoders": 0})


@pytest.mark.parametrize("stream", [False, True])
async def test_request_whose_only_prefiller_hangs_is_told_what_new_ones_are_told(
    cluster: Cluster, url: str, client: aiohttp.ClientSession, stream: bool
) -> None:
    cluster.node_options = replace(NODE, model_timeout_s=0.3)
    await start(cluster)
    run, goes_on = cluster.nodes["p0"].model.prefill, asyncio.Event()

    async def hanging_run(*arguments: Any) -> bytes:
        cluster.router.options = replace(ROUTER, queue_s=0.3)
        await goes_on.wait()
        return await run(*arguments)

    cluster.nodes["p0"].model.prefill = hanging_run
    for words in ("no other prefiller within 0.3 s after 'p0': ", "the model hangs at node 'p0'"):
        async with client.post(url + "/v1/completions", json=body(stream=stream)) as response:
            assert (response.status, response.headers["Retry-After"]) == (503, "1")
            assert words in (await response.json())["error"]["message"]
    assert cluster.router.counts["unavailable"] == 2
    goes_on.set()


async def test_decoder_that_dies_ends_a_stream_in_words(
    cluster: Cluster, url: str, client: aiohttp.ClientSession
) -> None:
    await start(cluster, token_s=0.002)
    async with client.post(url + "/v1/completions", json=body(stream=True, max_tokens=200)) as response:
        await response.content.readline()
        await cluster.kill("d0")
        rest = (await response.content.read()).decode()
    error = json.loads(next(line for line in rest.split("data: ") if line.startswith('{"error"')))["error"]
    assert error["message"].startswith("unavailable: its decoder is gone")
    assert (error["type"], error["code"]) == ("server_error", 503)


@pytest.mark.parametrize(
    ("headers", "sent"),
    [
        ({}, b'{"prompt": "\xff"}'),
        ({}, b"\xff\xfe"),
        ({"X-Request-Id": "\udcff"}, b'{"prompt": "x"}'),
        ({"X-Request-Id": "a\x1b[31m"}, b'{"prompt": "x"}'),
    ],
    ids=["prompt", "body", "name", "escape"],
)
async def test_what_is_no_text_is_the_clients_mistake(
    url: str, client: aiohttp.ClientSession, headers: dict[str, str], sent: bytes
) -> None:
    request = b"".join(
        [
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n",
            *(f"{name}: {value}\r\n".encode(errors="surrogateescape") for name, value in headers.items()),
            b"Content-Length: %d\r\n\r\n" % len(sent),
            sent,
        ]
    )
    assert (await answer_of(url, request)).split(b" ")[1] == b"400"


class Panic(BaseException):
    """As tokenizers in Rust raise it."""


class FailingTokenizer(ToyTokenizer):
    """Somebody's own, with mistakes: in the prompts "?", "words" and "!", and in tokens behind the first three."""

    def __init__(self) -> None:
        self.decoded = 0

    def encode(self, text: str) -> Tokens:
        if text == "words":
            return text.split()
        if text.startswith("!"):
            raise Panic("no char boundary")
        return super().encode(text if text != "?" else {}[text])

    def decode(self, tokens: Sequence[int]) -> str:
        self.decoded += bool(tokens)
        if self.decoded > 3:
            raise ValueError("token is not mine")
        return super().decode(tokens)


@pytest.mark.parametrize(
    ("asked", "status", "message"),
    [
        ({"prompt": "?"}, 500, "KeyError: '?'; the server's log says where"),
        (
            {"prompt": "words"},
            500,
            "TypeError: the tokenizer's encode() returned list of <U5, no token ids; the server's log says where",
        ),
        ({"prompt": "!"}, 500, "RuntimeError: Panic: no char boundary; the server's log says where"),
        ({"prompt": "!" * 20_000}, 500, "RuntimeError: Panic: no char boundary; the server's log says where"),
        ({}, 500, "ValueError: token is not mine; the server's log says where"),
        ({"stream": True}, 200, "ValueError: token is not mine; the server's log says where"),
    ],
    ids=["prompt", "tokens", "panic", "panic of a long one", "answer", "stream"],
)
async def test_tokenizer_that_raises_is_told_and_logged(
    cluster: Cluster,
    client: aiohttp.ClientSession,
    caplog: pytest.LogCaptureFixture,
    asked: dict[str, object],
    status: int,
    message: str,
) -> None:
    await start(cluster)
    front = Front(cluster.router, FailingTokenizer(), SECRET)
    url = f"http://127.0.0.1:{await front.start('127.0.0.1', 0)}/v1/completions"
    async with client.post(url, json=body(**asked)) as response:
        answer = await response.text()
    if status == 200:
        *_, answer, done, _ = [line.removeprefix("data: ") for line in answer.split("\n\n")]
        assert done == "[DONE]"
    error = {"message": message, "type": "server_error", "param": None, "code": 500}
    assert (response.status, json.loads(answer)) == (status, {"error": error})
    assert [bool(record.exc_info) for record in caplog.records] == [True]
    await until(lambda: cluster.router.requests == 0, "the request is given up")
    await quiet(cluster)
    await front.close()

"""The router's front, as clients, nodes and Prometheus see it."""

import asyncio
import contextlib
import io
import json
import logging
import select
import socket
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from crossrail.kv import messages as m
from crossrail.kv.decoder import Decoder
from crossrail.kv.http import Front
from crossrail.kv.listener import Listener
from crossrail.kv.model import Tokens
from crossrail.kv.prefiller import Prefiller
from crossrail.kv.rendezvous import RouterNotFound, find_by_http
from crossrail.kv.toy import ToyModel, ToyTokenizer
from tests.kv.conftest import quiet, start, until
from tests.support.kv_cluster import LAYOUT, ROUTER, SECRET, Cluster, monolithic, prompt_of
from tests.support.limits import WAIT_S
from tests.support.metrics import read
from tests.support.promql import assert_answered

TEXT = "To be, or not to be, that is the question."
SLOW_S = 0.0004


@pytest.fixture
async def client(nothing_leaks: None) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=WAIT_S)) as session:
        yield session


def body(**changes: object) -> dict[str, object]:
    return {"prompt": TEXT, "max_tokens": 8, "temperature": 0.7, "seed": 3, "ignore_eos": True} | changes


async def expected(max_tokens: int = 8) -> list[int]:
    sampling = m.Sampling(max_tokens, temperature=0.7, seed=3, ignore_end=True)
    return await monolithic(ToyTokenizer().encode(TEXT), sampling)


async def test_completion_whole(cluster: Cluster, url: str, client: aiohttp.ClientSession) -> None:
    await start(cluster)
    async with client.post(url + "/v1/completions", json=body()) as response:
        answer = await response.json()
    assert response.status == 200
    choice = answer["choices"][0]
    assert (choice["token_ids"], choice["finish_reason"]) == (await expected(), "length")
    assert choice["text"] == ToyTokenizer().decode(choice["token_ids"])
    assert answer["usage"] == {"prompt_tokens": len(TEXT), "completion_tokens": 8, "total_tokens": len(TEXT) + 8}


async def test_completion_of_token_ids(cluster: Cluster, url: str, client: aiohttp.ClientSession) -> None:
    await start(cluster)
    prompt = prompt_of(50)
    async with client.post(url + "/v1/completions", json=body(prompt=prompt.tolist(), temperature=0)) as response:
        answer = await response.json()
    assert answer["choices"][0]["token_ids"] == await monolithic(prompt, m.Sampling(8, ignore_end=True))


async def test_what_is_null_is_not_given_and_what_is_done_anyway_may_be_asked_for(
    cluster: Cluster, url: str, client: aiohttp.ClientSession
) -> None:
    await start(cluster)
    neutral = {"n": 1, "best_of": 1, "echo": False, "presence_penalty": 0.0, "frequency_penalty": 0, "logit_bias": {}}
    neutral |= {"repetition_penalty": 1.0, "top_k": -1, "min_p": 0.0}
    absent = dict.fromkeys(("top_p", "stop", "stream", "user", "model", "logprobs", "suffix", *neutral))
    for more in (neutral, absent):
        async with client.post(url + "/v1/completions", json=body(**more)) as response:
            assert (await response.json())["choices"][0]["token_ids"] == await expected()
    nothing = dict.fromkeys(("max_tokens", "temperature", "ignore_eos"))
    async with client.post(url + "/v1/completions", json=body(**nothing)) as response:
        tokens = (await response.json())["choices"][0]["token_ids"]
    assert tokens == await monolithic(ToyTokenizer().encode(TEXT), m.Sampling(16, temperature=1.0, seed=3))


async def test_list_of_one_prompt_is_that_prompt(cluster: Cluster, url: str, client: aiohttp.ClientSession) -> None:
    await start(cluster)
    for prompt in ([TEXT], [list(TEXT.encode())]):
        async with client.post(url + "/v1/completions", json=body(prompt=prompt)) as response:
            assert (await response.json())["choices"][0]["token_ids"] == await expected()


async def test_top_p_of_nothing_is_greedy_and_negative_seeds_are_seeds(
    cluster: Cluster, url: str, client: aiohttp.ClientSession
) -> None:
    await start(cluster)
    wanted = [m.Sampling(8, ignore_end=True), m.Sampling(8, temperature=0.7, seed=(1 << 63) - 1, ignore_end=True)]
    for changes, sampling in zip([{"top_p": 0}, {"seed": -1}], wanted, strict=True):
        async with client.post(url + "/v1/completions", json=body(**changes)) as response:
            tokens = (await response.json())["choices"][0]["token_ids"]
        assert tokens == await monolithic(ToyTokenizer().encode(TEXT), sampling)


async def test_without_a_seed_each_request_draws_its_own(
    cluster: Cluster, url: str, client: aiohttp.ClientSession
) -> None:
    await start(cluster)
    answers = []
    for _ in range(2):
        async with client.post(url + "/v1/completions", json=body(seed=None, temperature=10.0)) as response:
            answers.append((await response.json())["choices"][0]["token_ids"])
    assert answers[0] != answers[1]


async def test_completion_streamed(cluster: Cluster, url: str, client: aiohttp.ClientSession) -> None:
    await start(cluster)
    async with client.post(url + "/v1/completions", json=body(stream=True)) as response:
        assert response.headers["Content-Type"] == "text/event-stream"
        lines = [line.decode().strip() async for line in response.content if line.strip()]
    assert lines.pop() == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert [token for event in events for token in event["choices"][0]["token_ids"]] == await expected()
    assert [event["choices"][0]["finish_reason"] for event in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1]["choices"][0]["finish_reason"] == "length" and "usage" in events[-1]


async def test_usage_is_streamed_as_it_was_asked_for(cluster: Cluster, url: str, client: aiohttp.ClientSession) -> None:
    await start(cluster)
    options = {"include_usage": True}
    async with client.post(url + "/v1/completions", json=body(stream=True, stream_options=options)) as response:
        lines = [line.decode().strip() async for line in response.content if line.strip()]
    assert lines.pop() == "data: [DONE]"
    *events, last = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert [token for event in events for token in event["choices"][0]["token_ids"]] == await expected()
    assert all(event["usage"] is None for event in events)
    assert (last["choices"], last["id"], last["model"]) == ([], events[0]["id"], events[0]["model"])
    assert last["usage"] == {"prompt_tokens": len(TEXT), "completion_tokens": 8, "total_tokens": len(TEXT) + 8}
    for given in ({}, {"include_usage": False}, {"include_usage": None}):
        async with client.post(url + "/v1/completions", json=body(stream=True, stream_options=given)) as response:
            lines = [line.decode().strip() async for line in response.content if line.strip()]
        ending = json.loads(lines[-2].removeprefix("data: "))
        assert ending["choices"][0]["finish_reason"] == "length" and ending["usage"]["completion_tokens"] == 8


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


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_stop_text_ends_it_and_is_no_part_of_it(
    cluster: Cluster, url: str, client: aiohttp.ClientSession, stream: bool
) -> None:
    await start(cluster)
    tokens = await expected(40)
    text = ToyTokenizer().decode(tokens)
    stop = text[10:13]
    async with client.post(url + "/v1/completions", json=body(max_tokens=40, stop=stop, stream=stream)) as response:
        lines = (await response.text()).replace("data: ", "").split("\n") if stream else [await response.text()]
    events = [json.loads(line) for line in lines if line and line != "[DONE]"]
    assert "".join(event["choices"][0]["text"] for event in events) == text[: text.index(stop)]
    assert events[-1]["choices"][0]["finish_reason"] == "stop"
    count = events[-1]["usage"]["completion_tokens"]
    assert [token for event in events for token in event["choices"][0]["token_ids"]] == tokens[:count]
    assert count == text.index(stop) + 3
    await quiet(cluster)
    assert cluster.router.counts["stop"] == 1 and cluster.router.counts["cancelled"] == 0


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


class SlowTokenizer(ToyTokenizer):
    """Takes its time for prompts, and only the beginning of them."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()

    def encode(self, text: str) -> Tokens:
        self.begun.set()
        assert self.go_on.wait(1.0), "nothing else went on meanwhile"
        return super().encode(text[: len(TEXT)])


async def test_long_text_is_encoded_while_others_are_served(cluster: Cluster, client: aiohttp.ClientSession) -> None:
    await start(cluster)
    tokenizer = SlowTokenizer()
    front = Front(cluster.router, tokenizer, SECRET)
    url = f"http://127.0.0.1:{await front.start('127.0.0.1', 0)}"
    asked = asyncio.ensure_future(client.post(url + "/v1/completions", json=body(prompt=TEXT * 500)))
    await until(tokenizer.begun.is_set, "the text is being encoded")
    async with client.get(url + "/health") as response:
        assert response.status == 200
    tokenizer.go_on.set()
    assert (await (await asked).json())["choices"][0]["token_ids"] == await expected()
    await front.close()


async def test_client_that_hangs_up_cancels(cluster: Cluster, url: str, client: aiohttp.ClientSession) -> None:
    await start(cluster, token_s=SLOW_S)
    for stream in (False, True):
        asking = asyncio.ensure_future(client.post(url + "/v1/completions", json=body(stream=stream, max_tokens=200)))
        await until(lambda: cluster.router.requests == 1, "the request is under way")
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: cluster.router.requests == 0, "the request is given up")
        await quiet(cluster)
    assert cluster.router.counts["cancelled"] == 2


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
        ({"prompt": [1, 2, 300]}, "tokens must be in 0..256, not 1..300"),
        ({"prompt": "x" * 700}, "take 89 pages"),
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
    assert response.status == 400


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
        ('{"prompt": ""}', None),
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
        ("POST", "/v1/completions", 413, "Maximum request body size 16777216 exceeded."),
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


async def test_models_are_told_as_openai_does(cluster: Cluster, url: str, client: aiohttp.ClientSession) -> None:
    await start(cluster)
    async with client.get(url + "/v1/models") as response:
        listed = await response.json()
    [model] = listed["data"]
    assert listed["object"] == "list"
    assert model | {"created": 0} == {"id": model["id"], "object": "model", "created": 0, "owned_by": "crossrail"}
    async with client.get(f"{url}/v1/models/{model['id']}") as response:
        assert await response.json() == model


async def test_answer_tells_the_model_that_has_made_it(
    cluster: Cluster, url: str, client: aiohttp.ClientSession
) -> None:
    """And not that of some other decoder: here one whose prefiller is not there."""
    model = ToyModel(LAYOUT, seed=2)
    for kind, name in ((Prefiller, "p"), (Decoder, "d")):
        cluster.host(kind, name, model)
    cluster.host(Decoder, "another", ToyModel(LAYOUT, seed=1))
    await asyncio.wait_for(cluster.joined(), WAIT_S)
    async with client.post(url + "/v1/completions", json=body()) as response:
        assert (await response.json())["model"] == model.name


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


async def test_decoder_that_dies_ends_a_stream_in_words(
    cluster: Cluster, url: str, client: aiohttp.ClientSession
) -> None:
    await start(cluster, token_s=0.002)
    async with client.post(url + "/v1/completions", json=body(stream=True, max_tokens=200)) as response:
        await response.content.readline()
        await cluster.kill("d0")
        rest = (await response.content.read()).decode()
    error = json.loads(next(line for line in rest.split("data: ") if line.startswith('{"error"')))["error"]
    assert error["message"].startswith("error: its decoder is gone")
    assert (error["type"], error["code"]) == ("server_error", 502)


async def test_timeline_of_a_request(cluster: Cluster, url: str, client: aiohttp.ClientSession) -> None:
    await start(cluster)
    async with client.post(url + "/v1/completions", json=body(), headers={"X-Request-Id": "r1"}) as response:
        await response.read()
    async with client.get(url + "/v1/requests/r1") as response:
        names = [span["name"] for span in (await response.json())["end"]["timeline"]]
    assert {"dispatch", "transfer", "first token", "decode", "prefiller: queue", "prefiller: layer 3"} <= {*names}
    async with client.get(url + "/v1/requests/r1/trace") as response:
        events = (await response.json())["traceEvents"]
    assert {event["name"] for event in events if event["ph"] == "X"} == set(names)
    async with client.get(url + "/v1/requests/r1/timeline.svg") as response:
        assert response.content_type == "image/svg+xml" and (await response.text()).count("<rect") == len(names) + 1
    async with client.get(url + "/v1/requests/r2") as response:
        assert response.status == 404


async def test_metrics_and_nodes(cluster: Cluster, url: str, client: aiohttp.ClientSession) -> None:
    await start(cluster)
    async with client.post(url + "/v1/completions", json=body()) as response:
        await response.read()
    async with client.get(url + "/metrics") as response:
        text = await response.text()
    lines = text.splitlines()
    assert 'crossrail_kv_requests_ended_total{how="length"} 1.0' in lines
    assert 'crossrail_kv_nodes{role="decoder"} 1.0' in lines
    assert 'crossrail_kv_pages{node="d0",state="all"} 64.0' in lines
    assert "crossrail_kv_time_to_first_token_seconds_count 1.0" in lines
    assert_answered(read(text), "crossrail_kv_")
    async with client.get(url + "/v1/nodes") as response:
        nodes = (await response.json())["nodes"]
    assert [(node["node"], node["role"]) for node in nodes] == [("p0", "prefiller"), ("d0", "decoder")]


async def test_page_of_whoever_is_no_router_is_told_by_its_first_line() -> None:
    async def page(_: web.Request) -> web.Response:
        return web.Response(status=404, text="<!DOCTYPE HTML>\n<html>\n  <h1>Error response</h1>\n</html>\n")

    app = web.Application()
    app.router.add_get("/{any:.*}", page)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    with pytest.raises(RouterNotFound, match=r"answered 404: <!DOCTYPE HTML>$"):
        await find_by_http(f"http://127.0.0.1:{runner.addresses[0][1]}", SECRET)()
    await runner.cleanup()


async def test_router_that_says_nothing_is_told_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crossrail.kv.rendezvous._TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(RouterNotFound, match=f"{url}: no answer in time$"):
            await find_by_http(url, SECRET)()


async def test_nodes_find_the_router_with_the_secret_alone(cluster: Cluster, url: str) -> None:
    assert await find_by_http(url, SECRET)() == cluster.router.mailbox.address
    with pytest.raises(RouterNotFound, match="403"):
        await find_by_http(url, b"guessed")()
    with pytest.raises(RouterNotFound, match=r"127\.0\.0\.1:1: cannot connect: Connection refused$"):
        await find_by_http("http://127.0.0.1:1", SECRET)()


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


async def test_bytes_that_are_no_http_are_refused_and_not_logged(url: str, caplog: pytest.LogCaptureFixture) -> None:
    """aiohttp logs a traceback for each: a port scanner fills a log with them."""
    for garbage in (b"\x16\x03\x01\r\n\r\n", b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n", b"GARBAGE\r\n\r\n"):
        assert b" 400 " in await answer_of(url, garbage)
    assert not caplog.records


@pytest.mark.parametrize("encoding", [b"gzip", b"deflate"])
async def test_body_that_is_not_encoded_as_it_says_is_the_clients_mistake(
    url: str, caplog: pytest.LogCaptureFixture, encoding: bytes
) -> None:
    head = _HEAD + b"Content-Encoding: " + encoding + b"\r\nContent-Length: 17\r\n\r\n"
    answer = await answer_of(url, head + b'{"prompt": "x"}  ')
    assert answer.startswith(b"HTTP/1.1 400 ") and b"cannot be read: Can not decode content-encoding" in answer
    assert not caplog.records


@pytest.mark.parametrize("expected", [b"\xff", b"100-continue\xff", b"patience"])
async def test_expectations_that_nobody_knows_are_refused(
    url: str, caplog: pytest.LogCaptureFixture, expected: bytes
) -> None:
    answer = await answer_of(url, _HEAD + b"Expect: " + expected + b"\r\nContent-Length: 2\r\n\r\n{}")
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


async def test_client_that_waits_to_be_told_to_send_is_told(cluster: Cluster, url: str) -> None:
    asked = _HEAD + b"Connection: close\r\nExpect: 100-Continue\r\nContent-Length: 2\r\n\r\n"
    assert (await answer_of(url, asked)).startswith(b"HTTP/1.1 100 ")


async def test_secret_that_is_no_text_is_another_one(url: str) -> None:
    asked = b"GET /kv/router HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer \xff\r\n\r\n"
    assert (await answer_of(url, asked)).startswith(b"HTTP/1.1 403 ")


async def test_trace_that_is_no_text_is_none(cluster: Cluster, url: str, client: aiohttp.ClientSession) -> None:
    await start(cluster)
    sent = json.dumps(body()).encode()
    request = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\ntraceparent: \xff\r\n"
        b"Content-Length: %d\r\n\r\n" % len(sent)
    )
    assert (await answer_of(url, request + sent)).startswith(b"HTTP/1.1 200 ")


async def answer_of(url: str, sent: bytes) -> bytes:
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(sent)
    try:
        return await asyncio.wait_for(reader.read(300), WAIT_S)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


PATIENCE_S = 0.5  # of fronts with clients that are slow on purpose
_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: here\r\n"


@pytest.fixture
async def impatient(cluster: Cluster) -> AsyncIterator[int]:
    """The port of a front that waits for no client long."""
    front = Front(cluster.router, ToyTokenizer(), SECRET, patience_s=PATIENCE_S)
    yield await front.start("127.0.0.1", 0)
    await front.close()


@pytest.mark.parametrize(
    ("said", "answer"),
    [(b"", b""), (_HEAD, b""), (_HEAD + b'Content-Length: 100\r\n\r\n{"prompt"', b"HTTP/1.1 408")],
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
        client.sendall(_HEAD + b"Content-Length: %d\r\n\r\n" % len(data) + data)
        await until(lambda: cluster.router.requests == 1, "the request is under way")
        await until(lambda: cluster.router.requests == 0, "the request is given up", ROUTER.request_s / 2)
    await quiet(cluster)
    assert cluster.router.counts.total() == 1


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

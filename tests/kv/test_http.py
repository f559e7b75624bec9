"""The router's front, as clients, nodes and Prometheus see it."""

import asyncio
import json
import logging
import threading

import aiohttp
import pytest

from crossrail.kv import messages as m
from crossrail.kv.http.front import Front
from crossrail.kv.model import Tokens
from crossrail.kv.nodes.decoder import Decoder
from crossrail.kv.nodes.prefiller import Prefiller
from crossrail.kv.toy import ToyModel, ToyTokenizer
from tests.kv.asking import SLOW_S, TEXT, answer_of, body, expected
from tests.kv.conftest import quiet, start, until
from tests.support.kv_cluster import LAYOUT, SECRET, Cluster, monolithic, prompt_of
from tests.support.limits import WAIT_S
from tests.support.metrics import read
from tests.support.promql import assert_answered


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
    neutral |= {"repetition_penalty": 1.0, "top_k": -1, "min_p": 0.0, "suffix": ""}
    absent = dict.fromkeys(("top_p", "stop", "stream", "user", "model", "logprobs", *neutral))
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
    for given in ({}, {"include_usage": False}, {"include_usage": None}, {"include_obfuscation": False}):
        async with client.post(url + "/v1/completions", json=body(stream=True, stream_options=given)) as response:
            lines = [line.decode().strip() async for line in response.content if line.strip()]
        ending = json.loads(lines[-2].removeprefix("data: "))
        assert ending["choices"][0]["finish_reason"] == "length" and ending["usage"]["completion_tokens"] == 8


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
    assert count == next(n for n in range(41) if stop in ToyTokenizer().decode(tokens[:n]))  # ends have no text
    await quiet(cluster)
    await until(lambda: cluster.router.counts["stop"] == 1, "the router knows how it ended")
    assert cluster.router.counts["cancelled"] == 0


class SlowTokenizer(ToyTokenizer):
    """Takes its time for prompts, and only the beginning of them."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()

    def encode(self, text: str) -> Tokens:
        self.begun.set()
        assert self.go_on.wait(WAIT_S), "nothing else went on meanwhile"
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
        picture = await response.text()
        assert response.content_type == "image/svg+xml" and picture.count("<rect") == len(names) + 1
        assert ">0.0 ms</text>" in picture  # what is below it says its unit
    async with client.get(url + "/v1/requests/r2") as response:
        assert response.status == 404


@pytest.mark.parametrize("stream", [False, True])
async def test_answers_say_the_requests_name_which_is_in_the_logs_of_all_nodes(
    cluster: Cluster, url: str, client: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    caplog.set_level(logging.INFO, "crossrail.kv")
    await start(cluster)
    named = {"X-Request-Id": "of-the-proxy é"}
    async with client.post(url + "/v1/completions", json=body(stream=stream), headers=named) as response:
        await response.read()
        assert response.headers["X-Request-Id"] == named["X-Request-Id"]
    async with client.post(url + "/v1/completions", json=body(stream=stream)) as response:
        assert response.headers["X-Request-Id"] in await response.text()  # as its id
    async with client.post(url + "/v1/completions", json=body(prompt="")) as response:
        assert response.status == 400 and response.headers["X-Request-Id"]

    def said() -> list[str]:
        return sorted(line for line in caplog.messages if line.startswith("request of-the-proxy é"))

    await until(lambda: len(said()) >= 3, "all three have told of it")
    told = " | ".join(said())
    assert all(words in told for words in ("attempt 1: written by node p0", "length at node d0", "decoder d0"))
    assert any("is refused: the prompt is empty" in line for line in caplog.messages)


async def test_refusals_name_the_request_too(url: str, client: aiohttp.ClientSession) -> None:
    named = {"X-Request-Id": "mine"}
    async with client.post(url + "/v1/completions", data=b"no JSON", headers=named) as response:
        assert (response.status, response.headers["X-Request-Id"]) == (400, "mine")
    async with client.post(url + "/v1/completions", data=b"{}", headers={"X-Request-Id": "x" * 129}) as response:
        assert response.status == 400 and "X-Request-Id" not in response.headers
        assert "129 characters" in (await response.json())["error"]["message"]
    async with client.get(url + "/v1/models", headers=named) as response:
        assert "X-Request-Id" not in response.headers  # of completions alone


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


async def test_trace_that_is_no_text_is_none(cluster: Cluster, url: str, client: aiohttp.ClientSession) -> None:
    await start(cluster)
    sent = json.dumps(body()).encode()
    request = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\ntraceparent: \xff\r\n"
        b"Content-Length: %d\r\n\r\n" % len(sent)
    )
    assert (await answer_of(url, request + sent)).startswith(b"HTTP/1.1 200 ")

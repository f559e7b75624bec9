"""What a request spent its time on, from when it came to the router until its last token."""

import asyncio
import itertools
import json
import re
from xml.etree import ElementTree

import pytest

from crossrail.control.deadlines import loop_time_s
from crossrail.kv.messages import Sampling, Span
from crossrail.kv.nodes import decoder
from crossrail.kv.nodes.decoder import Decoder
from crossrail.kv.timeline import Timeline, chrome_trace, picture
from tests.kv.conftest import start, until
from tests.support.kv_cluster import LAYOUT, NODE, Cluster, prompt_of
from tests.support.limits import WAIT_S

PROMPT = prompt_of(3 * NODE.chunk_tokens)  # its last token is run by the decoder
SAMPLING = Sampling(4, ignore_end=True)
CHUNK_ENDS = (32, 64, 95)
SPANS_MAX = 4096  # that an end holds


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoder waits for its prefiller's spans however busy the machine is."""
    monkeypatch.setattr(decoder, "_TIMELINE_WAIT_S", WAIT_S)


def end(span: Span) -> float:
    return span.begin_s + span.length_s


def only(spans: list[Span], name: str) -> Span:
    (found,) = (span for span in spans if span.name == name)
    return found


async def timeline_of(cluster: Cluster) -> list[Span]:
    return (await cluster.complete(PROMPT, SAMPLING))[1].timeline


async def test_spans_follow_each_other_within_that_of_the_request(cluster: Cluster) -> None:
    await start(cluster)

    spans = await timeline_of(cluster)

    request = only(spans, "request")
    assert spans[0] is request and request.begin_s == 0.0
    assert all(span.begin_s >= 0.0 and span.length_s >= 0.0 and end(span) <= end(request) for span in spans)
    queue, dispatch, transfer, first, decode = (
        only(spans, name) for name in ("queue", "dispatch", "transfer", "first token", "decode")
    )
    assert queue.begin_s == 0.0
    assert end(queue) <= dispatch.begin_s == transfer.begin_s
    assert end(dispatch) <= end(transfer) <= first.begin_s == decode.begin_s
    assert end(first) <= end(decode)


async def test_prefillers_spans_follow_each_other_layer_by_layer(cluster: Cluster) -> None:
    await start(cluster)

    spans = await timeline_of(cluster)

    waited, tail = (only(spans, f"prefiller: {name}") for name in ("queue", "tail"))
    chunks = [only(spans, f"prefiller: prefill {tokens}") for tokens in CHUNK_ENDS]
    assert only(spans, "dispatch").begin_s == waited.begin_s
    assert end(waited) <= chunks[0].begin_s
    assert all(end(before) <= after.begin_s for before, after in itertools.pairwise(chunks))
    assert end(chunks[-1]) <= tail.begin_s
    for layer in range(LAYOUT.layers):
        sent = [span for span in spans if span.name == f"prefiller: layer {layer}"]
        assert len(sent) == len(chunks)
        assert all(chunk.begin_s <= span.begin_s for chunk, span in zip(chunks, sent, strict=True))
        assert all(span.length_s > 0 for span in sent)


async def test_queue_lasts_from_arrival_until_a_decoder_takes_it(cluster: Cluster) -> None:
    under_way = asyncio.ensure_future(cluster.complete(PROMPT, SAMPLING))
    await until(lambda: cluster.router.requests, "the request has come")
    from_s = loop_time_s()
    await asyncio.sleep(0.05)
    waited_s = loop_time_s() - from_s

    await start(cluster)

    spans = (await under_way)[1].timeline
    queue = only(spans, "queue")
    assert queue.begin_s == 0.0 and queue.length_s >= waited_s
    assert only(spans, "dispatch").begin_s >= end(queue)


async def test_what_another_decoder_did_before_comes_before_the_queue(cluster: Cluster) -> None:
    await start(cluster, token_s=0.002)
    under_way = asyncio.ensure_future(cluster.complete(PROMPT, SAMPLING))
    await until(lambda: cluster.nodes["d0"].load().requests, "the decoder has it")
    await cluster.kill("d0")
    cluster.add(Decoder, "d1")

    spans = (await under_way)[1].timeline

    before, queue = only(spans, "earlier decoders"), only(spans, "queue")
    assert before.begin_s == 0.0 and before.length_s > 0
    assert queue.begin_s == pytest.approx(end(before)) and end(queue) <= only(spans, "dispatch").begin_s


async def test_trace_and_picture_have_queue_prefill_layers_tail_and_first_token(cluster: Cluster) -> None:
    await start(cluster)
    spans = await timeline_of(cluster)

    events = json.loads(chrome_trace({"a request": spans}))["traceEvents"]
    drawn = ElementTree.fromstring(picture("a request", spans))

    begun_us = {event["name"]: (event["ts"], event["dur"]) for event in events if event["ph"] == "X"}
    texts = [element.text for element in drawn.iter("{http://www.w3.org/2000/svg}text")]
    shown = {element.text.split(":  ")[0] for element in drawn.iter("{http://www.w3.org/2000/svg}title")}
    for name in ("request", "queue", "prefiller: queue", "prefiller: tail", "first token"):
        span = only(spans, name)
        assert begun_us[name] == (span.begin_s * 1e6, span.length_s * 1e6)
        assert name in texts and any(re.match(rf"{name}: \d", note) for note in shown)
    assert {"prefiller: prefill", "prefiller: layer"} <= set(texts)  # a row for all of a kind


def test_spans_that_overlap_are_on_rows_of_their_own() -> None:
    begun_s = {"layer 0": 0.0, "layer 1": 1.0, "layer 2": 2.0, "layer 3": 2.5}
    spans = [Span(name, begin_s, 1.5) for name, begin_s in begun_s.items()]

    events = json.loads(chrome_trace({"r": [Span("queue", 0.0, 1.0), *spans]}))["traceEvents"]

    rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    row_of = {event["name"]: event["tid"] for event in events if event["ph"] == "X"}
    assert rows == {1: "queue", 2: "layer", 3: "layer"}
    assert row_of == {"queue": 1, "layer 0": 2, "layer 1": 3, "layer 2": 2, "layer 3": 3}


def test_kinds_of_spans_have_colours_of_their_own_whoever_did_them() -> None:
    spans = [Span(f"prefiller: {kind}", 0.0, 1.0) for kind in ("queue", "prefill 5", "layer 3", "tail")]
    spans += [Span("request", 0.0, 1.0), Span("decode", 0.0, 1.0)]

    colours = re.findall(r'<rect x=.* fill="(#\w+)"', picture("r", spans))

    assert len(set(colours)) == len(colours) == len(spans)


def test_request_is_in_its_timeline_however_many_spans_there_are() -> None:
    now_s = 5.0
    timeline = Timeline(lambda: now_s, age_s=2.0)
    timeline.add("queue", 0.0)
    timeline.add_all("prefiller: ", [Span("layer 1", 0.5, 0.5)] * (2 * SPANS_MAX), 1.0)
    timeline.close()

    assert timeline.spans[0] == Span("request", 0.0, 2.0) and timeline.spans[1] == Span("queue", 0.0, 2.0)
    assert len(timeline.spans) == SPANS_MAX

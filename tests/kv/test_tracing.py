"""Who asks with a trace gets spans of front, decoder and prefiller in it; who has no OpenTelemetry hands it on."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace

import aiohttp
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from crossrail.kv import tracing
from crossrail.kv.tracing import RequestSpan, checked
from tests.kv.conftest import start, until
from tests.support.kv_cluster import ROUTER, Cluster

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"

_exporter = InMemorySpanExporter()
_provider = TracerProvider()  # OpenTelemetry takes one for the life of the process
_provider.add_span_processor(SimpleSpanProcessor(_exporter))


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    monkeypatch.setattr(trace, "get_tracer", _provider.get_tracer)
    _exporter.clear()
    return _exporter


async def complete(url: str, headers: dict[str, str], **body: object) -> int:
    asked = {"prompt": "Rails are fast", "max_tokens": 4, "ignore_eos": True, **body}
    async with (
        aiohttp.ClientSession() as client,
        client.post(f"{url}/v1/completions", json=asked, headers=headers) as response,
    ):
        await response.read()
        return response.status


async def spans(exporter: InMemorySpanExporter, count: int) -> dict[str, ReadableSpan]:
    await until(lambda: len(exporter.get_finished_spans()) >= count, "all spans ended")
    return {span.name: span for span in exporter.get_finished_spans()}


def parent_of(span: ReadableSpan) -> int:
    assert span.parent is not None
    return span.parent.span_id


async def test_spans_of_all_nodes_hang_below_who_asked(
    cluster: Cluster, url: str, exported: InMemorySpanExporter
) -> None:
    await start(cluster)

    assert await complete(url, {"traceparent": PARENT, "X-Request-Id": "mine"}) == 200

    found = await spans(exported, 3)
    front, decode, prefill = (found[f"crossrail.kv.{name}"] for name in ("request", "decode", "prefill"))
    assert {f"{span.context.trace_id:032x}" for span in found.values()} == {TRACE}
    assert f"{parent_of(front):016x}" == PARENT.split("-")[2]
    assert parent_of(decode) == front.context.span_id
    assert parent_of(prefill) == decode.context.span_id
    assert all(span.attributes["crossrail.request"] == "mine" for span in found.values())
    assert (decode.attributes["crossrail.node"], prefill.attributes["crossrail.node"]) == ("d0", "p0")
    assert {span.status.status_code for span in found.values()} == {trace.StatusCode.UNSET}


@pytest.mark.parametrize("header", [None, "nonsense", f"ff-{TRACE}-b7ad6b7169203331-01", "x" * 4000])
async def test_without_a_trace_one_begins(
    cluster: Cluster, url: str, exported: InMemorySpanExporter, header: str | None
) -> None:
    await start(cluster)

    assert await complete(url, {} if header is None else {"traceparent": header}) == 200

    found = await spans(exported, 3)
    assert found["crossrail.kv.request"].parent is None
    assert len({span.context.trace_id for span in found.values()}) == 1


async def test_what_is_refused_is_marked(cluster: Cluster, url: str, exported: InMemorySpanExporter) -> None:
    await start(cluster)
    cluster.router.options = replace(ROUTER, queue_s=0.01)
    await asyncio.sleep(0.02)  # the router is no newborn

    assert await complete(url, {"traceparent": PARENT}, model="another") == 404

    (front,) = (await spans(exported, 1)).values()
    assert front.status.status_code is trace.StatusCode.ERROR
    assert "another" in (front.status.description or "")


async def test_without_opentelemetry_nothing_is_made_and_requests_are_served(
    cluster: Cluster, url: str, exported: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "_HAS_API", False)
    await start(cluster)

    assert await complete(url, {"traceparent": PARENT}) == 200

    assert exported.get_finished_spans() == ()
    span = RequestSpan("x", PARENT, {})
    span.end("an error")
    assert span.traceparent == PARENT  # handed on as it came


def test_without_an_exporter_the_context_is_handed_on() -> None:
    span = RequestSpan("x", PARENT, {})
    span.end()

    assert span.traceparent == PARENT


@pytest.mark.parametrize(
    "given",
    [
        "", PARENT.upper(), PARENT + "-more", PARENT[:-1], f"00-{'0' * 32}-b7ad6b7169203331-01",
        f"00-{TRACE}-{'0' * 16}-01", PARENT + "\n", PARENT.replace("0", "\N{FULLWIDTH DIGIT ZERO}"),
    ],
)  # fmt: skip
def test_what_is_no_context_is_dropped(given: str) -> None:
    assert checked(given) == ""
    assert re.fullmatch(r"[0-9a-f-]{55}", checked(PARENT))

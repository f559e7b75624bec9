"""The writer of Chrome traces: what it writes is valid, complete, and the same for the same calls."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from crossrail.observe.chrome import ChromeTrace


def written(fill: Callable[[ChromeTrace], None]) -> list[dict[str, Any]]:
    stream = io.StringIO()
    with ChromeTrace(stream) as trace:
        fill(trace)
    document = json.loads(stream.getvalue())
    assert document["displayTimeUnit"] == "ns"
    events: list[dict[str, Any]] = document["traceEvents"]
    return events


def test_tracks_are_named_once_and_grouped() -> None:
    def fill(trace: ChromeTrace) -> None:
        first, second = trace.track("node0", "rail 0"), trace.track("node0", "rail 1")
        assert trace.track("node0", "rail 0") == first
        assert second != first
        assert trace.track("node1", "rail 0").process != first.process

    names = [(event["name"], event["args"].get("name")) for event in written(fill) if event["name"].endswith("_name")]
    assert names == [
        ("process_name", "node0"),
        ("thread_name", "rail 0"),
        ("thread_name", "rail 1"),
        ("process_name", "node1"),
        ("thread_name", "rail 0"),
    ]


def test_span_keeps_every_nanosecond_of_a_long_run() -> None:
    start_ns = 9_007_199_254_740_993_001  # a double has no room for the last digits

    def fill(trace: ChromeTrace) -> None:
        trace.span(trace.track("a", "b"), "write", start_ns, start_ns + 1_001, {"bytes": 4096})

    stream = io.StringIO()
    with ChromeTrace(stream) as trace:
        fill(trace)
    assert '"ts":9007199254740993.001,' in stream.getvalue()
    assert '"ts":9007199254740993001' not in stream.getvalue()
    (span,) = [event for event in written(fill) if event["ph"] == "X"]
    assert span["dur"] == 1.001
    assert span["args"] == {"bytes": 4096}


def test_overlapping_spans_and_flows_have_identities_of_their_own() -> None:
    def fill(trace: ChromeTrace) -> None:
        rail, engine = trace.track("a", "rail 0"), trace.track("a", "engine")
        trace.overlapping_span(rail, "write #1", 0, 50)
        trace.overlapping_span(rail, "write #2", 10, 60)
        trace.flow("write #1", engine, 0, rail, 50)

    events = [event for event in written(fill) if event["ph"] in "besf"]
    pairs: dict[int, str] = {}
    for event in events:
        pairs[event["id"]] = pairs.get(event["id"], "") + event["ph"]
    assert sorted(pairs.values()) == ["be", "be", "sf"]


def test_any_text_is_escaped() -> None:
    name = 'peer "x"\n\x1b[31m</script>é'

    def fill(trace: ChromeTrace) -> None:
        trace.instant(trace.track(name, name), name, 5, {name: name})
        trace.counter(trace.track(name, name), name, 6, {"bytes": 3})

    (instant,) = [event for event in written(fill) if event["ph"] == "i"]
    assert (instant["name"], instant["args"], instant["ts"]) == (name, {name: name}, 0.005)


def test_stream_is_complete_after_close_and_not_before() -> None:
    stream = io.StringIO()
    trace = ChromeTrace(stream)
    trace.instant(trace.track("a", "b"), "x", 1)
    with pytest.raises(json.JSONDecodeError):
        json.loads(stream.getvalue())
    trace.close()
    trace.close()
    assert json.loads(stream.getvalue())["traceEvents"][-1]["name"] == "x"


def test_file_is_complete_also_when_the_block_raises(tmp_path: Path) -> None:
    path = tmp_path / "run.json"

    def run() -> None:
        with ChromeTrace.create(path) as trace:
            trace.instant(trace.track("a", "b"), "x", 1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run()
    assert json.loads(path.read_text())["traceEvents"][-1]["name"] == "x"

"""The picture of an event log."""

import json
from pathlib import Path
from typing import Any

import pytest

import crossrail as xr
from crossrail import sim
from crossrail.sim.timeline import write_chrome_trace

LOG = """\
0 a engine-open engine=x
1000 a post engine=x rail=0 work=1 op=write bytes=100 imm=7 to=b/0
1500 a post engine=x rail=0 work=2 op=write bytes=50 to=b/0
1500 a fault kind=rail-down value=0
2000 b land work=1
2100 b count engine=y imm=7
3000 a done work=1
3500 a post engine=x rail=0 work=3 op=imm bytes=0 imm=8 to=b/0
4000 a fail work=2 fault=flushed
""".splitlines()


def drawn(tmp_path: Path, log: list[str]) -> list[dict[str, Any]]:
    file = tmp_path / "trace.json"
    write_chrome_trace(file, log, title="a test")
    trace = json.loads(file.read_text())
    assert trace["otherData"] == {"title": "a test"}
    return list(trace["traceEvents"])


def test_names_of_engines_are_shown_as_they_are(tmp_path: Path) -> None:
    with sim.World(1, keep_log=True) as world:
        a, b = world.host("a").engine("decoder 0, 50% rail=7"), world.host("b").engine("b")
        source, target = a.alloc(64), b.alloc(64)
        a.submit_write(source, target.descriptor).wait(1)
        events = drawn(tmp_path, world.log)

    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert "decoder 0, 50% rail=7 rail 0 #0" in names
    assert any(event["name"] == "engine-open decoder 0, 50% rail=7" for event in events)


def test_works_are_spans_from_post_to_completion(tmp_path: Path) -> None:
    spans = [event for event in drawn(tmp_path, LOG) if event["ph"] == "X"]

    assert [(span["name"], span["ts"], span["dur"]) for span in spans] == [
        ("write to b/0", 1.0, 2.0),
        ("write to b/0, fail: flushed", 1.5, 2.5),
        ("imm to b/0, under way at the end", 3.5, 0.5),
    ]
    assert spans[0]["args"] == {
        "work": "1",
        "bytes": "100",
        "imm": "7",
        "to": "b/0",
        "landed after us": 1.0,
        "ended": "done",
    }


def test_works_under_way_at_once_have_threads_of_their_own_and_later_ones_reuse_them(tmp_path: Path) -> None:
    spans = [event for event in drawn(tmp_path, LOG) if event["ph"] == "X"]

    first, second, third = (span["tid"] for span in spans)
    assert first != second
    assert third == first


def test_bytes_under_way_go_up_and_down_to_nothing(tmp_path: Path) -> None:
    curve = [event["args"]["bytes"] for event in drawn(tmp_path, LOG) if event["ph"] == "C"]

    assert curve == [100, 150, 50, 50, 0, 0]


def test_hosts_are_processes_and_faults_are_marks_on_them(tmp_path: Path) -> None:
    events = drawn(tmp_path, LOG)

    names = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    assert set(names) == {"a", "b"}
    marks = [(event["name"], event["pid"]) for event in events if event["ph"] == "i"]
    assert marks == [("engine-open x", names["a"]), ("rail-down", names["a"])]


def test_an_empty_log_is_an_empty_picture(tmp_path: Path) -> None:
    assert drawn(tmp_path, []) == []


def test_what_is_no_log_is_refused(tmp_path: Path) -> None:
    with pytest.raises(xr.UsageError, match="is not a line"):
        drawn(tmp_path, ["hello"])

"""A recording as people see it: choices, pictures, and the command."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import crossrail as xr
from crossrail.flight import FlightDump, FlightEntry, FlightPeer
from crossrail.observe.chrome import ChromeTrace
from crossrail.observe.flight import select, write_chrome
from tests.conftest import EngineFactory
from tests.support.limits import PROGRAM_S, WAIT_S
from tests.support.process import REPOSITORY


def entry(time_ns: int, ring: str, state: str, transfer: int = 1, peer: str = "b", count: int = 1) -> FlightEntry:
    return FlightEntry(time_ns, ring, state, "write", transfer, peer, 4096, None, count)


ENTRIES = [
    entry(100, "engine", "submitted"),
    entry(110, "tcp:0", "sent"),
    entry(120, "tcp:1", "sent", count=2),
    entry(130, "engine", "submitted", 2, "c"),
    entry(140, "tcp:1", "sent", 2, "c"),
    entry(200, "tcp:1", "retired", count=2),
    entry(300, "tcp:0", "retired"),
    entry(310, "engine", "done"),
]
DUMP = FlightDump(
    engine="a",
    pid=7,
    version="1",
    reason="test",
    now_ns=1000,
    wall_ns=0,
    peers=[FlightPeer(name, 1, "tcp", "connected", 0, 0) for name in ("b", "c")],
    rings={"engine": 3, "tcp:0": 2, "tcp:1": 3, "shm:0": 0},
    entries=ENTRIES,
)


def test_selection_by_peer_rail_and_number() -> None:
    assert select(DUMP) == ENTRIES
    assert [e.time_ns for e in select(DUMP, peer="c")] == [130, 140]
    assert [e.time_ns for e in select(DUMP, rail="tcp:1")] == [120, 140, 200]
    assert [e.time_ns for e in select(DUMP, rail="0")] == [110, 300]
    assert [e.time_ns for e in select(DUMP, peer="b", rail="1", last=1)] == [200]
    assert select(DUMP, last=100) == ENTRIES


def test_selection_of_what_is_not_there_names_what_is() -> None:
    with pytest.raises(xr.UsageError, match="peer 'x' is not in the recording; there are: 'b', 'c'"):
        select(DUMP, peer="x")
    with pytest.raises(xr.UsageError, match="rail '7' is not in the recording; there are: 'engine', 'shm:0'"):
        select(DUMP, rail="7")


def drawn(entries: list[FlightEntry]) -> list[dict[str, Any]]:
    stream = io.StringIO()
    with ChromeTrace(stream) as trace:
        write_chrome([(DUMP, entries)], trace)
    events: list[dict[str, Any]] = json.loads(stream.getvalue())["traceEvents"]
    return events


def test_picture_has_a_track_for_each_rail_and_spans_from_begin_to_end() -> None:
    events = drawn(ENTRIES)
    tracks = {e["args"]["name"]: e["tid"] for e in events if e["name"] == "thread_name"}
    assert set(tracks) == set(DUMP.rings)
    begins = {e["id"]: e for e in events if e["ph"] == "b"}
    spans = sorted(
        (begins[e["id"]]["tid"], begins[e["id"]]["name"], begins[e["id"]]["ts"], e["ts"])
        for e in events
        if e["ph"] == "e"
    )
    assert spans == sorted(
        [
            (tracks["engine"], "write #1", 0.1, 0.31),
            (tracks["engine"], "write #2, not ended", 0.13, 1.0),
            (tracks["tcp:0"], "write #1", 0.11, 0.3),
            (tracks["tcp:1"], "write #1", 0.12, 0.2),
            (tracks["tcp:1"], "write #2, not ended", 0.14, 1.0),
        ]
    )


def test_arrows_lead_from_submit_to_rails_and_to_completion() -> None:
    events = drawn(ENTRIES)
    starts = {e["id"]: e["ts"] for e in events if e["ph"] == "s"}
    arrows = sorted((starts[e["id"]], e["ts"], e["name"]) for e in events if e["ph"] == "f")
    assert arrows == [
        (0.1, 0.11, "write #1"),
        (0.1, 0.12, "write #1"),
        (0.1, 0.31, "write #1"),
        (0.13, 0.14, "write #2"),
    ]


def test_picture_of_a_part_leaves_no_arrow_without_a_source() -> None:
    events = drawn(ENTRIES[4:])
    assert not [e for e in events if e["ph"] in "sf"]
    assert len([e for e in events if e["ph"] == "X"]) == 4


# --- the command ---


def trace(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "crossrail", "trace", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=PROGRAM_S,
        cwd=REPOSITORY,
        env=os.environ | {"COLUMNS": "160", "NO_COLOR": "1"},
    )


@pytest.fixture
def recording(open_engine: EngineFactory, tmp_path: Path) -> Path:
    here, there = open_engine("here", transport="tcp"), open_engine("there", transport="tcp")
    src, dst = here.alloc(4096), there.alloc(4096)
    for _ in range(3):
        here.submit_write(src, dst.descriptor, imm=5).wait(WAIT_S)
    path = tmp_path / "here.flight"
    here.dump(path, reason="for a test")
    return path


def test_command_shows_summary_and_table(recording: Path) -> None:
    shown = trace(recording)
    assert shown.returncode == 0, shown.stderr
    assert "engine 'here'" in shown.stdout and "for a test" in shown.stdout
    assert "3 done" in shown.stdout
    lines = [line.split() for line in shown.stdout.splitlines()]
    assert sum("retired" in line and "tcp:0" in line and "there" in line for line in lines) >= 1
    assert any("done" in line and "#3" in line for line in lines)


def test_command_filters(recording: Path) -> None:
    shown = trace(recording, "--rail", "tcp:0", "--peer", "there", "--last", 2)
    assert shown.returncode == 0, shown.stderr
    assert "submitted" not in shown.stdout
    assert "\n2 of " in shown.stdout


def test_command_writes_a_chrome_trace(recording: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    shown = trace(recording, "--chrome", out)
    assert shown.returncode == 0, shown.stderr
    names = {event["name"] for event in json.loads(out.read_text())["traceEvents"]}
    assert {"write #1", "write #2", "write #3", "peer-connected"} <= names


def test_chrome_trace_does_not_replace_the_recording(recording: Path, tmp_path: Path) -> None:
    """It may be all that is left of a hang."""
    (tmp_path / "link").symlink_to(recording)
    before = recording.read_bytes()
    for out in (recording, tmp_path / "link"):
        refused = trace(recording, "--chrome", out)
        assert refused.returncode == 2 and "is the recording itself: choose another file" in refused.stderr
    assert recording.read_bytes() == before


@pytest.mark.parametrize("damage", ["cut", "garbage", "missing", "peer"])
def test_command_refuses_in_one_line(recording: Path, tmp_path: Path, damage: str) -> None:
    arguments: list[object] = [recording]
    if damage == "cut":
        recording.write_bytes(recording.read_bytes()[:-20])
    elif damage == "garbage":
        recording.write_bytes(os.urandom(1000))
    elif damage == "missing":
        arguments = [tmp_path / "nowhere"]
    else:
        arguments += ["--peer", "nobody"]
    refused = trace(*arguments)
    assert refused.returncode == 2
    assert refused.stdout == "" and "Traceback" not in refused.stderr
    assert {
        "cut": "cut short",
        "garbage": "not a line of a flight recording",
        "missing": "does not exist",
        "peer": "'there'",
    }[damage] in refused.stderr

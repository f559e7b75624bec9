"""Which arrival is taken for whose, and the arrows that say so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crossrail.flight import FlightDump, FlightEntry, FlightPeer, read_dump
from crossrail.observe.arrivals import match
from tests.conftest import EngineFactory
from tests.observe.test_flight import trace
from tests.support.limits import WAIT_S

US = 1000


def begun(
    at_us: int, transfer: int, imm: int | None = 1, *, state: str = "submitted", peer: str = "b", op: str = "write"
) -> FlightEntry:
    ring = "engine" if state in ("submitted", "failed", "cancelled") else "tcp:0"
    return FlightEntry(at_us * US, ring, state, op, transfer, peer, 8, imm, 1)


def arrived(at_us: int, counts: float = 1.0, imm: int = 1) -> FlightEntry:
    return FlightEntry(at_us * US, "engine", "arrived", "", 0, "", 0, imm, 1, counts)


def dump(engine: str, ahead_ns: int = 0) -> FlightDump:
    """Of a process whose monotonic clock is so much ahead of the others'."""
    made = FlightDump(engine, ord(engine[0]), "1", "test", now_ns=10**9 + ahead_ns, wall_ns=10**18)
    made.peers = [FlightPeer(name, ord(name), "tcp", "connected", 0, 0) for name in "abc"]
    return made


def matched(*parts: tuple[FlightDump, list[FlightEntry]]) -> list[tuple[str, int, int]]:
    """Engine and number of each transfer, and when it was counted, in microseconds of the first one's clock."""
    return sorted(
        (parts[sent.dump][0].engine, sent.entry.transfer, counted.at_ns // US) for sent, counted in match(parts)
    )


A, B, C = dump("a"), dump("b"), dump("c")


def test_counts_are_given_out_in_the_order_of_time() -> None:
    sent = [begun(10, 1), begun(100, 2), begun(200, 3)]
    assert matched((A, sent), (B, [arrived(50), arrived(150), arrived(250)])) == [
        ("a", 1, 50), ("a", 2, 150), ("a", 3, 250),
    ]  # fmt: skip


def test_arrivals_of_before_are_somebody_elses() -> None:
    assert matched((A, [begun(100, 7)]), (B, [arrived(20), arrived(120)])) == [("a", 7, 120)]


def test_a_write_over_rails_is_counted_when_its_last_share_is() -> None:
    shares = [arrived(20, 1 / 4), arrived(21, 1 / 4), arrived(30, 1 / 3), arrived(35, 1 / 6), arrived(40, 1.0)]
    assert matched((A, [begun(10, 1), begun(11, 2)]), (B, shares)) == [("a", 1, 35), ("a", 2, 40)]


def test_one_entry_may_count_several() -> None:
    assert matched((A, [begun(10, 1), begun(11, 2), begun(12, 3)]), (B, [arrived(20, 2.0)])) == [
        ("a", 1, 20), ("a", 2, 20),
    ]  # fmt: skip


def test_numbers_and_receivers_are_kept_apart() -> None:
    sent = [begun(10, 1, imm=1), begun(11, 2, imm=2), begun(12, 3, imm=1, peer="c"), begun(13, 4, imm=None)]
    assert matched((A, sent), (B, [arrived(20, imm=2), arrived(30, imm=1)]), (C, [arrived(40)])) == [
        ("a", 1, 30), ("a", 2, 20), ("a", 3, 40),
    ]  # fmt: skip


def test_several_senders_share_a_counter() -> None:
    assert matched((A, [begun(10, 1)]), (C, [begun(20, 9)]), (B, [arrived(30), arrived(40)])) == [
        ("a", 1, 30), ("c", 9, 40),
    ]  # fmt: skip


@pytest.mark.parametrize("ending", ["failed", "cancelled"])
def test_what_was_not_done_was_not_counted(ending: str) -> None:
    sent = [begun(10, 1), begun(12, 1, state=ending), begun(15, 2)]
    assert matched((A, sent), (B, [arrived(30)])) == [("a", 2, 30)]


def test_targets_of_a_scatter_are_known_by_their_works() -> None:
    sent = [begun(10, 1, peer="", op="scatter")]
    sent += [begun(11, 1, state="sent", peer=peer, op="scatter") for peer in "bc"]
    pairs = [
        (at.entry.state, counted.at_ns) for at, counted in match([(A, sent), (B, [arrived(20)]), (C, [arrived(30)])])
    ]
    assert sorted(pairs) == [("submitted", 20 * US), ("submitted", 30 * US)]


def test_pages_are_counted_from_the_first_on() -> None:
    sent = [begun(10, 1, op="paged-writes"), begun(11, 2)]
    assert matched((A, sent), (B, [arrived(20, 5.0), arrived(30, 3.0)])) == [("a", 1, 20), ("a", 2, 20)]


def test_clocks_are_brought_together_by_the_wall() -> None:
    other = dump("b", ahead_ns=5000 * US)
    assert matched((A, [begun(10, 1)]), (other, [arrived(4000), arrived(5020)])) == [("a", 1, 20)]


def test_receiver_that_is_not_there_has_no_arrows() -> None:
    assert matched((A, [begun(10, 1)])) == []


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_arrows_lead_from_submit_to_count(open_engine: EngineFactory, tmp_path: Path, transport: str) -> None:
    here, there = (open_engine(name, transport=transport, rails=2) for name in ("here", "there"))
    src, dst = here.alloc(1 << 20), there.alloc(1 << 20)
    for _ in range(3):
        here.submit_write(src, dst.descriptor, imm=5).wait(WAIT_S)
        there.imm_counter(5).wait(1, WAIT_S)
    here.submit_paged_writes(src, np.arange(4), dst.descriptor, np.arange(4), page_bytes=64, imm=6).wait(WAIT_S)
    there.imm_counter(6).wait(4, WAIT_S)
    files = [tmp_path / "here.flight", tmp_path / "there.flight"]
    for engine, file in zip((here, there), files, strict=True):
        engine.dump(file)
    out = tmp_path / "out.json"

    shown = trace(*files, "--chrome", out)

    assert shown.returncode == 0, shown.stderr
    events: list[dict[str, Any]] = json.loads(out.read_text())["traceEvents"]
    groups = {event["args"]["name"].split()[0]: event["pid"] for event in events if event["name"] == "process_name"}
    assert set(groups) == {"here", "there"}
    starts = {event["id"]: event for event in events if event["ph"] == "s" and event["name"].endswith("counted")}
    ends = [event for event in events if event["ph"] == "f" and event["id"] in starts]
    assert len(ends) == len(starts) == 4
    for end in ends:
        begin = starts[end["id"]]
        assert (begin["pid"], end["pid"]) == (groups["here"], groups["there"])
        assert begin["ts"] - 10 <= end["ts"]
    # Each at an entry that says so.
    arrivals = {entry.time_ns for entry in read_dump(files[1]).entries if entry.state == "arrived"}
    assert len({end["ts"] for end in ends}) == 4 <= len(arrivals)


def test_several_recordings_need_a_picture(open_engine: EngineFactory, tmp_path: Path) -> None:
    file = tmp_path / "here.flight"
    open_engine("here").dump(file)

    table = trace(file, file)
    chosen = trace(file, file, "--chrome", tmp_path / "out", "--rail", "0")

    for refused, why in ((table, "--chrome"), (chosen, "--rail")):
        assert refused.returncode == 2
        assert len(refused.stderr.splitlines()) == 1 and why in refused.stderr

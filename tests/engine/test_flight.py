"""The flight recorder: what it holds after known operations, and what its files are refused for."""

from __future__ import annotations

import json
import os
import stat
import time
from pathlib import Path

import pytest

import crossrail as xr
from crossrail.flight import FlightDump, FlightEntry, parse_dump, read_dump, row_of
from tests.conftest import EngineFactory
from tests.contract.setups import why_not
from tests.support.limits import WAIT_S, eventually
from tests.support.seeds import Seed


def dump_of(engine: xr.Engine, folder: Path) -> FlightDump:
    path = folder / "dump.flight"
    assert engine.dump(path) is None
    return read_dump(path)


def steps_of(dump: FlightDump, transfer: int) -> list[str]:
    return [entry.state for entry in dump.entries if entry.transfer == transfer]


def states_of(dump: FlightDump) -> set[str]:
    return {entry.state for entry in dump.entries}


def arrivals_of(engine: xr.Engine, count: float, tmp_path: Path) -> list[FlightEntry]:
    """That so many were counted is recorded after whoever waited for it was woken."""
    found: list[FlightEntry] = []

    def are_there() -> bool:
        found[:] = [entry for entry in dump_of(engine, tmp_path).entries if entry.state == "arrived"]
        return sum(entry.counts for entry in found) >= count

    eventually(are_there, f"{count} arrivals in a dump")
    assert sum(entry.counts for entry in found) == count
    return found


# --- what it holds ---


def test_short_write_at_once_is_one_entry_at_each_side(
    open_engine: EngineFactory, other: xr.Engine, tmp_path: Path
) -> None:
    engine = open_engine(polling="manual")  # else the worker may be what posts it
    src, dst = engine.alloc(64), other.alloc(64)
    engine.submit_write(src, dst.descriptor).wait(WAIT_S)  # connects, and maps the target
    engine.submit_write(src, dst.descriptor, 48, imm=9).wait(WAIT_S)
    other.imm_counter(9).wait(1, WAIT_S)
    sent = [entry for entry in dump_of(engine, tmp_path).entries if entry.transfer == 2]
    assert [(entry.state, entry.ring, entry.peer, entry.nbytes, entry.imm) for entry in sent] == [
        ("moved", "shm:0", "other", 48, 9)
    ]
    (arrived,) = arrivals_of(other, 1, tmp_path)
    assert (arrived.imm, arrived.counts, arrived.ring) == (9, 1.0, "engine")


def test_pages_are_recorded_by_batches_and_counted_exactly(
    engine: xr.Engine, other: xr.Engine, tmp_path: Path, seed: Seed
) -> None:
    src, dst = engine.alloc(1 << 20), other.alloc(1 << 20)
    pages = seed.rng().permutation(256)
    engine.submit_paged_writes(src, pages, dst.descriptor, pages[::-1].copy(), 4096, imm=3).wait(WAIT_S)
    other.imm_counter(3).wait(256, WAIT_S)
    dump = dump_of(engine, tmp_path)
    steps = [entry for entry in dump.entries if entry.op == "paged-writes"]
    assert [steps[0].state, steps[-1].state] == ["submitted", "done"]
    works = steps[1:-1]
    assert sum(entry.nbytes for entry in works) == 1 << 20
    assert len(works) < 64
    assert arrivals_of(other, 256, tmp_path)


def test_scatter_at_once_is_one_entry_for_all_targets(
    open_engine: EngineFactory, other: xr.Engine, tmp_path: Path
) -> None:
    engine = open_engine(polling="manual")
    src, dst = engine.alloc(64), other.alloc(64)
    engine.submit_write(src, dst.descriptor).wait(WAIT_S)
    engine.submit_scatter(src, [dst.descriptor] * 5, lengths=8, src_offsets=0, dst_offsets=0).wait(WAIT_S)
    (entry,) = [entry for entry in dump_of(engine, tmp_path).entries if entry.op == "scatter"]
    assert (entry.state, entry.count, entry.nbytes, entry.peer) == ("done", 5, 40, "")


def test_rails_of_tcp_say_what_they_sent_and_what_was_acknowledged(open_engine: EngineFactory, tmp_path: Path) -> None:
    here = open_engine("here", transport="tcp", rails=["127.0.0.1", "127.0.0.2"])
    there = open_engine("there", transport="tcp", rails=["127.0.0.1", "127.0.0.2"])
    nbytes = {"tcp:0": 300_000, "tcp:1": 2 << 20}
    src, dst = here.alloc(2 << 20), there.alloc(2 << 20)
    for rail, length in enumerate(nbytes.values()):
        here.submit_write(src, dst.descriptor, length, imm=1, rail=rail).wait(WAIT_S)
    dump = dump_of(here, tmp_path)
    assert set(dump.rings) == {"engine", "tcp:0", "tcp:1"}
    for state in ("sent", "retired"):
        of_rails = dict.fromkeys(nbytes, 0)
        for entry in dump.entries:
            if entry.state == state:
                of_rails[entry.ring] += entry.nbytes
        assert of_rails == nbytes, state
    assert steps_of(dump, 1)[0] == "submitted"
    assert steps_of(dump, 1)[-1] == "done"


@pytest.mark.parametrize("transport", ["tcp", *([] if why_not("ofi:tcp") else ["ofi:tcp"])])
def test_every_byte_is_on_its_rail(open_engine: EngineFactory, tmp_path: Path, seed: Seed, transport: str) -> None:
    """Works of many sizes, those longer than a NIC's longest among them: each is sent once and retired once."""
    here, there = open_engine("here", transport=transport), open_engine("there", transport=transport)
    sizes = [1, 8, 4096, 3 << 20, 300_001, *(int(n) for n in seed.rng().integers(1, 100_000, 20))]
    src, dst = here.alloc(max(sizes)), there.alloc(max(sizes))
    writes = [here.submit_write(src, dst.descriptor, nbytes, imm=1) for nbytes in sizes]
    for write in writes:
        write.wait(WAIT_S)
    dump = dump_of(here, tmp_path)
    kind = transport.partition(":")[0]
    for state in ("sent", "retired"):
        steps = [entry for entry in dump.entries if entry.state == state]
        assert {entry.ring for entry in steps} == {f"{kind}:0"}
        by_transfer = {n: sum(e.nbytes for e in steps if e.transfer == n) for n in range(1, len(sizes) + 1)}
        assert list(by_transfer.values()) == sizes
    (peer,) = dump.peers
    assert (peer.outstanding, peer.queued) == (0, 0)


def test_messages_reads_and_endings_are_recorded(open_engine: EngineFactory, tmp_path: Path) -> None:
    here, there = open_engine("here", transport="tcp"), open_engine("there", transport="tcp")
    pool = there.submit_recvs(4, 64)
    here.submit_send(there.address, b"hello").wait(WAIT_S)
    assert pool.recv(WAIT_S).data == b"hello"
    mine, theirs = here.alloc(4096), there.alloc(4096)
    here.submit_read(mine, theirs.descriptor).wait(WAIT_S)
    theirs.close()
    refused = here.submit_write(mine, theirs.descriptor, 8)
    with pytest.raises(xr.RemoteRegionClosed):
        refused.wait(WAIT_S)
    dump = dump_of(here, tmp_path)
    ends = {entry.op: entry.state for entry in dump.entries if entry.state in ("done", "failed")}
    assert ends == {"send": "done", "read": "done", "write": "failed"}
    assert "received" in states_of(dump_of(there, tmp_path))
    there.close()
    told = ["peer-connected", "peer-left"]
    eventually(lambda: [note.kind for note in dump_of(here, tmp_path).notes] == told, "the peer is gone, and noted so")
    dump = dump_of(here, tmp_path)
    assert {"connecting", "connected", "left"} <= states_of(dump)
    notes = [line for line in dump.summary() if line.startswith("note: ")]
    assert notes[0].endswith("peer-connected there") and "peer-left there: " in notes[1]  # a colon before a reason


def test_only_the_latest_entries_are_kept_and_all_are_counted(
    open_engine: EngineFactory, other: xr.Engine, tmp_path: Path
) -> None:
    here = open_engine(polling="manual", recorder_entries=64)
    src, dst = here.alloc(64), other.alloc(64)
    here.connect(other.address, WAIT_S)
    for _ in range(500):
        here.submit_write(src, dst.descriptor, 8).wait(WAIT_S)
    dump = dump_of(here, tmp_path)
    kept = [entry for entry in dump.entries if entry.ring == "shm:0"]
    assert dump.rings["shm:0"] == 500
    assert [entry.transfer for entry in kept] == list(range(501 - len(kept), 501))
    assert len(kept) >= 63  # more where writes so fast that they share an entry


def test_times_order_entries_and_lie_between_the_calls(engine: xr.Engine, other: xr.Engine, tmp_path: Path) -> None:
    src, dst = engine.alloc(1 << 20), other.alloc(1 << 20)
    before_ns = time.monotonic_ns()
    for nbytes in (8, 4096, 1 << 20) * 20:
        engine.submit_write(src, dst.descriptor, nbytes).wait(WAIT_S)
    after_ns = time.monotonic_ns()
    dump = dump_of(engine, tmp_path)
    times = [entry.time_ns for entry in dump.entries]
    assert times == sorted(times)
    slack_ns = 1_000_000  # the counter's rate is measured over the life of the engine
    assert before_ns - slack_ns < times[0] and times[-1] < after_ns + slack_ns
    assert after_ns <= dump.now_ns <= time.monotonic_ns()


def test_recorder_off_leaves_counts_and_peers(open_engine: EngineFactory, other: xr.Engine, tmp_path: Path) -> None:
    here = open_engine(recorder_entries=0)
    src, dst = here.alloc(8), other.alloc(8)
    here.submit_write(src, dst.descriptor).wait(WAIT_S)
    dump = dump_of(here, tmp_path)
    assert (dump.rings, dump.entries, dump.notes) == ({}, [], [])
    assert dump.counts["transfers_done"] == 1
    assert [peer.name for peer in dump.peers] == ["other"]


@pytest.mark.parametrize("entries", [-1, 1, 63, 100, 1 << 21, "many", 1.5])
def test_recorder_entries_out_of_bounds_are_refused(entries: object) -> None:
    with pytest.raises(xr.UsageError, match="recorder_entries"):
        xr.Engine("x", recorder_entries=entries)


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), 1e7])
def test_watchdog_out_of_bounds_is_refused(seconds: float) -> None:
    with pytest.raises(xr.UsageError, match="watchdog_s"):
        xr.Engine("x", watchdog_s=seconds)


def test_text_tells_who_waits_for_what(engine: xr.Engine, other: xr.Engine) -> None:
    ticket = engine.imm_counter(7).on_count(3, lambda: None)
    src, dst = other.alloc(8), engine.alloc(8)
    other.submit_write(src, dst.descriptor, imm=7).wait(WAIT_S)
    eventually(lambda: engine.imm_counter(7).poll() == 1, "the count arrived")
    eventually(lambda: "arrived" in (engine.dump() or "").splitlines()[-1], "the arrival is recorded")
    assert "waiting: immediate 7: 1 of 3 arrived" in (engine.dump() or "")
    ticket.cancel()


def test_closed_engine_can_still_be_dumped(open_engine: EngineFactory) -> None:
    here = open_engine()
    here.close()
    assert "0 in flight" in (here.dump() or "")


def test_file_that_cannot_be_written_is_an_error(engine: xr.Engine, tmp_path: Path) -> None:
    with pytest.raises(xr.TransportError, match="No such file"):
        engine.dump(tmp_path / "missing" / "dump.flight")
    (tmp_path / "target").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(xr.TransportError, match="symbolic"):
        engine.dump(tmp_path / "link")
    assert (tmp_path / "target").read_text() == "precious"


def test_file_is_for_this_user_only(engine: xr.Engine, tmp_path: Path) -> None:
    engine.dump(tmp_path / "dump.flight")
    assert os.stat(tmp_path / "dump.flight").st_mode & 0o777 == 0o600


def test_file_that_was_there_is_replaced_whatever_its_mode(engine: xr.Engine, tmp_path: Path) -> None:
    path = tmp_path / "dump.flight"
    path.write_text("longer " * 100_000)
    path.chmod(0o644)
    with path.open() as opened:
        engine.dump(path)
        assert opened.read(7) == "longer ", "who had it open sees nothing of ours"
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert read_dump(path).engine == engine.name
    assert os.listdir(tmp_path) == [path.name]


def test_link_is_not_followed_and_a_pipe_is_written_to(engine: xr.Engine, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(xr.TransportError, match="cannot write the flight recorder"):
        engine.dump(tmp_path / "link")
    assert os.listdir(tmp_path) == ["link"]
    with pytest.raises(xr.TransportError, match="cannot write the flight recorder"):
        engine.dump("/dev/full")
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)
    engine.dump("/dev/null")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_names_of_peers_do_not_reach_the_terminal_raw(open_engine: EngineFactory, tmp_path: Path) -> None:
    name = 'evil\x1b[31m"\n'
    here, there = open_engine("here"), open_engine(name)
    here.connect(there.address, WAIT_S)
    text = here.dump()
    assert text is not None and "\x1b" not in text
    assert [peer.name for peer in dump_of(here, tmp_path).peers] == [name]


def test_nothing_in_a_file_reaches_the_terminal_raw() -> None:
    evil = "\x1b]0;title\x07\n"
    lines = [
        ["flight", 1, evil, evil, 1, evil, 10, 10],
        ["peer", 1, evil, 2, evil, evil, 1, 1],
        ["note", 5, evil, evil, evil],
        ["ring", evil, 1],
        ["op", 1, 0, evil, evil, 1, 1, 64, 3, 1],
    ]
    data = "".join(json.dumps(line) + "\n" for line in lines) + '["end"]\n'

    dump = parse_dump(data.encode(), "some.file")

    assert dump.peers[0].transport == evil
    for text in [*dump.summary(), *row_of(dump, dump.entries[0]), *dump.text().split("\n")]:
        assert text.isprintable(), text


# --- what is refused ---


@pytest.fixture
def recording(engine: xr.Engine, other: xr.Engine, tmp_path: Path) -> bytes:
    src, dst = engine.alloc(4096), other.alloc(4096)
    for _ in range(20):
        engine.submit_write(src, dst.descriptor, imm=1).wait(WAIT_S)
    engine.dump(tmp_path / "dump.flight")
    return (tmp_path / "dump.flight").read_bytes()


@pytest.mark.parametrize(
    "data",
    [b"", b"\n", b"hello", b"{}", b"[]\n", b'["end"]\n', b"\x00\xff" * 100, b"[" * 100_000, b'["flight"]\n["end"]\n'],
    ids=["empty", "newline", "text", "object", "array", "end", "binary", "deep", "bare"],
)
def test_what_is_no_recording_is_refused(data: bytes) -> None:
    with pytest.raises(xr.UsageError, match=r"^some\.file"):
        parse_dump(data, "some.file")


def test_recording_that_was_cut_short_is_refused_wherever(recording: bytes) -> None:
    for length in range(1, len(recording), 37):
        with pytest.raises(xr.UsageError):
            parse_dump(recording[:length], "some.file")
    whole_lines = recording[: recording.rindex(b'["end"]')]
    with pytest.raises(xr.UsageError, match="was cut short"):
        parse_dump(whole_lines, "some.file")


def test_recording_of_another_version_is_refused(recording: bytes) -> None:
    with pytest.raises(xr.UsageError, match="version 2, this crossrail reads 1"):
        parse_dump(recording.replace(b'["flight",1,', b'["flight",2,', 1), "some.file")


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b'["what",1]', "unknown kind of line 'what'"),
        (b'["op",1,99,"done","write",1,1,8,-1,1]', "ring 99 is not one of the"),
        (b'["op",1,0,"done","write",1]', "element 6 of a 'op' line is missing"),
        (b'["op","soon",0,"done","write",1,1,8,-1,1]', "element 1 of a 'op' line"),
        (b'["peer",1,2,3]', "element 6 of a 'peer' line is missing"),
        (b'["op",%d,0,"done","write",1,1,8,-1,1]' % 10**30, "element 1 of a 'op' line is not a number of 64 bits"),
        (b"[true]", "not a line of a flight recording"),
        (b"", "not a line of a flight recording"),
    ],
)
def test_damaged_line_is_named(recording: bytes, line: bytes, complaint: str) -> None:
    damaged = recording.replace(b'["end"]', line + b'\n["end"]')
    number = damaged.count(b"\n") - 1
    with pytest.raises(xr.UsageError, match=f"some.file, line {number}: ") as error:
        parse_dump(damaged, "some.file")
    assert complaint in str(error.value)


def test_time_of_a_recording_that_no_clock_shows_is_refused(recording: bytes) -> None:
    header, rest = recording.split(b"\n", 1)
    cells = json.loads(header)
    cells[7] = 10**30  # nanoseconds since 1970
    with pytest.raises(
        xr.UsageError, match=r"^some\.file, line 1: element 7 of a 'flight' line is not a number of 64 bits"
    ):
        parse_dump(json.dumps(cells).encode() + b"\n" + rest, "some.file")


def test_random_damage_is_refused_or_read_and_nothing_else(recording: bytes, seed: Seed) -> None:
    random = seed.rng()
    refused = 0
    for _ in range(300):
        data = bytearray(recording)
        for _ in range(random.integers(1, 4)):
            data[random.integers(len(data))] = random.integers(256)
        try:
            dump = parse_dump(bytes(data), "some.file")
        except xr.UsageError:
            refused += 1
        else:
            assert all(isinstance(entry, FlightEntry) for entry in dump.entries)
            dump.text()
    assert refused > 50

"""`crossrail bench peers`: adapters move the right bytes, and what a library does wrong is a line of the table."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from crossrail.cli.bench.peers import command, offers
from crossrail.cli.bench.peers.base import Offer, stream
from crossrail.cli.bench.peers.nixl import Nixl
from crossrail.cli.bench.peers.pair import PeerFailed, PeerPair, Settings
from crossrail.cli.bench.peers.turn import Outcome, Turn, take_turn, take_turns
from crossrail.cli.bench.peers.work import Shape
from crossrail.errors import UsageError
from tests.support.limits import WAIT_S, eventually
from tests.support.process import REPOSITORY

CPUS = (min(os.sched_getaffinity(0)), max(os.sched_getaffinity(0)))
SETTINGS = Settings(CPUS, 1 << 20, 2 * WAIT_S)
STREAM = Shape("stream", 4096, 300, 16)  # more than there are places, and than a window
PAGES = Shape("pages", 8192, 2)
MESSAGES = [Shape("messages", 8, 20), Shape("messages", 256, 20)]
SHAPES = [STREAM, Shape("stream", 65536, 20, 1), PAGES, *MESSAGES]

HERE = [offer for offer in offers.OFFERS if not offers.missing(offer)]
# NIXL 1.5.1 with UCX, alone in a program: in the destructors of the libnl that its wheel brings (docs/comparison.md).
THEIRS_AT_EXIT = {"signal 11 at exit"}


def made_up(name: str) -> Offer:
    return Offer(
        name=name,
        title=name,
        factory=f"tests.cli.made_up_peers:{name}",
        kind="stream",
        notes="",
        # Before what is there, which is where a module under a sanitizer lies.
        environment={"PYTHONPATH": os.pathsep.join([str(REPOSITORY), *os.environ.get("PYTHONPATH", "").split(":")])},
    )


@pytest.mark.parametrize("offer", [each for each in HERE if each.name != "nixl-libfabric"], ids=lambda each: each.name)
def test_every_library_here_moves_the_right_bytes(offer: Offer) -> None:
    turn = take_turn(offer, SETTINGS, SHAPES)
    assert set(turn.failures) <= (THEIRS_AT_EXIT if offer.name.startswith("nixl") else set()), turn.failures
    moved = {STREAM.name, PAGES.name, "write-64kib-w1", "threads"}
    told = {"first-byte", "message-8b", "message-8b-p99", "message-256b", "message-256b-p99"}
    assert set(turn.figures) - {"submit"} == (moved if offer.is_limit else moved | told)
    assert all(value > 0 for name, value in turn.figures.items() if name != "threads")


class SlowAgent:
    """NIXL's, as far as a stream needs it: a transfer is under way until asked twice, and not posted again then."""

    def __init__(self) -> None:
        self.made = 0
        self.asked: dict[int, int] = {}

    def prep_xfer_dlist(self, agent: str, table: object, memory: str) -> str:
        return agent

    def make_prepped_xfer(self, *_: object) -> int:
        self.made += 1
        return self.made

    def transfer(self, handle: int) -> str:
        assert handle not in self.asked, "NIXL_ERR_REPOST_ACTIVE"
        self.asked[handle] = 0
        return "PROC"

    def check_xfer_state(self, handle: int) -> str:
        self.asked[handle] += 1
        if self.asked[handle] < 2:
            return "PROC"
        del self.asked[handle]
        return "DONE"


def test_nixl_writes_to_a_place_again_while_the_write_before_is_under_way() -> None:
    """A pool of 64 MiB has two places for 16 writes of 32 MiB."""
    side = Nixl("sender", 1 << 14, "UCX", {})
    side._agent, side._base, side._base_there, side._there = SlowAgent(), 0, 0, "receiver"
    shape = Shape("stream", 8192, 40, 16)
    side.prepare(shape.places(side.pool_bytes), shape.nbytes)

    stream(side, shape.places(side.pool_bytes), shape.nbytes, shape.count, shape.window)

    assert side._agent.asked == {} and side._agent.made == 16  # one for each that is under way, and no more


# A sanitizer turns a crash into a report, and an exit.
crashes = pytest.mark.no_sanitizer


@pytest.mark.parametrize(
    ("name", "shape", "failure"),
    [
        pytest.param("Crashes", STREAM, "the sender: signal 11 at write-4kib-w16", marks=crashes),
        ("LosesAByte", STREAM, "the receiver at write-4kib-w16: write-4kib-w16: what arrived is not what was sent"),
        ("SwapsPages", PAGES, "the receiver at paged-8kib: paged-8kib: what arrived is not what was sent"),
        ("EchoesWrongly", MESSAGES[1], "the sender at message-256b: message of 256 B: what came back is not what was"),
    ],
)
def test_what_goes_wrong_is_said_with_side_and_measure(name: str, shape: Shape, failure: str) -> None:
    turn = take_turn(made_up(name), SETTINGS, [Shape("messages", 8, 5), shape])
    assert [text[: len(failure)] for text in turn.failures if "first byte" not in text] == [failure]
    assert shape.name not in turn.figures


@crashes
def test_a_crash_at_exit_is_said_and_keeps_the_figures() -> None:
    turn = take_turn(made_up("CrashesAtExit"), SETTINGS, [STREAM])
    assert turn.failures == ["signal 11 at exit"]
    assert turn.figures.keys() >= {"first-byte", STREAM.name}


def test_a_library_that_hangs_is_given_up_and_killed() -> None:
    with PeerPair(made_up("Hangs"), SETTINGS) as pair:
        pids = [process.pid for process in pair._processes]
        pair.meet()
        pair.timeout_s = 0.5
        with pytest.raises(PeerFailed, match=r"^no answer from the sender and the receiver within 0\.5 s at that$"):
            pair.call("measure", "that", shape=STREAM.to_json(), passes=1)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_library_that_cannot_open_is_quoted_in_one_line() -> None:
    turn = take_turn(made_up("IsNotConfigured"), SETTINGS, [STREAM])
    (failure,) = turn.failures
    assert failure.startswith(("the sender at open: OSError: ", "the receiver at open: OSError: "))
    assert "libthat.so.1: cannot open shared object file: No such file or directory" in failure
    assert "\n" not in failure and not turn.figures


def test_a_library_that_ends_the_process_is_told_with_what_it_printed() -> None:
    turn = take_turn(made_up("DiesOnImport"), SETTINGS, [STREAM])
    assert len(turn.failures) == 1
    assert turn.failures[0].endswith("exit code 7 at open (printed: Fatal: no device)")


def test_the_processes_of_a_parent_that_goes_end() -> None:
    pair = PeerPair(made_up("Hangs"), SETTINGS)
    pair.meet()
    for process in pair._processes:
        process.connection.close()
    eventually(lambda: all(each.poll() is not None for each in pair._launched), "both ended by themselves")
    pair.kill()


def test_turns_go_round_and_leave_out_who_never_began() -> None:
    asked: list[str] = []

    def on_turn(offer: Offer, turn: Turn) -> None:
        asked.append(offer.name)

    socket = next(offer for offer in offers.OFFERS if offer.name == "socket")
    outcomes = [Outcome(made_up("IsNotConfigured")), Outcome(socket)]
    take_turns(outcomes, SETTINGS, [STREAM], 2, on_turn)
    assert asked == ["IsNotConfigured", "socket", "socket"]
    assert [len(outcome.samples.get(STREAM.name, [])) for outcome in outcomes] == [0, 2]


def test_list_says_how_to_get_what_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offers, "_is_there", lambda need: False)
    listed = CliRunner().invoke(command.peers, ["--list"], env={"COLUMNS": "200"})
    assert listed.exit_code == 0, listed.output
    for offer in offers.OFFERS:
        if offer.needs:
            (line,) = (line for line in listed.output.splitlines() if line.startswith(f" {offer.name} "))
            assert f"no {offer.needs[0]}" in line
            assert offer.install in line
    assert "pip install nixl-cu12" in listed.output


def test_the_command_measures_and_writes_json(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(command, "shapes", lambda *, quick: SHAPES)
    path, tables = tmp_path / "peers.json", tmp_path / "peers.md"
    options = ["--only", "crossrail-tcp", "--runs", "2", "--pool-bytes", "64M"]
    options += ["--json", str(path), "--markdown", str(tables)]
    run = CliRunner().invoke(command.peers, options, env={"COLUMNS": "200"})
    assert run.exit_code == 0, run.output
    assert "256 B" in run.output and "crossrail-tcp" in run.output
    written = json.loads(path.read_text())
    rows = [line.split(" | ") for line in tables.read_text().splitlines() if line.startswith("| ")]
    assert rows[0][1] == "4 KiB, window 16" and rows[3][0] == "| crossrail-tcp"
    memcpy, ours = written["peers"]
    assert memcpy["name"] == "memcpy" and ours["name"] == "crossrail-tcp"  # the limit is always there
    assert ours["failures"] == [] and ours["versions"].startswith("crossrail ")
    assert ours["figures"][STREAM.name]["unit"] == "GB/s"
    assert len(ours["figures"]["message-8b"]["samples"]) == 2


def test_what_was_measured_before_an_interrupt_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupt(outcomes: list[Outcome], *_: object) -> None:
        outcomes[0].add(Turn({STREAM.name: 12.5}))
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "take_turns", interrupt)
    path = tmp_path / "peers.json"
    run = CliRunner().invoke(command.peers, ["--only", "memcpy", "--json", str(path)], env={"COLUMNS": "200"})
    assert run.exit_code != 0 and "12.5" in run.output
    assert json.loads(path.read_text())["peers"][0]["figures"][STREAM.name]["samples"] == [12.5]


def test_only_takes_names_and_families() -> None:
    assert [each.name for each in offers.choose(["nixl-ucx-tcp", "mpich"])] == [
        "memcpy",
        "nixl-ucx-tcp",
        "mpich-shm",
        "mpich-shm-send",
        "mpich-tcp",
    ]
    with pytest.raises(UsageError, match="--only nothing fits none; there are memcpy, socket, crossrail-shm, "):
        offers.choose(["nothing"])

"""`crossrail top` at an engine of this process, as somebody sees it in a terminal, in a pipe, and too late."""

from __future__ import annotations

import io
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from rich.console import Console

import crossrail as xr
from crossrail.cli.top import picture
from crossrail.observe import MetricsServer, Traffic, read_traffic, serve_metrics
from crossrail.observe.samples import Interval, parse
from tests.conftest import EngineFactory
from tests.support.limits import PROGRAM_S, WAIT_S
from tests.support.ports import free_port

SGR = re.compile(rb"\x1b\[[0-9;]*m")


@pytest.fixture
def served(open_engine: EngineFactory) -> Iterator[MetricsServer]:
    here, there = open_engine("here"), open_engine("there \x1b[31m of a long name")
    with here.alloc(4096) as src, there.alloc(4096) as dst:
        here.submit_write(src, dst.descriptor, 4096, imm=1).wait(WAIT_S)
        with serve_metrics(here, port=0) as server:
            yield server


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "crossrail", "top", *arguments]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), env=os.environ | environment, capture_output=True, text=True, timeout=PROGRAM_S
    )


def test_in_a_pipe_it_prints_once(served: MetricsServer) -> None:
    shown = run(served.url, "--every-s", "0.1")

    assert shown.returncode == 0, shown.stderr
    assert "\x1b" not in shown.stdout
    assert shown.stdout.count("engine here:") == 1 and "passed over" not in shown.stdout
    assert "shm:0" in shown.stdout
    (peer,) = (line for line in shown.stdout.splitlines() if line.startswith("there"))
    assert "connected" in peer and "local" in peer


def test_one_engine_of_several(open_engine: EngineFactory) -> None:
    with serve_metrics(open_engine("prefill"), open_engine("decode"), port=0) as server:
        both, one = run(server.url, "--every-s", "0.1"), run(server.url, "--every-s", "0.1", "--engine", "decode")
        none = run(server.url, "--every-s", "0.1", "--engine", "deco")

    assert "engine prefill:" in both.stdout and "engine decode:" in both.stdout
    assert one.returncode == 0 and "engine decode:" in one.stdout and "prefill" not in one.stdout
    assert none.returncode == 2 and none.stderr.startswith(
        "error: no engine 'deco' there; there is 'prefill', 'decode'"
    )


@pytest.mark.parametrize("columns", [30, 45, 60, 80, 100])
def test_narrow_screens_have_fewer_columns(served: MetricsServer, columns: int) -> None:
    shown = run(served.url, "--every-s", "0.1", COLUMNS=str(columns))

    assert shown.returncode == 0, shown.stderr
    assert max(map(len, shown.stdout.splitlines())) <= columns
    assert "GB/s" in shown.stdout
    assert ("queued" in shown.stdout) == (columns >= 80)


@pytest.mark.parametrize("columns", [45, 80, 120])
def test_long_names_are_cut_and_numbers_are_not(columns: int, open_engine: EngineFactory) -> None:
    here = open_engine("here")
    there = [open_engine(f"peer-{number}-{'n' * number * 8}") for number in range(8)]
    with here.alloc(4096) as src:
        for target in [one.alloc(4096) for one in there]:
            here.submit_write(src, target.descriptor, 4096, imm=1).wait(WAIT_S)
        with serve_metrics(here, port=0) as server:
            shown = run(server.url, "--every-s", "0.1", COLUMNS=str(columns))

    lines = [line.rstrip() for line in shown.stdout.splitlines()]
    assert max(map(len, lines)) <= columns
    header = next(line for line in lines if line.startswith("peer "))
    peers = [line for line in lines if line.startswith("peer-")]
    assert len(peers) == 8 and any("\N{HORIZONTAL ELLIPSIS}" in line for line in peers)
    if columns == 45:
        assert header.split() == ["peer", "GB/s", "out", "failed"]
        assert {tuple(line.split()[1:]) for line in peers} == {("0", "0", "0")}
    assert all(line.endswith("0") for line in peers)


def test_proxy_of_the_environment_is_not_asked_for_this_host(served: MetricsServer) -> None:
    assert run(served.url, "--every-s", "0.1", http_proxy="http://127.0.0.1:9", no_proxy="").returncode == 0


def test_short_addresses_will_do(served: MetricsServer) -> None:
    assert run(f"127.0.0.1:{served.port}", "--every-s", "0.1").returncode == 0


def test_closed_engine_is_shown_as_closed(served: MetricsServer, open_engine: EngineFactory) -> None:
    other = open_engine("other")
    with serve_metrics(other, port=0) as server:
        other.close()
        assert "engine other: closed" in run(server.url, "--every-s", "0.1").stdout


def test_engine_that_hangs_still_shows_its_rails(served: MetricsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def hanging(engine: xr.Engine, timeout_s: float) -> Traffic:
        found = read_traffic(engine, timeout_s)
        for rail in found.rails:
            rail.depth = rail.down = None
        found.is_whole, found.hangs = False, True
        return found

    monkeypatch.setattr("crossrail.observe.metrics.read_traffic", hanging)
    shown = run(served.url, "--every-s", "0.1")

    (line,) = (line for line in shown.stdout.splitlines() if line.startswith("shm:0"))
    assert (line.split()[1], line.split()[5]) == ("-", "-")


def _rail_table_at(shown: str) -> int:
    return next(number for number, line in enumerate(shown.splitlines()) if line.startswith("rail"))


@pytest.mark.parametrize("down", [0, 2])
def test_rail_that_is_down_is_shown_on_the_narrowest_screen(
    served: MetricsServer, monkeypatch: pytest.MonkeyPatch, down: int
) -> None:
    def broken(engine: xr.Engine, timeout_s: float) -> Traffic:
        found = read_traffic(engine, timeout_s)
        found.rails[0].down = down
        return found

    monkeypatch.setattr("crossrail.observe.metrics.read_traffic", broken)
    shown = run(served.url, "--every-s", "0.1", COLUMNS="30").stdout

    head, _, line = shown.splitlines()[_rail_table_at(shown) :][:3]
    assert ("down" in head.split()) == bool(down)
    assert max(map(len, shown.splitlines())) <= 30
    if down:
        assert line.split()[1] == "2"


def test_nobody_there_is_one_line() -> None:
    port = free_port()
    shown = run(f"127.0.0.1:{port}")

    assert shown.returncode == 1
    where = f"http://127.0.0.1:{port}/metrics"
    assert shown.stderr.startswith(f"error: no metrics at {where}: Connection refused; a process serves them after")
    assert "serve_metrics(engine)" in shown.stderr and "--metrics-port PORT" in shown.stderr
    assert shown.stderr.count("\n") == 1


PARTIAL = {
    "a bound": (
        'crossrail_rail_works_total{engine="a",transport="tcp",rail="0"} 1\n'
        'crossrail_rail_latency_seconds_bucket{engine="a",transport="tcp",rail="0"} 5',
        "crossrail_rail_latency_seconds_bucket without le",
    ),
    "a bound's number": (
        'crossrail_rail_works_total{engine="a",transport="tcp",rail="0"} 1\n'
        'crossrail_rail_latency_seconds_bucket{engine="a",transport="tcp",rail="0",le="much"} 5',
        "crossrail_rail_latency_seconds_bucket without le",
    ),
    "a rail": ('crossrail_rail_works_total{engine="a"} 1', "crossrail_rail_works_total without transport, rail"),
    "a peer": ('crossrail_peer_outstanding{engine="a"} 1', "crossrail_peer_outstanding without peer"),
    "an outcome": (
        "crossrail_weights_version 1\ncrossrail_weights_updates_total 5",
        "crossrail_weights_updates_total without outcome",
    ),
    "a model": ("crossrail_moe_rounds_total 5", "crossrail_moe_rounds_total without model"),
}


@pytest.mark.parametrize("lacking", PARTIAL)
def test_samples_that_lack_a_label_are_passed_over_and_named(lacking: str) -> None:
    """As whoever passes metrics on may drop it."""
    samples, named = PARTIAL[lacking]
    text = f'crossrail_engine_open{{engine="a"}} 1\n{samples}\n'
    interval = Interval(parse(text, "there"), parse(text, "there"))
    console = Console(file=io.StringIO(), width=100)

    console.print(picture(interval, 100))

    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "engine a:" in shown
    assert f"passed over: {named}" in shown


def test_somebody_else_there_is_one_line() -> None:
    with subprocess.Popen(
        [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1"], stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        port = re.findall(r"port (\d+)", other.stdout.readline())[0]
        shown = run(f"http://127.0.0.1:{port}/pyproject.toml")
        other.terminate()

    assert shown.returncode == 1
    assert len(shown.stderr.splitlines()) == 1


class Screen:
    """The command in a terminal of its own."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        self._terminal, end = os.openpty()
        self.process = subprocess.Popen(
            command(*arguments),
            stdin=end,
            stdout=end,
            stderr=subprocess.PIPE,
            env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "30", **environment},
            start_new_session=True,
        )
        os.close(end)
        self.seen = b""

    def wait_for(self, text: bytes, times: int) -> None:
        deadline = time.monotonic() + 2 * WAIT_S
        while SGR.sub(b"", self.seen).count(text) < times:
            ready, _, _ = select.select([self._terminal], [], [], deadline - time.monotonic())
            assert ready, f"{self.seen!r}"
            self.seen += os.read(self._terminal, 1 << 16)

    def end(self) -> tuple[int, str]:
        """Its status and what it said on standard error; reads on, since it may wait for a full terminal."""
        while True:
            try:
                if not os.read(self._terminal, 1 << 16):
                    break
            except OSError:  # EIO: the other end is closed
                break
        _, errors = self.process.communicate(timeout=PROGRAM_S)
        return self.process.returncode, errors.decode()

    def close(self) -> None:
        os.close(self._terminal)
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()


@pytest.fixture
def screens() -> Iterator[list[Screen]]:
    opened: list[Screen] = []
    yield opened
    for screen in opened:
        screen.close()


def test_terminal_is_drawn_anew_until_interrupted(served: MetricsServer, screens: list[Screen]) -> None:
    screen = Screen(served.url, "--every-s", "0.1")
    screens.append(screen)
    screen.wait_for(b"engine here:", 3)

    os.killpg(screen.process.pid, signal.SIGINT)

    assert screen.end() == (130, "\ninterrupted\n")
    assert SGR.search(screen.seen)
    assert b"\x1b[31m of a long name" not in screen.seen  # what a peer calls itself commands no terminal


def test_terminal_without_a_cursor_is_as_a_pipe(served: MetricsServer, screens: list[Screen]) -> None:
    screen = Screen(served.url, "--every-s", "0.1", TERM="dumb")
    screens.append(screen)
    screen.wait_for(b"engine here:", 1)
    assert screen.end() == (0, "")
    assert b"\x1b" not in screen.seen


def test_no_color_has_none(served: MetricsServer, screens: list[Screen]) -> None:
    screen = Screen(served.url, "--every-s", "0.1", NO_COLOR="1")
    screens.append(screen)
    screen.wait_for(b"engine here:", 2)

    colours = {code for match in SGR.findall(screen.seen) for code in re.findall(rb"\d+", match)}
    assert colours <= {b"0", b"1", b"2"}  # bold and dim are none
    os.killpg(screen.process.pid, signal.SIGINT)
    assert screen.end()[0] == 130


def test_target_that_goes_is_one_line(open_engine: EngineFactory, screens: list[Screen]) -> None:
    server = serve_metrics(open_engine("here"), port=0)
    screen = Screen(server.url, "--every-s", "0.1", "--patience-s", "0.2")
    screens.append(screen)
    screen.wait_for(b"engine here:", 2)

    server.close()

    status, errors = screen.end()
    assert status == 1
    # Who was being answered just then is cut off.
    assert re.fullmatch(rf"error: no metrics at {server.url}: [A-Z][^\n]*\n", errors), errors


def test_target_that_restarts_is_shown_again(open_engine: EngineFactory, screens: list[Screen]) -> None:
    engine = open_engine("here")
    server = serve_metrics(engine, port=0)
    screen = Screen(server.url, "--every-s", "0.1")
    screens.append(screen)
    screen.wait_for(b"engine here:", 2)
    server.close()
    screen.wait_for(b"as it was 0 s ago: no metrics at", 1)
    screen.seen = b""
    screen.wait_for(b"engine here:", 1)  # the latest picture stays
    with serve_metrics(open_engine("there"), port=server.port):
        screen.wait_for(b"engine there:", 2)

        os.killpg(screen.process.pid, signal.SIGINT)
        assert screen.end() == (130, "\ninterrupted\n")


def test_engine_that_fails_is_marked(open_engine: EngineFactory) -> None:
    here, there = open_engine("here"), open_engine("there")
    with here.alloc(64) as src:
        gone = there.alloc(64)
        descriptor = gone.descriptor
        here.submit_write(src, descriptor, 64).wait(WAIT_S)
        gone.close()
        with pytest.raises(xr.RemoteRegionClosed):
            here.submit_write(src, descriptor, 64).wait(WAIT_S)
    with serve_metrics(here, port=0) as server:
        assert "1 failed" in run(server.url, "--every-s", "0.1").stdout

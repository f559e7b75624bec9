"""`crossrail top` at an engine of this process, as somebody sees it in a terminal, in a pipe, and too late."""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

import crossrail as xr
from crossrail.observe import MetricsServer, serve_metrics
from tests.conftest import EngineFactory
from tests.support.limits import WAIT_S

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
        command(*arguments), env=os.environ | environment, capture_output=True, text=True, timeout=2 * WAIT_S
    )


def test_in_a_pipe_it_prints_once(served: MetricsServer) -> None:
    shown = run(served.url, "--every-s", "0.1")

    assert shown.returncode == 0, shown.stderr
    assert "\x1b" not in shown.stdout
    assert shown.stdout.count("engine here:") == 1
    assert "shm:0" in shown.stdout
    (peer,) = (line for line in shown.stdout.splitlines() if line.startswith("there"))
    assert "connected" in peer and "local" in peer


@pytest.mark.parametrize("columns", [30, 45, 60, 80, 100])
def test_narrow_screens_have_fewer_columns(served: MetricsServer, columns: int) -> None:
    shown = run(served.url, "--every-s", "0.1", COLUMNS=str(columns))

    assert shown.returncode == 0, shown.stderr
    assert max(map(len, shown.stdout.splitlines())) <= columns
    assert "GB/s" in shown.stdout
    assert ("queued" in shown.stdout) == (columns >= 80)


def test_short_addresses_will_do(served: MetricsServer) -> None:
    assert run(f"127.0.0.1:{served.port}", "--every-s", "0.1").returncode == 0


def test_closed_engine_is_shown_as_closed(served: MetricsServer, open_engine: EngineFactory) -> None:
    other = open_engine("other")
    with serve_metrics(other, port=0) as server:
        other.close()
        assert "engine other: closed" in run(server.url, "--every-s", "0.1").stdout


def test_nobody_there_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    shown = run(f"127.0.0.1:{port}")

    assert shown.returncode == 1
    where = f"http://127.0.0.1:{port}/metrics"
    assert shown.stderr.startswith(f"error: no metrics at {where}: Connection refused; a process serves them after")
    assert "serve_metrics(engine)" in shown.stderr and "--metrics-port PORT" in shown.stderr
    assert shown.stderr.count("\n") == 1


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
        _, errors = self.process.communicate(timeout=2 * WAIT_S)
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
    screen = Screen(server.url, "--every-s", "0.1")
    screens.append(screen)
    screen.wait_for(b"engine here:", 2)

    server.close()

    status, errors = screen.end()
    assert status == 1
    # Who was being answered just then is cut off.
    assert re.fullmatch(rf"error: no metrics at {server.url}: [A-Z][^\n]*\n", errors), errors


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

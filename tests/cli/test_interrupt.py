"""Ctrl-C in a command that waits or has started processes: a terminal sends SIGINT to all of its foreground group."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.limits import WAIT_S, eventually


@pytest.mark.parametrize(
    "command",
    [
        ["weights", "demo", "--versions", "1000"],
        ["kv", "demo", "--token-us", "5000"],
        ["serve", "--dir", "."],
        ["doctor", "--listen", "0"],
        ["bench"],
        ["weights", "sim", "kimi-k2"],
    ],
    ids=" ".join,
)
def test_one_word_and_the_status_of_an_interrupt(command: list[str], tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "crossrail", *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONUNBUFFERED": "1", "XDG_RUNTIME_DIR": str(tmp_path)},
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip()  # what it starts first is there, or importing
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130
    said = [line for line in errors.splitlines() if line and line != "Ctrl-C ends it." and "may measure" not in line]
    assert said == ["interrupted"]


def test_another_one_ends_it_without_a_traceback() -> None:
    """It comes while objects are being destroyed; an interrupt in a `__del__` is reported with a traceback."""
    command = [sys.executable, "-m", "crossrail", "demo", "--rounds", "100000"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        has_writer = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text
        eventually(has_writer, "the writing process is there")
        time.sleep(0.5)  # it has what is destroyed at the end
        process.send_signal(signal.SIGINT)
        while (line := process.stderr.readline()) != "interrupted\n":
            assert line
        while process.poll() is None:
            process.send_signal(signal.SIGINT)
            time.sleep(0.001)
        assert "Traceback" not in process.stderr.read()

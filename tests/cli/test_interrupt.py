"""Ctrl-C in a command that waits or has started processes: a terminal sends SIGINT to all of its foreground group."""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest

from tests.cli.leaves import groups_and_leaves
from tests.cli.test_robustness import write_checkpoint
from tests.support.limits import PROGRAM_S, eventually

# Of each command that does not end by itself at once: what makes it wait, or work for long. SILENT: who takes a
# connection there says nothing.
LONG = [
    ["serve", "--dir", "."],
    ["push", __file__, "tcp://SILENT/"],
    ["bench"],
    ["bench", "moe"],
    ["bench", "peers"],
    ["bench", "run", "SILENT"],
    ["bench", "serve", "--bind", "127.0.0.1:0"],
    ["sim", "--scenario", "endless:work"],
    ["doctor", "--listen", "0"],
    ["top", "SILENT"],
    ["kv", "demo", "--token-us", "5000"],
    ["kv", "router", "--listen", "127.0.0.1:0"],
    ["kv", "prefiller", "--router", "http://SILENT"],
    ["kv", "decoder", "--router", "http://SILENT"],
    ["kv", "top", "SILENT"],
    ["weights", "demo", "--versions", "1000"],
    ["weights", "bench"],
    ["weights", "load", ".", "--targets", "1"],
    ["weights", "sim", "kimi-k2"],
    ["moe", "sim"],
    ["explain", "tcp://SILENT"],
]
ENDLESS = """
import time

async def work(run):
    print("begun")
    time.sleep(1000)
"""
SERVICES = ["router", "prefiller", "decoder"]  # of kv, which are told so to end, and have nothing to say of it
# They read something, or reckon for a moment, print, and are done.
SHORT = ["topo", "trace", "error", "bench compare", "kv sim", "weights plan", "weights show"]
ELSEWHERE = ["demo"]  # below
WITH_TORCH = ["moe demo", "weights rl"]  # test_transformers_interrupt.py


def test_every_command_is_interrupted_here_or_ends_at_once() -> None:
    leaves = {" ".join(words) for words, command in groups_and_leaves() if _does_something(command)}
    named = {next(leaf for leaf in sorted(leaves, reverse=True) if " ".join(words).startswith(leaf)) for words in LONG}
    others = {*SHORT, *ELSEWHERE, *WITH_TORCH}
    assert named | others == leaves and not named & others


def _does_something(command: click.Command) -> bool:
    return not isinstance(command, click.Group) or command.invoke_without_command


@pytest.mark.parametrize("command", LONG, ids=" ".join)
def test_one_word_and_the_status_of_an_interrupt(command: list[str], tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "endless.py").write_text(ENDLESS)
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        subprocess.Popen(
            [
                *[sys.executable, "-m", "crossrail"],
                *(word.replace("SILENT", f"127.0.0.1:{silent.getsockname()[1]}") for word in command),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env=os.environ
            | {"PYTHONUNBUFFERED": "1", "XDG_RUNTIME_DIR": str(tmp_path), "CROSSRAIL_SECRET": "of this test"},
            start_new_session=True,
        ) as process,
    ):
        assert process.stdout is not None and process.stderr is not None
        try:
            # Simulations show nothing before they have saved all; they say on standard error how far they are.
            first = [process.stdout, silent, *([process.stderr] if "sim" in command else [])]
            is_at_work, _, _ = select.select(first, [], [], PROGRAM_S)
            assert is_at_work  # what it starts first is there, or importing
            os.killpg(process.pid, signal.SIGINT)
            _, errors = process.communicate(timeout=PROGRAM_S)
        finally:
            process.kill()
    is_service = command[0] == "kv" and command[1] in SERVICES
    assert process.returncode == (0 if is_service else 130), errors
    notes = re.compile("|Ctrl-C ends it.|.*may measure.*|seed [0-9]+|[0-9]+ of [0-9]+: .*|.* trainers to .* targets")
    said = [line for line in errors.splitlines() if not notes.fullmatch(line)]
    assert said == ([] if is_service else ["interrupted"])


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


def test_loop_that_is_interrupted_while_it_is_made_says_nothing() -> None:
    """Its destructor reports the attributes that it has not got yet."""
    script = """
import asyncio, os, signal
from crossrail.cli import event_loop

make = asyncio.BaseEventLoop.__init__

def make_interrupted(loop):
    os.kill(os.getpid(), signal.SIGINT)
    make(loop)

async def begin():
    print("begun", flush=True)
    await asyncio.sleep(1000)

asyncio.BaseEventLoop.__init__ = make_interrupted
try:
    event_loop.run(begin())
except KeyboardInterrupt:
    print("interrupted")
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=PROGRAM_S)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout in ("begun\ninterrupted\n", "interrupted\n")

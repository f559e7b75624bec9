"""Ctrl-C in the commands whose processes import torch and transformers: while they do, and at work."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.limits import PROGRAM_S, WAIT_S, eventually

# Of each: how many processes it starts for its work.
COMMANDS = {"moe demo --ranks 2": 2, "weights rl --trainers 2 --steps 1000": 4}


@pytest.mark.parametrize("command", COMMANDS)
def test_ctrl_c_while_its_processes_begin_ends_all(command: str) -> None:
    with started(command) as process:
        try:
            eventually(lambda: len(children_of(process)) >= COMMANDS[command], "all are started", PROGRAM_S)
            ends_all_with_one_word(process)
        finally:
            process.kill()


def test_ctrl_c_between_two_models_ends_all_ranks() -> None:
    with started("moe demo --ranks 2") as process:
        try:
            assert process.stdout is not None
            is_at_work, _, _ = select.select([process.stdout], [], [], 6 * WAIT_S)
            assert is_at_work  # the first one's figures
            ends_all_with_one_word(process)
        finally:
            process.kill()


def started(command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "crossrail", *command.split()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        start_new_session=True,
    )


def ends_all_with_one_word(process: subprocess.Popen[str]) -> None:
    children = children_of(process)
    assert children
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=PROGRAM_S)
    assert (process.returncode, errors.split()) == (130, ["interrupted"]), errors
    eventually(lambda: not [pid for pid in children if Path(f"/proc/{pid}").exists()], "its processes have ended")


def children_of(process: subprocess.Popen[str]) -> list[str]:
    return Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()

"""The processes of `crossrail sim --runs`: none of them takes more with it than its own run."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from pathlib import Path

import pytest

from crossrail.cli.sim.players import Task, play_each
from tests.cli.test_commands import COMMAND
from tests.support.limits import PROGRAM_S
from tests.support.process import REPOSITORY

OWN = "tests.sim.own_scenarios"


@pytest.fixture(autouse=True, scope="module")
def tracker() -> None:
    """multiprocessing's own process, which stays: no test has left it behind."""
    resource_tracker.ensure_running()


def kill() -> None:
    for child in multiprocessing.active_children():
        child.kill()
        child.join()


def stop_and_kill_soon() -> None:
    for child in multiprocessing.active_children():
        assert child.pid is not None
        os.kill(child.pid, signal.SIGSTOP)
        threading.Timer(0.3, child.kill).start()


@pytest.mark.parametrize("end", [kill, stop_and_kill_soon])
def test_a_process_that_dies_between_two_runs_costs_the_next_one_and_no_other(end: Callable[[], None]) -> None:
    def tasks() -> Iterator[Task]:
        yield Task("pair", 1, twice=False)
        end()
        yield Task("pair", 2, twice=False)
        yield Task("pair", 3, twice=False)

    first, second, third = play_each(tasks(), jobs=1)

    assert (first.ok, second.ok, third.ok) == (True, False, True)
    assert (second.seed, len(second.failures)) == (2, 1)
    assert second.failures[0].startswith("its process was ended by SIGKILL before it began")


def test_who_is_killed_takes_its_processes_along_and_they_say_nothing() -> None:
    with subprocess.Popen(
        [*COMMAND, "sim", "--scenario", f"{OWN}:takes_long", "--runs", "2", "--jobs", "2"],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for _ in range(2):  # both: one that is still starting hears of it otherwise
            assert process.stdout.readline() == "begun\n"
        process.kill()
        _, errors = process.communicate(timeout=PROGRAM_S)  # until the last of them has closed its end

    assert errors == ""


START = """
import multiprocessing, signal
from pathlib import Path
from crossrail.cli.sim.players import _Player

def deaf(pid):
    sets = dict(line.split(":\\t") for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\\t" in line)
    return bool((int(sets["SigBlk"], 16) | int(sets["SigIgn"], 16)) >> (signal.SIGINT - 1) & 1)

if __name__ == "__main__":
    player = _Player()
    (child,) = multiprocessing.active_children()
    print(deaf(child.pid))
    player.stop()
"""


def test_first_process_is_deaf_to_an_interrupt_from_its_start(tmp_path: Path) -> None:
    """A terminal sends Ctrl-C to all: a process that is just starting would print a traceback."""
    (tmp_path / "start.py").write_text(START)
    shown = subprocess.run(
        [sys.executable, "start.py"],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PROGRAM_S, cwd=tmp_path,
    )  # fmt: skip
    assert (shown.stdout, shown.stderr) == ("True\n", "")

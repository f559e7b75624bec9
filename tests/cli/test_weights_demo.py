"""`crossrail weights demo` and `bench` in processes of their own, small."""

import subprocess
import sys

import pytest


def run(*arguments: str) -> str:
    """What `crossrail weights ...` says."""
    command = [sys.executable, "-m", "crossrail", "weights", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=140, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.timeout(150)
def test_demo_survives_the_death_of_a_trainer() -> None:
    said = run("demo", "--versions", "2", "--trainers", "2", "--mib", "6", "--transport", "shm", "--kill")
    assert "ok: 2 versions, all bits equal at all inference ranks" in said


@pytest.mark.timeout(150)
def test_processes_meet_over_tcp_with_the_secret_that_was_drawn() -> None:
    said = run("demo", "--versions", "1", "--trainers", "1", "--mib", "1", "--transport", "tcp")
    assert "ok: 1 versions" in said
    sizes = ("--size", "2MiB", "--trainers", "1", "--targets", "1", "--rounds", "1")
    assert "write stage" in run("bench", *sizes, "--transport", "tcp", "--no-gloo")

"""`crossrail weights demo` and `bench` in processes of their own, small."""

import importlib.util
import subprocess
import sys
from typing import Any

import pytest
from click.testing import CliRunner

from crossrail.cli.weights import bench, commands


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
    said = run("bench", *sizes, "--transport", "tcp", "--no-gloo", "--small-writes", "50")
    assert said.startswith("1 trainers and 1 inference ranks start, and update once\n")  # says so before it waits
    assert "1 rounds follow" in said
    assert "write stage" in said
    assert "Python for each of 50 writes of 1 KiB" in said


class Slow:
    """A way that takes 1000 s for an update."""

    part = 1.0

    def __init__(self, *_: Any) -> None:
        self.calls: list[str] = []

    def start(self) -> None:
        self.calls.append("start")

    def update(self) -> float:
        self.calls.append("update")
        return 1000.0

    def close(self) -> None:
        self.calls.append("close")


@pytest.mark.timeout(150)
def test_ways_that_are_installed_are_measured_in_the_same_run(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Slow] = []

    def make(*_: Any) -> Slow:
        made.append(Slow())
        return made[-1]

    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: name if "torch" in name or "check" in name else find(name)
    )
    monkeypatch.setattr(bench, "GlooFleet", make)
    monkeypatch.setattr(bench, "CheckpointEngineFleet", make)
    sizes = ["--size", "2MiB", "--trainers", "1", "--targets", "1", "--rounds", "2", "--small-writes", "0"]
    ended = CliRunner(env={"COLUMNS": "200"}).invoke(commands.bench, sizes, catch_exceptions=False)
    assert "gather and broadcast by gloo" in ended.output
    assert "checkpoint-engine, over gloo" in ended.output
    assert "times checkpoint-engine" in ended.output
    assert [way.calls for way in made] == [["start", *["update"] * 3, "close"]] * 2

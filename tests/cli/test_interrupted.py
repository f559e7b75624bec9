"""Ctrl-C, or SIGTERM, while a command is still being imported."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.limits import PROGRAM_S

# Of each process: one that is to import the module says so, and waits to be interrupted.
HALT = """
import importlib.abc, os, sys, time

class Halt(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == os.environ["HALT_AT"]:
            print("halted", flush=True)
            while True:  # Python looks at signals between two; one that came before signal.pause() would not end that
                time.sleep(0.01)

sys.meta_path.insert(0, Halt())
"""


def interrupted(
    arguments: Sequence[str], module: str, folder: Path, by: signal.Signals = signal.SIGINT
) -> tuple[int, str]:
    """Exit code and stderr of Python, interrupted as it imports a module."""
    (folder / "sitecustomize.py").write_text(HALT)
    process = subprocess.Popen(
        [sys.executable, *arguments],
        env=os.environ | {"PYTHONPATH": str(folder), "HALT_AT": module, "CROSSRAIL_SECRET": "secret"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "halted\n"
    process.send_signal(by)
    _, errors = process.communicate(timeout=PROGRAM_S)
    return process.returncode, errors


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("crossrail.cli.main", ["--help"]),
        ("click", ["--help"]),
        ("numpy", ["bench", "run", "--help"]),
        ("numpy", ["weights", "demo"]),
    ],
)
def test_command_ends_without_a_traceback(module: str, words: list[str], tmp_path: Path) -> None:
    script = Path(sys.executable).with_name("crossrail")
    for command in (["-m", "crossrail"], [str(script)]):
        assert interrupted([*command, *words], module, tmp_path) == (-signal.SIGINT, "")


def test_command_that_imports_as_it_runs_is_interrupted_like_any(tmp_path: Path) -> None:
    assert interrupted(["-m", "crossrail", "demo"], "numpy", tmp_path) == (130, "\ninterrupted\n")


NODE = ["prefiller", "--router", "http://127.0.0.1:1"]


@pytest.mark.no_coverage  # it takes SIGTERM for itself, from the start of each process
@pytest.mark.parametrize(
    ("module", "words"), [("crossrail.cli.main", NODE), ("numpy", NODE), ("numpy", ["decoder"]), ("numpy", ["router"])]
)
def test_service_that_is_told_to_end_early_ends_as_it_does_later(module: str, words: list[str], tmp_path: Path) -> None:
    assert interrupted(["-m", "crossrail", "--debug", "kv", *words], module, tmp_path, signal.SIGTERM) == (0, "")


def test_command_that_is_no_service_is_terminated_like_any(tmp_path: Path) -> None:
    arguments = ["-m", "crossrail", "weights", "demo"]
    assert interrupted(arguments, "numpy", tmp_path, signal.SIGTERM) == (-signal.SIGTERM, "")


@pytest.mark.parametrize(
    ("by", "status", "errors"), [(signal.SIGTERM, 0, ""), (signal.SIGINT, 130, "\ninterrupted\n")], ids=["term", "int"]
)
@pytest.mark.parametrize("words", [[*NODE, "--model"], ["router", "--tokenizer"]], ids=["model", "tokenizer"])
def test_service_whose_model_is_being_loaded_puts_it_away(
    by: signal.Signals, status: int, errors: str, words: list[str], tmp_path: Path
) -> None:
    """It may have processes of its own. What it makes of the interrupt counts for nothing, as numpy's words on it."""
    away = tmp_path / "away"
    (tmp_path / "mine.py").write_text(
        f"""
import pathlib

def make():
    try:
        import slow
    except SystemExit:
        raise ImportError("mine is not installed properly")
    finally:
        pathlib.Path({str(away)!r}).touch()
"""
    )
    command = ["-m", "crossrail", "kv", *words, "mine:make"]
    assert interrupted(command, "slow", tmp_path, by) == (status, errors)
    assert away.exists()


def test_program_that_uses_the_package_is_interrupted_as_python_has_it(tmp_path: Path) -> None:
    status, errors = interrupted(["-c", "from crossrail import Engine"], "numpy", tmp_path)
    assert "Traceback" in errors and "KeyboardInterrupt" in errors and status != 0


def test_program_of_the_same_name_is_its_own_master_after_the_import(tmp_path: Path) -> None:
    program = tmp_path / "crossrail"
    program.write_text("import crossrail\nimport mine")
    status, errors = interrupted([str(program)], "mine", tmp_path)
    assert errors.endswith("KeyboardInterrupt\n") and status != 0


@pytest.mark.parametrize("words", [["topo"], ["topo", "--root=/nowhere"], ["topo", "--rot"], ["error"]], ids=" ".join)
def test_command_that_begins_or_ends_is_ended_by_it(words: list[str], tmp_path: Path) -> None:
    """Not by click, with a word of its own and the status of a failure."""
    program = tmp_path / "crossrail"
    program.write_text(
        """
import os, signal, sys
import click
from crossrail.cli import main

def interrupted(*_):
    os.kill(os.getpid(), signal.SIGINT)

module = sys.modules["crossrail.cli.main"]
module.said_of = module.Complaint.show = click.Context.exit = interrupted
if sys.argv[1:] == ["topo"]:
    click.Group.parse_args = interrupted
main()
"""
    )
    done = subprocess.run([sys.executable, str(program), *words], capture_output=True, text=True, timeout=PROGRAM_S)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")

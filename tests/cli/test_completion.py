"""Completion in the shell, as docs/install.md sets it up: what the shell asks, and what it is answered."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from tests.support.limits import PROGRAM_S
from tests.support.process import assert_clean, run_script


def answered(instruction: str, words: str = "") -> str:
    asked = {"_CROSSRAIL_COMPLETE": instruction, "COMP_WORDS": words, "COMP_CWORD": str(max(len(words.split()) - 1, 0))}
    done = subprocess.run(
        [sys.executable, "-m", "crossrail"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PROGRAM_S,
        env=os.environ | asked,
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("crossrail we", {"weights"}),
        ("crossrail kv de", {"decoder", "demo"}),
        ("crossrail trace --chr", {"--chrome"}),
        ("crossrail weights show --dr", {"--draw"}),
        ("crossrail error checks", {"checksum-mismatch"}),
    ],
)
def test_what_may_come_next(words: str, offered: set[str]) -> None:
    lines = answered("bash_complete", words).splitlines()
    assert {line.partition(",")[2] for line in lines} == offered


def test_help_and_completion_wait_for_neither_numpy_nor_the_native_half() -> None:
    """What a shell asks while somebody types, and the first thing that a newcomer does."""
    script = run_script(
        """
        import sys
        from click.shell_completion import BashComplete
        from click.testing import CliRunner
        from crossrail.cli import main

        for words in ("--help", "--version", "kv --help", "weights --help", "moe --help", "error usage-error"):
            assert CliRunner().invoke(main, words.split()).exit_code == 0, words
        for words in ([], ["kv"], ["weights"], ["moe"]):
            assert BashComplete(main, {}, "crossrail", "_CROSSRAIL_COMPLETE").get_completions(words, "")
        print(*sorted({"numpy", "crossrail._core"} & set(sys.modules)))
        """
    )
    assert_clean(script)
    assert script.stdout.split() == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_script_of_a_shell(shell: str) -> None:
    script = answered(f"{shell}_source")
    assert f"_CROSSRAIL_COMPLETE={shell}_complete" in script and "crossrail" in script
    if shutil.which(shell):
        checked = subprocess.run([shell, "-n"], input=script, capture_output=True, text=True, timeout=PROGRAM_S)
        assert checked.returncode == 0, checked.stderr

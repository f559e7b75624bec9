"""Running commands, each with a limit in time; what fails ends everything with a message."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "build" / "wheel"


class Failure(Exception):
    """Ends the run with a message instead of a traceback."""


def say(text: str) -> None:
    print(f"dev: {text}", file=sys.stderr, flush=True)


def run(
    command: Sequence[str | Path], timeout_s: float, *, cwd: Path = ROOT, env: Mapping[str, str] | None = None
) -> str:
    """What it prints to stdout. What it says elsewhere is shown if it fails."""
    words = [str(word) for word in command]
    shown = " ".join(words)[:200]
    try:
        done = subprocess.run(
            words,
            cwd=cwd,
            env=dict(os.environ if env is None else env),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        raise Failure(f"no end after {timeout_s:.0f} s: {shown}") from None
    if done.returncode != 0:
        raise Failure(f"exit status {done.returncode}: {shown}\n{done.stdout[-6000:]}{done.stderr[-6000:]}")
    return done.stdout


def make_venv(folder: Path, python: Path, *requirements: str | Path) -> Path:
    """A fresh environment of that Python with these packages; returns its Python."""
    run([python, "-m", "venv", "--clear", folder], 300)
    inside = folder / "bin" / "python"
    if requirements:
        pip_install(inside, *requirements)
    return inside


def pip_install(python: Path, *requirements: str | Path) -> None:
    pip = [python, "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "-q", "--retries", "5"]
    run([*pip, *requirements], 900)

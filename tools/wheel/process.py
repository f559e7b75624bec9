"""Running commands, each with a limit in time; what fails ends everything with a message."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "build" / "wheel"
TELL_S = 30.0


class Failure(Exception):
    """Ends the run with a message instead of a traceback."""


def say(text: str) -> None:
    print(f"dev: {text}", file=sys.stderr, flush=True)


def run(
    command: Sequence[str | Path],
    timeout_s: float,
    *,
    cwd: Path = ROOT,
    env: Mapping[str, str] | None = None,
    what: str = "",
) -> str:
    """What it prints to stdout. What it says elsewhere is shown if it fails.

    what: told at once, and every half minute how far it is.
    """
    words = [str(word) for word in command]
    shown = " ".join(words)[:200]
    if what:
        say(what)
    with TemporaryFile() as out, TemporaryFile() as err:
        process = subprocess.Popen(
            words,
            cwd=cwd,
            env=dict(os.environ if env is None else env),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
        )
        try:
            ended = _wait(process, timeout_s, what, out)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        said, complained = (_text(file) for file in (out, err))
    if not ended:
        raise Failure(f"no end after {timeout_s:.0f} s: {shown}")
    if process.returncode != 0:
        raise Failure(f"exit status {process.returncode}: {shown}\n{said[-6000:]}{complained[-6000:]}")
    return said


def _wait(process: subprocess.Popen[bytes], timeout_s: float, what: str, out: IO[bytes]) -> bool:
    """Whether it ended in time. How far it is, ninja says, if it is ninja that works."""
    started = time.monotonic()
    while (left := started + timeout_s - time.monotonic()) > 0:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(min(left, TELL_S))
            return True
        if what:
            steps = re.findall(r"\[\d+/\d+\]", _text(out))
            far = f", {steps[-1]}" if steps else ""
            say(f"  {time.monotonic() - started:.0f} s{far}")
    return False


def _text(file: IO[bytes]) -> str:
    """All of it. Read by its descriptor: the command writes where the offset is that it shares with us."""
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(errors="replace")


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

"""Programs of examples/, run where they lie, as their docstrings say."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.limits import PROGRAM_S, eventually
from tests.support.process import REPOSITORY

FOLDER = Path(REPOSITORY) / "examples"
_NEXT = re.compile(r"^run: python (\S+) ([0-9a-f]+)\n", re.MULTILINE)


class Program:
    """One of them in a process of its own. What it prints goes to files, so that nobody waits for a reader."""

    def __init__(self, folder: Path, *words: str) -> None:
        self._said, self._complained = folder / f"{words[0]}.out", folder / f"{words[0]}.err"
        environment = {**os.environ, "CROSSRAIL_SECRET": "of-this-test", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": ""}
        with self._said.open("wb") as out, self._complained.open("wb") as err:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "error::ResourceWarning", *words],
                stdout=out, stderr=err, stdin=subprocess.DEVNULL, cwd=FOLDER, env=environment,
            )  # fmt: skip

    @property
    def said(self) -> str:
        return self._said.read_text()

    @property
    def complained(self) -> str:
        return self._complained.read_text()

    def next(self) -> tuple[str, str]:
        """The command for a second shell, once it has said that."""
        eventually(lambda: _NEXT.search(self.said) or self._process.poll() is not None, "no command", PROGRAM_S)
        found = _NEXT.search(self.said)
        assert found, self.complained
        return found[1], found[2]

    def interrupt(self) -> None:
        self._process.send_signal(signal.SIGINT)

    def ended(self) -> str:
        """What it has printed, but for the line that says what to run next. It succeeded."""
        status = self._process.wait(PROGRAM_S)
        assert status == 0, f"{self.said}\n{self.complained}"
        return _NEXT.sub("", self.said)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


@contextmanager
def running(folder: Path, *words: str) -> Iterator[Program]:
    program = Program(folder, *words)
    try:
        yield program
    finally:
        program.end()


def promised(name: str) -> list[str]:
    """What its docstring says that it prints, line by line."""
    text = (FOLDER / name).read_text().split('"""')[1]
    return [line[4:] for line in text.splitlines() if line.startswith("    ") and not line.startswith("    $ ")]


def alike(lines: list[str]) -> list[str]:
    """With "#" for each number, which differs from run to run."""
    return [re.sub(r"\d+(\.\d+)?|[0-9a-f]{100,}", "#", line) for line in lines]

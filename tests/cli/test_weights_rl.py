"""What `crossrail weights rl` shows on a terminal: its loop is played here, and run by tests/weights."""

from __future__ import annotations

import asyncio
import os
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from crossrail.cli.console import open_console
from crossrail.cli.weights import rl
from crossrail.cli.weights.rl_loop import RlOptions, RlStep
from crossrail.weights.services.reports import UpdateReport
from crossrail.weights.step.step import StepReport
from tests.support.limits import WAIT_S


class Terminal:
    """The other end of a terminal: what is written there, without its colours and movements. Reads in a thread, so that
    nobody has to wait for us to write.
    """

    def __init__(self, descriptor: int) -> None:
        self._text = ""
        self._came = threading.Condition()
        self.reading = threading.Thread(target=self._read, args=[descriptor])
        self.reading.start()

    def wait_for(self, words: str) -> None:
        """What came before it is passed over."""
        with self._came:
            assert self._came.wait_for(lambda: words in self._text, WAIT_S), f"no {words!r} in {self._text!r}"
            self._text = self._text.partition(words)[2]

    def _read(self, descriptor: int) -> None:
        while True:
            try:
                read = os.read(descriptor, 1 << 16)
            except OSError:  # EIO: nobody has it open any more
                return
            with self._came:
                self._text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self._text + read.decode("utf-8", "replace"))
                self._came.notify_all()


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    """Of 140 columns and 40 lines, on which the command prints."""
    ours, theirs = os.openpty()
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.setenv("LINES", "40")
    monkeypatch.setenv("TERM", "xterm")
    made = Terminal(ours)
    try:
        with os.fdopen(theirs, "w") as file:
            monkeypatch.setattr(rl, "open_console", lambda: open_console(file=file))
            yield made
    finally:
        made.reading.join()
        os.close(ours)


def test_view_goes_on_with_the_loop(monkeypatch: pytest.MonkeyPatch, terminal: Terminal) -> None:
    async def played(
        options: RlOptions, on_phase: Callable[[str, int, int], None], on_step: Callable[[RlStep], Any]
    ) -> None:
        for version in range(1, options.steps + 2):
            on_phase("starting", 0, 0)
            await asyncio.to_thread(terminal.wait_for, "starting")
            on_phase("writing", 1 << 20, 2 << 20)
            await asyncio.to_thread(terminal.wait_for, "writing 1.0 MiB of 2.0 MiB")
            report = UpdateReport(version, transfer_s=0.0375, steps={0: StepReport(written_bytes=2 << 20)})
            on_step(RlStep(version, report, (0.25 * version, 0.25), ((),), 60, None if version == 1 else 0.125))
            await asyncio.to_thread(terminal.wait_for, f"step {version - 1}/{options.steps}")

    monkeypatch.setattr(rl, "run_rl", played)
    asyncio.run(rl._show(RlOptions(steps=2)))
    for words in ("reward bf16 TP 2", "0.750", "0.125", "2.0 MiB", "37.5", "60"):
        terminal.wait_for(words)
    terminal.wait_for("mean reward 0.250 at first, 0.500 after 2 steps")
    terminal.wait_for("ok: after each update all tensors equal the converted checkpoint, bit for bit")

"""Services that go on whatever becomes of their standard output."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from crossrail.cli.background import BackgroundOutput
from tests.support.limits import WAIT_S, eventually


def test_writer_is_never_blocked_and_told_what_was_dropped() -> None:
    read_end, write_end = os.pipe()
    with open(write_end, "w") as stream, open(read_end, "rb", buffering=0) as reader:
        output = BackgroundOutput(stream)
        for number in range(40_000):  # more than the pipe and the memory take
            output.write(f"line {number:6}\n")
        output.close()  # gives up
        text, done = bytearray(), threading.Event()

        def read() -> None:
            while b"are missing here" not in text:
                text.extend(reader.read(1 << 16) or b"")
            done.set()

        threading.Thread(target=read, daemon=True).start()
        assert done.wait(WAIT_S)
    assert text.startswith(b"line      0\nline      1\n")


def test_last_words_are_out_when_it_is_closed(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w") as stream:
        output = BackgroundOutput(stream)
        output.write("ä\n")
        output.close()
        output.close()
        assert (tmp_path / "out").read_text() == "ä\n"


def test_full_disk_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    with open("/dev/full", "w") as stream:
        output = BackgroundOutput(stream)
        for _ in range(3):
            output.write("word\n")
            eventually(lambda: not output._texts and not output._writing, "it was tried")
        output.close()
    errors = capsys.readouterr().err
    assert errors == "warning: standard output: No space left on device; the work goes on without it\n"

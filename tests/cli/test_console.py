"""Printing: names as they are, at any width."""

from __future__ import annotations

import fcntl
import os
import struct
import termios
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.progress import Progress

from crossrail.cli.console import open_console, text_column
from crossrail.cli.main import main


def test_width_of_nothing_is_no_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shells without a terminal may set it, and rich would print nothing at all."""
    for columns, width in (("0", 140), ("", 140), ("x", 140), ("30", 30)):
        monkeypatch.setenv("COLUMNS", columns)
        assert open_console().width == width
    said = CliRunner(env={"COLUMNS": "0"}).invoke(main, ["topo"])
    assert said.exit_code == 0 and "NUMA" in said.output


def test_terminal_without_a_cursor_has_its_own_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """rich takes 80 for the width of each."""
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.delenv("COLUMNS", raising=False)
    owner, end = os.openpty()
    with os.fdopen(owner, "rb"), os.fdopen(end, "w") as terminal:
        for columns, width in ((40, 40), (132, 132), (0, 80)):
            fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
            assert open_console(file=terminal).width == width
        monkeypatch.setenv("COLUMNS", "55")
        assert open_console(file=terminal).width == 55


def test_name_stays_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    console = open_console()
    console.print("w:a:b:c and :bomb:")
    with Progress(text_column("{task.description}"), console=console) as progress:
        progress.add_task(":bomb: [/x]", total=1)
    assert capsys.readouterr().out == "w:a:b:c and :bomb:\n:bomb: [/x]\n"


PLAN = ["weights", "plan", "qwen3-235b", "--layers=1", "--trainers=1", "--targets=1"]


@pytest.mark.parametrize("name", ["plan[v1].bin", "[/x].bin", "w:a:b:c"])
def test_path_stays_as_it_is(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    said = CliRunner().invoke(main, [*PLAN, "-o", str(file)])
    assert said.exit_code == 0, said.output
    assert said.output.splitlines()[-1] == f"saved to {file}"


def test_picture_of_no_kind_is_refused_before_the_plan_is_read(tmp_path: Path) -> None:
    (tmp_path / "plan").write_bytes(b"")
    said = CliRunner().invoke(main, ["weights", "show", str(tmp_path / "plan"), "--draw", str(tmp_path / "a.txt")])
    assert said.exit_code == 2 and "--draw" in said.stderr and "its suffix must be one of" in said.stderr

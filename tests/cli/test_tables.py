"""Tables on screens that are too narrow for them: every word of every row is there, and whole."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from crossrail.cli.tables import Fitted, Screenful

CONTROL = re.compile(r"\x1b\[[?0-9;]*[a-zA-Z]")
ROWS = [
    ("write-private-1m-w16", "141.9 GB/s", "1.03x", "", "the other side copies it out of pages of its own"),
    ("py-await", "338,766 k/s", "", "ok", "pip install a-distribution-with-a-name"),
]


def table(**options: object) -> Table:
    made = Table("measure", "value", "ratio\nto limit", "", "how", title="what was measured", **options)
    for column in made.columns[:2]:
        column.no_wrap = True
    for row in ROWS:
        made.add_row(*row)
    return made


def shown(width: int, fitted: Fitted) -> list[str]:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(fitted)
    text = console.file.getvalue()
    return [line.rstrip() for line in text.splitlines()]


@pytest.mark.parametrize("width", [28, 30, 40, 60, 80, 90, 100, 120, 200])
def test_nothing_is_cut_off_however_narrow_it_is(width: int) -> None:
    lines = shown(width, Fitted(table()))
    words = " ".join(lines).replace("│", " ").split()
    assert max(map(len, lines)) <= width
    assert {word for row in ROWS for cell in row for word in cell.split()} <= set(words)
    assert {"measure", "value", "ratio", "how"} <= set(words)


def test_it_is_a_table_where_there_is_room_and_lines_where_there_is_not() -> None:
    def is_table(width: int) -> bool:
        return any("│" in line for line in shown(width, Fitted(table())))

    assert is_table(200) and is_table(90) and not is_table(40)


def test_where_one_column_is_wrapped_it_is_the_widest() -> None:
    made = Table("what", "bound")
    made.add_row("of it waiting for others", "links of all of the receivers")
    lines = shown(48, Fitted(made))
    assert any("of it waiting for others" in line for line in lines)
    assert not any("links of all of the receivers" in line for line in lines)


def test_rows_without_room_begin_with_their_name_and_leave_out_what_they_lack() -> None:
    lines = shown(50, Fitted(table()))
    assert lines[0] == "what was measured"
    assert lines[1] == "measure write-private-1m-w16"
    assert lines[2].startswith("  value 141.9 GB/s  ratio to limit 1.03x")
    second = lines.index("measure py-await")
    assert lines[second + 1].startswith("  value 338,766 k/s  ok  how pip")


def test_words_that_may_be_broken_keep_the_table_on_narrower_screens() -> None:
    made = Table(show_header=False)
    made.add_column(no_wrap=True)
    made.add_column(overflow="fold")
    made.add_row("SHA-256", "0123456789abcdef" * 4)
    assert any("│" in line for line in shown(50, Fitted(made)))
    for width in (50, 30, 20):
        lines = shown(width, Fitted(made))
        assert "0123456789abcdef" * 4 in "".join(lines).replace("│", "").replace(" ", "")


@pytest.mark.parametrize(
    ("height", "whole", "last"),
    [(4, 3, ["5 lines more: --once | less"]), (7, 6, ["2 lines more: --once | less"]), (8, 8, []), (30, 8, [])],
)
def test_screen_that_is_too_low_says_how_much_it_leaves_out(height: int, whole: int, last: list[str]) -> None:
    """In a live view, which would cut it off in silence."""
    out = io.StringIO()
    console = Console(width=40, height=height, file=out, color_system=None, force_terminal=True)
    lines = Group(*(Text(f"line {number}") for number in range(8)))

    with Live(Screenful(lines), console=console, screen=True, auto_refresh=False):
        drawn = CONTROL.sub("", out.getvalue())

    seen = [line.strip() for line in drawn.splitlines() if line.strip()]
    assert seen == [*(f"line {number}" for number in range(whole)), *last]

"""Tables that fit screens of any width and height."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

_ENDLESS = 1 << 16  # columns: nothing is wrapped there
_FOLDED_LEAST = 24  # columns, for one whose words may be broken (overflow="fold")


def plain_table() -> Table:
    """A table with a line below its head, and no others."""
    return Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")


@dataclass(frozen=True)
class Fitted:
    """The table; on a narrow screen its widest column is wrapped between words, the others never.

    If even that does not fit, each row is printed as lines: nothing is cut off.
    """

    table: Table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        endless = options.update(width=_ENDLESS)
        sizes = [
            [Measurement.get(console, endless, cell) for cell in (column.header, *column.cells)]
            for column in self.table.columns
        ]
        widths = [max(cell.maximum for cell in cells) for cells in sizes]
        spare = options.max_width - Measurement.get(console, endless, self.table).maximum
        if spare >= 0:
            yield self.table
            return
        widest = widths.index(max(widths))
        least = max(cell.minimum for cell in sizes[widest])
        if self.table.columns[widest].overflow == "fold":
            least = min(least, _FOLDED_LEAST)
        if self.table.columns[widest].no_wrap or widths[widest] + spare < least:
            yield from _lines(console, self.table)
        else:
            yield _wrapping_only(self.table, widest)


@dataclass(frozen=True)
class Screenful:
    """The content of a live view: as much as there is room for. The last line says how much more there is."""

    content: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self.content, options.update(height=None), pad=False)
        room = options.max_height
        shown = len(lines) if len(lines) <= room else max(room - 1, 0)
        for line in lines[:shown]:
            yield from line
            yield Segment.line()
        if left_out := len(lines) - shown:
            yield Text(f"{left_out} lines more: --once | less", "dim", no_wrap=True, overflow="ellipsis")


def _wrapping_only(table: Table, index: int) -> Table:
    shown = copy(table)
    shown.columns = [copy(column) for column in table.columns]
    for number, column in enumerate(shown.columns):
        column.no_wrap = number != index
    return shown


def _lines(console: Console, table: Table) -> Iterator[RenderableType]:
    """A row's first cell, and below it the others with what stands above them; cells without text are left out."""
    if table.title:
        yield _text(console, table.title)
    titles = [" ".join(_text(console, column.header).plain.split()) for column in table.columns]
    for row, cells in zip(table.rows, zip(*(column.cells for column in table.columns), strict=True), strict=True):
        first, *others = (
            Text.assemble((title, "dim"), " " if title else "", text)
            for title, cell in zip(titles, cells, strict=True)
            if (text := _text(console, cell)).plain
        )
        yield first
        yield Padding(Text("  ", style=row.style or "").join(others), (0, 0, 0, 2), expand=False)
    if table.caption:
        yield _text(console, table.caption)


def _text(console: Console, cell: RenderableType) -> Text:
    assert isinstance(cell, (str, Text)), cell
    return console.render_str(cell) if isinstance(cell, str) else cell.copy()

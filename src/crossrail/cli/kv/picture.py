"""Draws a request's timeline with characters."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from crossrail.cli.tables import Fitted
from crossrail.kv.messages import Span
from crossrail.kv.timeline import rows_of

_BAR_MIN, _BAR_MAX = 16, 72  # letters
_BESIDE = 58  # letters that the other columns and the borders take
_DRAWN = ("█", "·")  # something happens, nothing does
_DRAWN_IN_ASCII = ("#", ".")


def show_timeline(spans: Sequence[Span], console: Console) -> None:
    """Prints it: a row for each kind of span, time from left to right."""
    total_s = max((span.begin_s + span.length_s for span in spans), default=0.0) or 1e-9
    width = min(max(console.width - _BESIDE, _BAR_MIN), _BAR_MAX)
    drawn = _DRAWN if console.encoding.lower().startswith("utf") else _DRAWN_IN_ASCII
    table = Table(title=f"where {total_s * 1e3:.1f} ms went")
    table.add_column("what")
    table.add_column("when", no_wrap=True)
    for column in ("from ms", "to ms"):
        table.add_column(column, justify="right")
    for row, its in rows_of(spans).items():
        end_s = max(span.begin_s + span.length_s for span in its)
        what = Text(row if len(its) == 1 else f"{row} x {len(its)}")
        bar = _bar(its, total_s, width, drawn)
        table.add_row(what, bar, f"{min(span.begin_s for span in its) * 1e3:.2f}", f"{end_s * 1e3:.2f}")
    console.print(Fitted(table))


def _bar(spans: Sequence[Span], total_s: float, width: int, drawn: tuple[str, str]) -> str:
    """Each span takes a letter at least."""
    letters = [drawn[1]] * width
    for span in spans:
        first = min(int(span.begin_s / total_s * width), width - 1)
        end = min(max(round((span.begin_s + span.length_s) / total_s * width), first + 1), width)
        letters[first:end] = [drawn[0]] * (end - first)
    return "".join(letters)

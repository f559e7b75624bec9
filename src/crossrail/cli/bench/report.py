"""A benchmark in a terminal: the table, or one line per measure in a log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from crossrail.cli.bench.interval import Interval
from crossrail.cli.bench.spec import Result

_TITLES_WIDTH = 124  # of a terminal that has room for titles
_EXPENDABLE = ("95 %", "limit", "bar")  # columns that go, in this order, where there is no room for all
_BUSY_MAX = 0.1
_VERDICT_STYLE = {"ok": "[green]ok[/green]", "miss": "[red]miss[/red]", "error": "[red]error[/red]", "": ""}


def make_table(results: list[Result], width: int) -> Table:
    """One line a measure: figure, unit, the machine's limit, ratio, its 95 % interval (the figure's where there is no
    limit), bar, verdict. Short names where width is small, and less columns where it is too small for all: names and
    figures are never broken. A path that is not that of most measures is told with the measure.
    """
    wide = width >= _TITLES_WIDTH
    table = Table(title="crossrail bench: medians", title_justify="left", box=box.HEAVY_HEAD if wide else box.SIMPLE)
    paths = Counter(result.path for result in results if result.path)
    usual = paths.most_common(1)[0][0] if paths else ""
    if usual:
        table.caption, table.caption_justify = escape(f"bytes went by {usual}"), "left"
    rows = []
    for result in results:
        label = result.measure.title if wide else result.measure.name
        told = ", ".join(word for word in (result.path if result.path != usual else "", result.note) if word)
        rows.append({"measure": escape(label + (f" ({told})" if told else "")), **_cells(result)})
    titles = _fitting(rows, width)
    for title in titles:
        table.add_column(title, justify="left" if title in ("measure", "unit", "") else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(row[title] for title in titles))
    return table


def _fitting(rows: list[dict[str, str]], width: int) -> list[str]:
    """The columns for which there is room."""
    titles = ["measure", "value", "unit", "limit", "ratio", "95 %", "bar", ""]
    widths = {
        title: max(len(title), *(Text.from_markup(row[title], emoji=False).cell_len for row in rows))
        for title in titles
    }
    for title in _EXPENDABLE:
        if 1 + sum(widths[left] + 3 for left in titles) <= width:  # a space on either side, and lines between
            break
        titles.remove(title)
    return titles


def _cells(result: Result) -> dict[str, str]:
    measure = result.measure
    return {
        "value": figure(result.value),
        "unit": escape(measure.unit),
        "limit": figure(result.limit),
        "ratio": "" if result.ratio is None else f"{ratio_text(result.ratio)}x",
        "95 %": interval_text(result),
        "bar": str(measure.bar) if measure.bar else "",
        "": _VERDICT_STYLE[result.verdict],
    }


def interval_text(result: Result) -> str:
    """ "1.38-1.47x" of the ratio; where there is no limit "4.05-4.31", of the figure. Empty with too few runs."""
    if result.ratio is not None:
        return _ends(result.ratio_interval, ratio_text, "x")
    return _ends(result.value_interval, figure, "")


def ratio_text(value: float) -> str:
    """1.43; small ones, of which 0.00 would say nothing, as 0.0035; an end of a wild interval as 5e+03."""
    if 0.001 <= value < 0.1:
        return f"{value:.2g}"
    return f"{value:.2f}" if 0.1 <= value < 1000 or value == 0 else f"{value:.0e}"


def _ends(interval: Interval | None, text: Callable[[float], str], unit: str) -> str:
    return "" if interval is None else f"{text(interval.low)}-{text(interval.high)}{unit}"


def warn_if_busy(busy: float, console: Console) -> None:
    """busy: busy_share's result from before measuring."""
    if busy > _BUSY_MAX:
        console.print(f"other programs keep these cores {busy:.0%} busy: figures will be noise", style="yellow")


def one_line(result: Result) -> str:
    """One line for a log, where no progress bar is shown."""
    ratio = "" if result.ratio is None else f"{ratio_text(result.ratio)}x"
    words = (
        figure(result.value),
        result.measure.unit,
        ratio,
        interval_text(result),
        result.verdict,
        result.path,
        result.note,
    )
    return f"{result.measure.name:22} {'  '.join(word for word in words if word)}"


def figure(value: float | None) -> str:
    """Three digits that mean something."""
    if value is None:
        return ""
    if value >= 1000:
        return f"{value:,.0f}"
    if 0 < value < 0.01:
        return f"{value:.2g}"
    return f"{value:.1f}" if value >= 100 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"

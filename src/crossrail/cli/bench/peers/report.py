"""The report: three tables and a JSON file."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from crossrail.cli.bench import machine
from crossrail.cli.bench.peers import offers
from crossrail.cli.bench.peers.base import Offer
from crossrail.cli.bench.peers.turn import Outcome
from crossrail.cli.bench.peers.work import Shape
from crossrail.cli.text import format_bytes

_JSON_FORMAT = 1
_UNITS = {"submit": "us", "first-byte": "s", "threads": "threads"}


def unit(figure: str) -> str:
    """The unit in a figure's name."""
    return _UNITS.get(figure, "us" if figure.startswith("message") else "GB/s")


def _title(shape: Shape) -> str:
    size = format_bytes(shape.nbytes).replace(".0", "")
    return f"{size}\nwindow {shape.window}" if shape.kind == "stream" else f"paged\n{size}"


@dataclass(frozen=True)
class Figures:
    """One table: title, and the figures by the titles of their columns. A new line in a title is one."""

    title: str
    columns: dict[str, str]

    def rows(self, outcomes: Sequence[Outcome]) -> Iterator[tuple[str, ...]]:
        """Rows of the outcomes that have any of the figures: the name, then each figure."""
        for outcome in outcomes:
            cells = [figure(outcome.value(name)) for name in self.columns.values()]
            if any(cells):
                yield outcome.offer.name, *cells

    def table(self, outcomes: Sequence[Outcome]) -> Table:
        """The table for a terminal."""
        table = Table(title=self.title, title_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0))
        table.add_column("")
        for column in self.columns:
            table.add_column(column, justify="right", no_wrap=True)
        for name, *cells in self.rows(outcomes):
            table.add_row(escape(name), *cells)
        return table

    def markdown(self, outcomes: Sequence[Outcome]) -> str:
        """The table for documentation."""
        lines = [("", *(column.replace("\n", ", ") for column in self.columns)), ("---", *["---:"] * len(self.columns))]
        text = "\n".join(f"| {' | '.join(line)} |" for line in [*lines, *self.rows(outcomes)])
        return f"{self.title}:\n\n{text}\n"


def all_figures(shapes: Sequence[Shape]) -> list[Figures]:
    """Bytes per second; and microseconds, seconds, threads."""
    bandwidths = {_title(shape): shape.name for shape in shapes if shape.kind != "messages"}
    costs: dict[str, str] = {}
    for shape in shapes:
        if shape.kind == "messages":
            costs[f"{shape.nbytes} B\nmedian us"] = shape.name
            costs[f"{shape.nbytes} B\np99 us"] = f"{shape.name}-p99"
    costs |= {"submit\nus": "submit", "first\nbyte s": "first-byte", "threads": "threads"}
    return [
        Figures("Writes, or sends: GB/s", bandwidths),
        Figures("Small writes with their notification, one way; a submit; start; threads of the library", costs),
    ]


def figure(value: float | None) -> str:
    """Three digits."""
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def write_markdown(path: Path, outcomes: Sequence[Outcome], shapes: Sequence[Shape]) -> None:
    """The tables of figures; the file is replaced when there."""
    path.write_text("\n".join(figures.markdown(outcomes) for figures in all_figures(shapes)))


def about(outcomes: Sequence[Outcome]) -> Table:
    """Notes below the tables: the libraries, what a write is, and what failed."""
    table = Table(title="what was measured", title_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0))
    for column in ("", "kind", "versions", "how"):
        table.add_column(column)
    for outcome in outcomes:
        offer = outcome.offer
        notes = escape(offer.notes)
        for failure in outcome.failures:
            notes += f"\n[red]failed: {escape(failure)}[/red]"
        table.add_row(offer.name, offer.kind, offers.versions(offer).replace(", ", "\n"), notes)
    return table


def listing(known: Sequence[Offer]) -> Table:
    """The text of --list: who can be measured, and how to get the others."""
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    for column in ("", "", "kind", "here", "to install"):
        table.add_column(column)
    for offer in known:
        missing = offers.missing(offer)
        here = f"no {missing}" if missing else offers.versions(offer) or "yes"
        table.add_row(
            offer.name, escape(offer.title), offer.kind, escape(here), escape(offer.install) if missing else ""
        )
    return table


def one_line(outcome_of: Offer, figures: dict[str, float], failures: Sequence[str]) -> str:
    """One line for a log, after a turn."""
    shown = [
        f"{name} {figure(figures[name])} {unit(name)}" for name in ("write-1mib-w16", "message-8b") if name in figures
    ]
    return f"{outcome_of.name:22} {'  '.join([*shown, *(f'failed: {failure}' for failure in failures)])}".rstrip()


def to_json(outcomes: Sequence[Outcome], settings: dict[str, Any], busy: float) -> dict[str, Any]:
    """Everything that is needed to judge the figures, and to repeat them."""
    return {
        "format": _JSON_FORMAT,
        "command": " ".join(["crossrail", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "version": machine.version(),
        "machine": machine.machine(),
        "busy_before": round(busy, 3),
        "settings": settings,
        "peers": [_outcome_json(outcome) for outcome in outcomes],
    }


def _outcome_json(outcome: Outcome) -> dict[str, Any]:
    offer = outcome.offer
    return {
        "name": offer.name,
        "title": offer.title,
        "kind": offer.kind,
        "notes": offer.notes,
        "versions": offers.versions(offer),
        "environment": dict(offer.environment),
        "options": dict(offer.options),
        "failures": outcome.failures,
        "figures": {
            name: {"unit": unit(name), "value": outcome.value(name), "samples": samples}
            for name, samples in outcome.samples.items()
        },
    }

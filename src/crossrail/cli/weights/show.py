"""`crossrail weights show`: a plan in figures and as a heat map, and how it differs from another."""

from __future__ import annotations

from pathlib import Path

import click
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from crossrail._text import plain
from crossrail.cli.bench.plot import check_plot
from crossrail.cli.console import open_console
from crossrail.cli.tables import Fitted
from crossrail.cli.text import format_bytes, format_count, naming
from crossrail.weights import Plan
from crossrail.weights.planning.show import Spread, differences, draw, heat_map, summary

_LINES_MAX = 40
_SHADES_IN_ASCII = str.maketrans("·░▒▓█", ".:+*#")


def print_summary(console: Console, plan: Plan) -> None:
    """Prints a plan's totals."""
    figures = summary(plan)
    console.print(
        f"plan {plan.digest}: {format_count(len(plan.params), 'parameter')}, "
        f"{format_count(len(plan.trainers), 'trainer')} to {format_count(len(plan.targets), 'target')}, "
        f"{format_bytes(figures.nbytes)}"
    )
    table = Table("", "least", "mean", "most", box=box.SIMPLE_HEAD)
    for column in table.columns[1:]:
        column.justify = "right"

    def add(name: str, spread: Spread, *, is_bytes: bool) -> None:
        table.add_row(name, *(format_bytes(int(n)) if is_bytes else f"{n:,.0f}" for n in spread))

    add("a trainer sends", figures.sent, is_bytes=True)
    add("a target receives", figures.received, is_bytes=True)
    add("tasks of a trainer", figures.tasks, is_bytes=False)
    add("writes of a trainer", figures.writes, is_bytes=False)
    console.print(Fitted(table))
    console.print(
        f"a write has typically {format_bytes(figures.typical_bytes)}; trainers fetch "
        f"{format_bytes(figures.gathered_bytes)} of each other; {format_bytes(figures.direct_bytes)} are sent as they "
        f"lie; the largest task needs {format_bytes(figures.tmp_bytes)}"
    )


def show(ctx: click.Context, file: Path, compare: Path | None, image: Path | None) -> None:
    """The command; commands.py has its options and its help."""
    if image is not None:
        check_plot(image, "--draw")
    console = open_console()
    plan = Plan.load(file)
    print_summary(console, plan)
    shades = {} if console.encoding.lower().startswith("utf") else _SHADES_IN_ASCII
    for line in heat_map(plan, columns_max=max(console.width - 4, 16)):
        console.print(f"  {line.translate(shades)}", no_wrap=True)
    if image is not None:
        with naming(image):
            draw(plan, image)
        console.print(f"drawn to {plain(str(image))}", markup=False, soft_wrap=True)
    if compare is not None:
        lines = differences(plan, Plan.load(compare))
        for line in lines[:_LINES_MAX]:
            console.print(escape(line))
        if len(lines) > _LINES_MAX:
            console.print(f"and {len(lines) - _LINES_MAX} more")
        console.print("the plans differ" if lines else "the plans are the same")
        ctx.exit(1 if lines else 0)

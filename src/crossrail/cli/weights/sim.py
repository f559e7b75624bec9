"""`crossrail weights sim`: how long an update takes on simulated NICs, what bounds it, and what a fault costs."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from crossrail._text import plain
from crossrail.cli.bench.plot import check_plot
from crossrail.cli.console import open_console
from crossrail.cli.json_output import is_alone, saved_first
from crossrail.cli.tables import Fitted
from crossrail.cli.text import format_bytes, naming
from crossrail.cli.weights import drawing
from crossrail.cli.weights.cases import Case, as_json, sweep_of
from crossrail.cli.weights.commands import WAYS
from crossrail.cli.weights.common import check_model, cluster_of
from crossrail.cli.weights.simulate import Outcome, Setting
from crossrail.errors import UsageError

_FORMAT = 2


def sim(
    model: str,
    way: str,
    straggler: float,
    slow_link: float,
    rails: int,
    rail_down: bool,
    down_ms: float | None,
    watermark: int,
    sweep: str | None,
    seed: int,
    json_path: Path | None,
    image: Path | None,
    **sizes: int | None,
) -> None:
    """The command; commands.py has its options and its help."""
    check_model(model)
    if image is not None:
        check_plot(image)
    setting = Setting(
        watermark_bytes=watermark, rails=rails, rail_down=rail_down, down_ms=down_ms,
        straggler=straggler, slow_link=slow_link, seed=seed,
    )  # fmt: skip
    case = Case(model, sizes, WAYS[way], setting)
    shown = (
        _one(open_console(stderr=True), case, image)
        if sweep is None
        else _swept(open_console(stderr=True), case, *sweep_of(sweep), image)
    )
    with saved_first(json_path, {"format": _FORMAT, "seed": seed, "model": model, **shown.content}):
        console = open_console(stderr=is_alone(json_path))
        console.print(Fitted(shown.table))
        if image is not None:
            console.print(f"drawn to {plain(str(image))}", markup=False, soft_wrap=True)


class _Shown(NamedTuple):
    """The same figures for programs and for people."""

    content: dict[str, object]
    table: Table


def _one(progress: Console, case: Case, image: Path | None) -> _Shown:
    cluster = cluster_of(case.model, **case.sizes)
    title = f"{case.model}, {cluster.trainers} trainers to {cluster.targets} targets"
    progress.print(title, markup=False, soft_wrap=True)
    with progress.status("planning") as status:
        outcomes = case.run(status.update)
    if image is not None:
        with naming(image):
            drawing.timeline(outcomes, title, image)
    return _Shown({"outcomes": {name: as_json(one) for name, one in outcomes.items()}}, _table(title, outcomes))


def _swept(progress: Console, case: Case, name: str, values: tuple[float, ...], image: Path | None) -> _Shown:
    table = Table(name, "way", "update", "bound", "", "times", box=box.SIMPLE_HEAD, title=f"{case.model}, {name}")
    for column in (table.columns[0], table.columns[2], table.columns[3], table.columns[5]):
        column.justify = "right"
    points: list[tuple[float, dict[str, Outcome]]] = []
    refused: dict[str, str] = {}
    with progress.status("") as status:
        for value in values:
            shown = f"{value:,g}"
            try:
                outcomes = case.at(name, value).run(lambda text, shown=shown: status.update(f"{name} {shown}, {text}"))  # type: ignore[misc]
            except UsageError as error:
                refused[shown] = str(error)
                table.add_row(shown, "", str(error))
                continue
            points.append((value, outcomes))
            for way, one in outcomes.items():
                bound = f"{one.bounds[one.bound] * 1e3:,.0f} ms"
                table.add_row(shown, way, f"{one.total_s * 1e3:,.0f} ms", bound, one.bound, f"{one.over_bound:.2f}")
    if image is not None:
        with naming(image):
            drawing.sweep(points, f"{case.model}: one update", name, image)
    found = [
        {"value": value, "outcomes": {way: as_json(outcome) for way, outcome in outcomes.items()}}
        for value, outcomes in points
    ]
    return _Shown({"sweep": name, "points": found, "refused": refused}, table)


def _table(title: str, outcomes: dict[str, Outcome]) -> Table:
    table = Table("", *outcomes, title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in table.columns[1:]:
        column.justify = "right"

    def add(name: str, *cells: str) -> None:
        table.add_row(name, *cells)

    found = outcomes.values()
    add("update", *(f"{one.total_s * 1e3:,.0f} ms" for one in found))
    add("of it waiting for others", *(f"{one.waited_s * 1e3:,.0f} ms" for one in found))
    add("bytes", *(format_bytes(one.nbytes) for one in found))
    add("writes", *(f"{one.writes:,}" for one in found))
    add("read by trainers from others", *(format_bytes(one.read_bytes) for one in found))
    table.add_section()
    for name in next(iter(found)).bounds:
        add(name, *(f"{one.bounds[name] * 1e3:,.0f} ms" for one in found))
    table.add_section()
    add("bound", *(one.bound for one in found))
    add("times the bound", *(f"{one.over_bound:.2f}" for one in found))
    return table

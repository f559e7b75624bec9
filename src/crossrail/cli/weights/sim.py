"""`crossrail weights sim`: how long an update takes on simulated NICs, what bounds it, and what a fault costs."""

from __future__ import annotations

from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from crossrail._text import plain
from crossrail.cli.bench.plot import check_plot
from crossrail.cli.console import open_console
from crossrail.cli.json_output import is_alone, write_json
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
    console = open_console(stderr=is_alone(json_path))
    content = _one(console, case, image) if sweep is None else _swept(console, case, *sweep_of(sweep), image)
    write_json(json_path, {"format": _FORMAT, "seed": seed, "model": model, **content})


def _one(console: Console, case: Case, image: Path | None) -> dict[str, object]:
    cluster = cluster_of(case.model, **case.sizes)
    title = f"{case.model}, {cluster.trainers} trainers to {cluster.targets} targets"
    console.print(title)
    with console.status("planning") as status:
        outcomes = case.run(status.update)
    _print(console, outcomes)
    if image is not None:
        with naming(image):
            drawing.timeline(outcomes, title, image)
        console.print(f"drawn to {plain(str(image))}", markup=False, soft_wrap=True)
    return {"outcomes": {name: as_json(outcome) for name, outcome in outcomes.items()}}


def _swept(console: Console, case: Case, name: str, values: tuple[float, ...], image: Path | None) -> dict[str, object]:
    table = Table(name, "way", "update", "bound", "", "times", box=box.SIMPLE_HEAD, title=f"{case.model}, {name}")
    for column in (table.columns[0], table.columns[2], table.columns[3], table.columns[5]):
        column.justify = "right"
    points: list[tuple[float, dict[str, Outcome]]] = []
    refused: dict[str, str] = {}
    with console.status("") as status:
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
    console.print(Fitted(table))
    if image is not None:
        with naming(image):
            drawing.sweep(points, f"{case.model}: one update", name, image)
        console.print(f"drawn to {plain(str(image))}", markup=False, soft_wrap=True)
    found = [
        {"value": value, "outcomes": {way: as_json(outcome) for way, outcome in outcomes.items()}}
        for value, outcomes in points
    ]
    return {"sweep": name, "points": found, "refused": refused}


def _print(console: Console, outcomes: dict[str, Outcome]) -> None:
    table = Table("", *outcomes, box=box.SIMPLE_HEAD)
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
    console.print(Fitted(table))

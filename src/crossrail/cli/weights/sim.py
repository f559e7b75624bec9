"""`crossrail weights sim`: how long an update takes on simulated NICs, what bounds it, and what a fault costs."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich import box
from rich.console import Console
from rich.table import Table

from crossrail.cli.text import OutputFile, format_bytes, size
from crossrail.cli.weights.common import check_model, cluster_of, cluster_options
from crossrail.cli.weights.simulate import Outcome, Setting, simulate
from crossrail.weights import PlanOptions, make_plan
from crossrail.weights.models import MODELS, inventories

_FORMAT = 1


@click.command()
@click.argument("model", default="kimi-k2")
@cluster_options
@click.option(
    "--way",
    type=click.Choice(["paper", "needed", "both"]),
    default="both",
    show_default=True,
    help="paper: every rank gathers all; needed: what trainers hold is prepared where it lies.",
)
@click.option("--straggler", default=1.0, show_default=True, help="Trainer 0 takes so many times longer.")
@click.option("--rails", default=1, show_default=True, help="Rails of each GPU, which share 400 Gb/s.")
@click.option("--rail-down", is_flag=True, help="Trainer 0 loses a rail at the beginning.")
@click.option("--watermark", type=size(1 << 20, 1 << 40), default="8G", show_default=True)
@click.option("--seed", default=1, show_default=True)
@click.option("--json", "file", type=OutputFile(), help="Also write the figures here.")
def sim(
    model: str,
    way: str,
    straggler: float,
    rails: int,
    rail_down: bool,
    watermark: int,
    seed: int,
    file: Path | None,
    **sizes: int | None,
) -> None:
    """Simulate one update of MODEL (kimi-k2, deepseek-v3, qwen3-235b): real plan, real engines, no byte.

    What GPUs do costs what one rank of the paper's Table 5 took for it; the wire is ConnectX-7's of its Table 2.
    """
    check_model(model)
    cluster = cluster_of(model, **sizes)
    console = Console()
    console.print(f"{model}, {cluster.trainers} trainers to {cluster.targets} targets")
    trainers, targets = inventories(MODELS[model], cluster)
    outcomes: dict[str, Outcome] = {}
    for name in ("paper", "needed") if way == "both" else (way,):
        collective = name == "paper"
        setting = Setting(
            collective=collective, watermark_bytes=watermark, rails=rails, rail_down=rail_down,
            straggler=straggler, seed=seed,
        )  # fmt: skip
        with console.status(f"{name}: planning"):
            plan = make_plan(trainers, targets, PlanOptions(gather="full" if collective else "needed"))
        with console.status(f"{name}: simulating {len(plan.writes):,} writes"):
            outcomes[name] = simulate(plan, trainers, targets, setting)
    _print(console, outcomes)
    if file is not None:
        content = {name: outcome._asdict() for name, outcome in outcomes.items()}
        file.write_text(json.dumps({"format": _FORMAT, "model": model, "outcomes": content}, indent=1))


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
    table.add_section()
    for name in next(iter(found)).bounds:
        add(name, *(f"{one.bounds[name] * 1e3:,.0f} ms" for one in found))
    table.add_section()
    add("bound", *(one.bound for one in found))
    add("times the bound", *(f"{one.over_bound:.2f}" for one in found))
    console.print(table)

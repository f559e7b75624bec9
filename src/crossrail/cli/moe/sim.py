"""`crossrail moe sim`: what dispatch and combine take on simulated NICs, beside what was published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.table import Table

from crossrail.cli.console import open_console
from crossrail.cli.moe.published import CLUSTERS, FIGURES, TOKENS, Figure, cluster_of
from crossrail.cli.moe.simulate import Outcome, Setting, simulate
from crossrail.cli.tables import Fitted
from crossrail.cli.text import OutputFile

_FORMAT = 1
_RANKS = (8, 16, 32, 64)


@click.command()
@click.option(
    "--cluster", type=click.Choice([*CLUSTERS, "both"]), default="both", show_default=True, help="NICs of the cluster."
)
@click.option(
    "--shape",
    type=click.Choice([*TOKENS, "both"]),
    default="both",
    show_default=True,
    help="Tokens per rank: few or many.",
)
@click.option(
    "--ranks",
    type=click.IntRange(1, 256),
    multiple=True,
    help="GPUs, in nodes of 8; may be repeated [default: 8 to 64].",
)
@click.option(
    "--rounds",
    type=click.IntRange(1, 100),
    default=1,
    show_default=True,
    help="Rounds of each case, each with different routes.",
)
@click.option(
    "--private-tokens",
    default=256,
    show_default=True,
    help="Tokens sent before the routes are known; the default is that of the paper's benchmark.",
)
@click.option("--node-sums", is_flag=True, help="Each node sums what it returns, as AllToAll does.")
@click.option("--seed", default=1, show_default=True, help="Seed of the routes.")
@click.option("--json", "file", type=OutputFile(), help="Also write the figures to this file.")
def sim(
    cluster: str,
    shape: str,
    ranks: tuple[int, ...],
    rounds: int,
    private_tokens: int,
    node_sums: bool,
    seed: int,
    file: Path | None,
) -> None:
    """Simulate rounds of dispatch and combine: real layouts, proxies and engines, but no data and no GPU.

    The wire is that of Table 2 of arXiv 2510.27656; the kernels are those of its Figure 10 and of data sheets.
    Nothing is fitted to the published figures; docs/moe.md says what that leaves open.
    """
    console = open_console()
    found: list[dict[str, Any]] = []
    shapes = tuple(TOKENS) if shape == "both" else (shape,)
    clusters = tuple(CLUSTERS) if cluster == "both" else (cluster,)
    total = len(shapes) * len(clusters) * len(ranks or _RANKS)
    for one in shapes:
        table = _table(f"{one}: {TOKENS[one]} tokens of each rank; medians of all ranks, in us")
        for name in clusters:
            for count in ranks or _RANKS:
                setting = Setting(cluster_of(name), count, TOKENS[one], rounds, private_tokens, node_sums, seed)
                step = f"{len(found) + 1} of {total}: {one}, {name}, {count} ranks"
                if not console.is_terminal:
                    console.print(step)
                with console.status(step):
                    outcome = simulate(setting)
                figure = FIGURES[one][name].get(count)
                _add(table, name, count, outcome, figure)
                found.append(_record(setting, one, name, outcome, figure))
            table.add_section()
        console.print(Fitted(table))
    if file is not None:
        file.write_text(json.dumps({"format": _FORMAT, "results": found}, indent=1))


def _table(title: str) -> Table:
    table = Table("", "ranks", title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for column in ("dispatch", "paper", "ratio", "combine", "paper", "ratio"):
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _add(table: Table, cluster: str, ranks: int, outcome: Outcome, figure: Figure | None) -> None:
    cells = [f"{outcome.dispatch_us:,.0f}", "", "", f"{outcome.combine_us:,.0f}", "", ""]
    if figure is not None:
        cells[1:3] = f"{figure.dispatch:,.0f}", f"{outcome.dispatch_us / figure.dispatch:.2f}"
        cells[4:6] = f"{figure.combine:,.0f}", f"{outcome.combine_us / figure.combine:.2f}"
    table.add_row(cluster, str(ranks), *cells)


def _record(setting: Setting, shape: str, cluster: str, outcome: Outcome, figure: Figure | None) -> dict[str, Any]:
    return {
        "shape": shape,
        "cluster": cluster,
        "ranks": setting.ranks,
        "node_sums": setting.node_sums,
        "dispatch_us": outcome.dispatch_us,
        "combine_us": outcome.combine_us,
        "dispatch_bytes": outcome.dispatch_bytes,
        "combine_bytes": outcome.combine_bytes,
        "published": None if figure is None else figure._asdict(),
    }

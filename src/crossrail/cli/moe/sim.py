"""`crossrail moe sim`: the time of dispatch and combine on simulated NICs, next to the published figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from crossrail.cli.console import open_console
from crossrail.cli.json_output import is_alone, saved_first
from crossrail.cli.moe.published import CLUSTERS, FIGURES, TOKENS, Figure
from crossrail.cli.moe.simulate import Outcome, Setting, simulate
from crossrail.cli.tables import Fitted

_FORMAT = 1
_RANKS = (8, 16, 32, 64)


def sim(
    cluster: str,
    shape: str,
    ranks: tuple[int, ...],
    rounds: int,
    private_tokens: int,
    node_sums: bool,
    seed: int,
    json_path: Path | None,
) -> None:
    """The command; commands.py has its options and its help."""
    progress = open_console(stderr=True)
    found: list[dict[str, Any]] = []
    tables = []
    shapes = tuple(TOKENS) if shape == "both" else (shape,)
    clusters = tuple(CLUSTERS) if cluster == "both" else (cluster,)
    total = len(shapes) * len(clusters) * len(ranks or _RANKS)
    for one in shapes:
        table = _table(f"{one}: {TOKENS[one]} tokens of each rank; medians of all ranks, in us")
        for name in clusters:
            for count in ranks or _RANKS:
                setting = Setting(CLUSTERS[name], count, TOKENS[one], rounds, private_tokens, node_sums, seed)
                step = f"{len(found) + 1} of {total}: {one}, {name}, {count} ranks"
                if not progress.is_terminal:
                    progress.print(step)
                with progress.status(step):
                    outcome = simulate(setting)
                figure = FIGURES[one][name].get(count)
                _add(table, name, count, outcome, figure)
                found.append(_record(setting, one, name, outcome, figure))
            table.add_section()
        tables.append(table)
    with saved_first(json_path, {"format": _FORMAT, "seed": seed, "results": found}):
        console = open_console(stderr=is_alone(json_path))
        for table in tables:
            console.print(Fitted(table))


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

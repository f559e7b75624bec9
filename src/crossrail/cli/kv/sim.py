"""`crossrail kv sim`: the time of a layer's KV transfer on simulated NICs, next to the published figures."""

from __future__ import annotations

from pathlib import Path

from rich import box
from rich.table import Table

from crossrail.cli.console import open_console
from crossrail.cli.json_output import is_alone, saved_first
from crossrail.cli.kv.published import ROWS
from crossrail.cli.kv.simulate import FITTED, WAYS, layer_ms
from crossrail.cli.tables import Fitted

_FORMAT = 1


def sim(layers: int, seed: int, json_path: Path | None) -> None:
    """The command; commands.py has its options and its help."""
    table = Table("tokens", title="a layer's transfer, in ms", box=box.SIMPLE_HEAD, title_justify="left")
    for column in ("pages", "paper", *(way.name for way in WAYS), "fitted/paper"):
        table.add_column(column, justify="right", no_wrap=True)
    found = []
    for tokens, row in ROWS.items():
        simulated = {way.name: layer_ms(tokens, row, way, layers, seed) for way in WAYS}
        cells = (f"{row.pages:,}", f"{row.transfer_ms:.3f}", *(f"{took_ms:.3f}" for took_ms in simulated.values()))
        table.add_row(f"{tokens:,}", *cells, f"{simulated[FITTED.name] / row.transfer_ms:.3f}")
        found.append({"tokens": tokens, "pages": row.pages, "published_ms": row.transfer_ms, "simulated_ms": simulated})
    with saved_first(json_path, {"format": _FORMAT, "seed": seed, "layers": layers, "results": found}):
        open_console(stderr=is_alone(json_path)).print(Fitted(table))

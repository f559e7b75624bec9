"""`crossrail kv top`."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from typing import Any

import click
from rich.console import Console
from rich.live import Live
from rich.table import Table

from crossrail.errors import CrossrailError

_TIMEOUT_S = 3.0


@click.command()
@click.argument("url", default="http://127.0.0.1:8000")
@click.option("--once", is_flag=True, help="Show it once, and end.")
@click.option("--every-s", default=1.0, show_default=True)
def top(url: str, once: bool, every_s: float) -> None:
    """Show the nodes of the router at URL: what they do, and how many pages they have."""
    console = Console()
    if once:
        console.print(_table(_ask(url)))
        return
    with Live(_table(_ask(url)), console=console, screen=True) as live:
        while True:
            time.sleep(every_s)
            live.update(_table(_ask(url)))


def _ask(url: str) -> dict[str, Any]:
    try:
        with urllib.request.urlopen(url.rstrip("/") + "/v1/nodes", timeout=_TIMEOUT_S) as response:
            answer: dict[str, Any] = json.loads(response.read())
            return answer
    except (urllib.error.URLError, TimeoutError, ValueError) as error:
        raise CrossrailError(f"no router answers at {url}: {error}") from None


def _table(state: dict[str, Any]) -> Table:
    table = Table(title=f"router {state['router']}: {state['requests']} requests under way")
    for column, justify in (
        ("node", "left"), ("role", "left"), ("requests", "right"), ("tokens to do", "right"), ("pages free", "right"),
        ("quarantined", "right"), ("heard of", "right"), ("", "left"),
    ):  # fmt: skip
        table.add_column(column, justify=justify)  # type: ignore[arg-type]  # rich's own literals
    for node in state["nodes"]:
        table.add_row(
            node["node"],
            node["role"],
            str(node["requests"]),
            str(node["queued_tokens"]),
            f"{node['pages_free']} of {node['pages_total']}",
            str(node["pages_quarantined"]),
            f"{node['heard_s_ago']:.1f} s ago",
            "draining" if node["draining"] else "",
        )
    return table

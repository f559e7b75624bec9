"""`crossrail kv top`."""

from __future__ import annotations

import http.client
import json
from typing import Any

import click
from rich.table import Table
from rich.text import Text

from crossrail._text import plain
from crossrail.cli.console import open_console
from crossrail.cli.live_view import patience_option, show_live
from crossrail.cli.option_types import FloatRange, url_of
from crossrail.cli.tables import Fitted
from crossrail.errors import CrossrailError
from crossrail.observe.http import open_url

_TIMEOUT_S = 3.0
_ANSWER_BYTES_MAX = 64 << 20


@click.command()
@click.argument("url", type=url_of, default="http://127.0.0.1:8000")
@click.option("--once", is_flag=True, help="Show it once and exit; the default if the output is not a terminal.")
@click.option(
    "--every-s",
    type=FloatRange(min=0.05, max=3600),
    default=1.0,
    show_default=True,
    help="Seconds between updates.",
)
@patience_option
def top(url: str, once: bool, every_s: float, patience_s: float) -> None:
    """Show the nodes of the router at URL: what they do, and how many pages they have.

    HOST:PORT is enough as a URL. Ctrl-C ends it.
    """
    console = open_console()
    if once or not console.is_terminal or console.is_dumb_terminal:
        console.print(Fitted(_table(_ask(url))))
        return
    show_live(console, Fitted(_table(_ask(url))), lambda: Fitted(_table(_ask(url))), every_s, patience_s)


def _ask(url: str) -> dict[str, Any]:
    try:
        with open_url(url.rstrip("/") + "/v1/nodes", _TIMEOUT_S) as response:
            answer: Any = json.loads(response.read(_ANSWER_BYTES_MAX))
    except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
        reason = getattr(error, "reason", None) or error
        why = getattr(reason, "strerror", None) or str(reason) or type(error).__name__
        raise CrossrailError(f"no router answers at {url}: {why}") from None
    if not isinstance(answer, dict) or not {"router", "requests", "nodes"} <= answer.keys():
        raise CrossrailError(f"no router answers at {url}, but something else: {str(answer)[:80]}")
    return answer


def _table(state: dict[str, Any]) -> Table:
    table = Table(title=Text(f"router {plain(state['router'])}: {state['requests']} requests under way"))
    for column, justify in (
        ("node", "left"), ("role", "left"), ("requests", "right"), ("tokens to do", "right"), ("pages free", "right"),
        ("quarantined", "right"), ("heard of", "right"), ("", "left"),
    ):  # fmt: skip
        table.add_column(column, justify=justify)  # type: ignore[arg-type]  # rich's own literals
    for node in state["nodes"]:
        table.add_row(
            Text(plain(node["node"])),
            node["role"],
            str(node["requests"]),
            str(node["queued_tokens"]),
            f"{node['pages_free']} of {node['pages_total']}",
            str(node["pages_quarantined"]),
            f"{node['heard_s_ago']:.1f} s ago",
            "draining" if node["draining"] else "its model hangs" if node.get("hangs") else "",
        )
    return table

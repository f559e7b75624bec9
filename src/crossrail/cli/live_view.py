"""A picture in a terminal that is redrawn until Ctrl-C, and outlives a restart of what it shows."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NoReturn

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from crossrail.cli.option_types import seconds
from crossrail.cli.tables import Screenful
from crossrail.errors import CrossrailError

patience_option = click.option(
    "--patience-s",
    type=seconds(),
    default=60.0,
    show_default=True,
    help="Seconds to keep asking one that has answered before, for example while it restarts.",
)


def show_live(
    console: Console, first: RenderableType, look: Callable[[], RenderableType], every_s: float, patience_s: float
) -> NoReturn:
    """Draws `first`, then every every_s what look() returns. While look() raises CrossrailError: the reason, and the
    latest picture; after patience_s of that, raises it.
    """
    picture = first
    drawn_s = time.monotonic()
    with Live(Screenful(picture), console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(every_s)
            shown: RenderableType
            try:
                shown = picture = look()
                drawn_s = time.monotonic()
            except CrossrailError as error:
                silent_s = time.monotonic() - drawn_s
                if silent_s > patience_s:
                    raise
                shown = Group(Text(f"as it was {silent_s:.0f} s ago: {error}", "red"), picture)
            live.update(Screenful(shown), refresh=True)

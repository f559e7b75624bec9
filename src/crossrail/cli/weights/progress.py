"""A progress bar of an update, stage by stage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TimeElapsedColumn

from crossrail.cli.console import text_column
from crossrail.cli.text import format_bytes
from crossrail.weights.services.controller import OnProgress, Stage

_WORDS: dict[Stage, str] = {
    "plan": "planning",
    "ready": "making tasks ready",
    "open": "waiting for readers",
    "write": "writing",
}


@contextmanager
def showing_update(console: Console, title: str) -> Iterator[OnProgress]:
    """Yields the callback for WeightController.update(on_progress=). The bar disappears at the end."""
    columns = (
        text_column("{task.description}"),
        BarColumn(),
        text_column("{task.fields[amount]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task(title, total=None, amount="")

        def show(stage: Stage, done: int, whole: int) -> None:
            amount = f"{format_bytes(done)} of {format_bytes(whole)}" if stage == "write" else f"{done:,} of {whole:,}"
            progress.update(
                bar,
                description=f"{title}: {_WORDS[stage]}",
                completed=done,
                total=None if stage in ("plan", "open") else whole,
                amount="" if stage == "plan" else amount,
            )

        yield show

"""`crossrail trace`: shows a flight recording as a table, or converts it to a Chrome trace."""

from __future__ import annotations

from pathlib import Path

import click
from rich.table import Table
from rich.text import Text

from crossrail.cli.console import in_one_piece, open_console
from crossrail.cli.option_types import IntRange, OutputFile
from crossrail.cli.tables import Fitted, plain_table
from crossrail.errors import UsageError
from crossrail.flight import COLUMNS, FlightDump, FlightEntry, read_dump, row_of
from crossrail.observe.chrome import ChromeTrace
from crossrail.observe.flight import select, write_chrome

_LAST_SHOWN = 200
_RIGHT = ("s", "bytes", "count")
_STYLES = {
    "failed": "red",
    "lost": "red",
    "cancelled": "yellow",
    "withdrawn": "yellow",
    "frozen": "yellow",
    "done": "green",
    "moved": "green",
    "arrived": "cyan",
    "received": "cyan",
}


def _table(dump: FlightDump, entries: list[FlightEntry]) -> Table:
    table = plain_table()
    for header in COLUMNS:
        table.add_column(header, justify="right" if header in _RIGHT else "left", no_wrap=header != "peer")
    for entry in entries:
        table.add_row(*(Text(cell) for cell in row_of(dump, entry)), style=_STYLES.get(entry.state, ""))
    return table


@click.command("trace")
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--peer", help="Only events of the peer with this name.")
@click.option(
    "--rail", help="Only one rail: tcp:0, or 0 for rail 0 of every transport; engine: events that belong to no rail."
)
@click.option(
    "--last",
    type=IntRange(min=1),
    help=f"Only the latest N events [default: {_LAST_SHOWN} in the table, all with --chrome].",
)
@click.option(
    "--chrome",
    type=OutputFile(),
    help="Write a Chrome trace to this file instead, for ui.perfetto.dev or chrome://tracing.",
)
@in_one_piece()
def command(files: tuple[Path, ...], peer: str | None, rail: str | None, last: int | None, chrome: Path | None) -> None:
    """Show a flight recording: from engine.dump(path), crossrail.dump_on_signal(), a watchdog or a crash.

    Times are seconds before the recording was written. With --chrome, the recordings of several engines that exchange
    data make one picture, with arrows from submits to the counts at the receiver.
    """
    if len(files) > 1 and chrome is None:
        raise UsageError(f"{len(files)} recordings make one picture with --chrome; a table has one")
    if len(files) > 1 and (peer is not None or rail is not None):
        raise UsageError("--peer and --rail choose from one recording")
    if chrome is not None and chrome.exists() and any(chrome.samefile(file) for file in files):
        raise UsageError(f"--chrome {chrome} is the recording itself: choose another file")
    dumps = [read_dump(file) for file in files]
    if chrome is not None:
        parts = [(dump, select(dump, peer=peer, rail=rail, last=last)) for dump in dumps]
        with ChromeTrace.create(chrome) as trace:
            write_chrome(parts, trace)
        count = sum(len(entries) for _, entries in parts)
        click.echo(f"{count} entries in {chrome}: open it at https://ui.perfetto.dev")
        return
    (dump,) = dumps
    entries = select(dump, peer=peer, rail=rail, last=last or _LAST_SHOWN)
    console = open_console()
    for line in dump.summary():
        console.print(Text(line), soft_wrap=True)
    console.print()
    console.print(Fitted(_table(dump, entries)))
    console.print(Text(f"\n{len(entries)} of {len(dump.entries)} entries", "dim"))

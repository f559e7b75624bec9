"""The one place that opens a rich console, so that all commands print alike."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import IO

from rich.console import Console, ConsoleDimensions
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TransferSpeedColumn

_PIPE_COLUMNS = 140
_DUMB_COLUMNS = 80
_DUMB_LINES = 25  # which nobody asks for: what is below the screen cannot be redrawn


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Without this rich ends the program by SystemExit, past all who save what was found so far."""
        raise  # the BrokenPipeError: rich calls this as it handles one


def open_console(
    *, stderr: bool = False, quiet: bool = False, file: IO[str] | None = None, pipe_columns: int = _PIPE_COLUMNS
) -> Console:
    """A console on standard output, or on `file`. Names and paths are shown as they are: no `:word:` becomes a picture,
    no number a colour. Markup is interpreted: text from outside must be escaped, or printed with markup=False.

    Pipes and files, which have no width, get pipe_columns, unless COLUMNS says otherwise. COLUMNS=0 means nothing:
    shells without a terminal set it.
    """
    environment = {name: value for name, value in os.environ.items() if not _says_nothing(name, value)}
    console = _Console(stderr=stderr, quiet=quiet, file=file, emoji=False, highlight=False, _environ=environment)
    if not console.is_terminal and "COLUMNS" not in environment:
        console.width = pipe_columns
    elif console.is_dumb_terminal:
        console.size = ConsoleDimensions(_columns_of(console.file, environment), _DUMB_LINES)
    return console


def _columns_of(terminal: IO[str], environment: dict[str, str]) -> int:
    """The width of a terminal without a cursor, which rich always assumes to be 80. 80 if the terminal does not say."""
    if "COLUMNS" in environment:
        return int(environment["COLUMNS"])
    with contextlib.suppress(OSError, ValueError):  # ValueError: no file of the system's
        return os.get_terminal_size(terminal.fileno()).columns or _DUMB_COLUMNS
    return _DUMB_COLUMNS


def text_column(template: str) -> TextColumn:
    """A progress bar's text, without markup: a file's name may look like markup."""
    return TextColumn(template, markup=False)


def bytes_progress(console: Console) -> Progress:
    """Bars of bytes and their speed, on a terminal; elsewhere nothing."""
    columns = (text_column("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    return Progress(*columns, console=console, disable=console.quiet or not console.is_terminal)


def count_progress(console: Console, *more: TextColumn) -> Progress:
    """A bar of things done, on a terminal, which disappears at the end; elsewhere nothing."""
    columns = (text_column("{task.description}"), BarColumn(), MofNCompleteColumn(), *more)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


@contextlib.contextmanager
def in_one_piece() -> Iterator[None]:
    """Output printed meanwhile reaches a pipe or a file at the end, all at once.

    A reader that wants only the first lines (`| head -1`) then does not break the command, whose exit status stays its
    own. For short answers that are ready within moments.
    """
    out = sys.stdout
    if not isinstance(out, io.TextIOWrapper) or out.isatty():
        yield
        return
    out.flush()
    held = io.TextIOWrapper(io.BytesIO(), out.encoding, out.errors, write_through=True)
    sys.stdout = held
    try:
        yield
    finally:
        sys.stdout = out
        if printed := held.detach().getvalue():  # unbuffered, nothing is written too, and fails where there is no room
            out.buffer.write(printed)
        out.flush()


def _says_nothing(name: str, value: str) -> bool:
    return name in ("COLUMNS", "LINES") and not (value.isdecimal() and int(value) > 0)

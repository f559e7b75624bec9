"""The one place that opens a rich console, so that all commands print alike."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import IO

from rich.console import Console, ConsoleDimensions
from rich.progress import TextColumn

_PIPE_COLUMNS = 140
_DUMB_COLUMNS = 80
_DUMB_LINES = 25  # which nobody asks for: what is below the screen cannot be drawn anew


def open_console(
    *, stderr: bool = False, quiet: bool = False, file: IO[str] | None = None, pipe_columns: int = _PIPE_COLUMNS
) -> Console:
    """Of standard output, or of `file`. Names and paths stay as they are: no `:word:` becomes a picture, no number a
    colour. Markup is obeyed: what comes from outside is escaped, or printed with markup=False.

    A pipe or a file, which have no width, have pipe_columns, unless COLUMNS says otherwise. 0 says nothing, as shells
    without a terminal set it.
    """
    environment = {name: value for name, value in os.environ.items() if not _says_nothing(name, value)}
    console = Console(stderr=stderr, quiet=quiet, file=file, emoji=False, highlight=False, _environ=environment)
    if not console.is_terminal and "COLUMNS" not in environment:
        console.width = pipe_columns
    elif console.is_dumb_terminal:
        console.size = ConsoleDimensions(_columns_of(console.file, environment), _DUMB_LINES)
    return console


def _columns_of(terminal: IO[str], environment: dict[str, str]) -> int:
    """Of a terminal without a cursor, which rich takes to be 80 wide whatever it is. One that does not say is so."""
    if "COLUMNS" in environment:
        return int(environment["COLUMNS"])
    with contextlib.suppress(OSError, ValueError):  # ValueError: no file of the system's
        return os.get_terminal_size(terminal.fileno()).columns or _DUMB_COLUMNS
    return _DUMB_COLUMNS


def text_column(template: str) -> TextColumn:
    """A progress bar's text, without markup: a file's name may look like markup."""
    return TextColumn(template, markup=False)


@contextlib.contextmanager
def in_one_piece() -> Iterator[None]:
    """What is printed meanwhile reaches a pipe or a file at the end, at once.

    A reader that wants the first lines only (`| head -1`) does not end the command so, and its exit status is its own.
    For answers that are short, and there within moments.
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

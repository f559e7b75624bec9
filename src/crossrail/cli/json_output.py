"""`--json [FILE]`, which means the same in every command that has something for programs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click

from crossrail.cli.option_types import OutputFile
from crossrail.cli.text import naming

_Command = TypeVar("_Command", bound=Callable[..., Any])
_STANDARD_OUTPUT = Path("-")


class _JsonFile(OutputFile):
    """A file, or "-"."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return _STANDARD_OUTPUT if str(value) == "-" else super().convert(value, param, ctx)


def json_option(what: str) -> Callable[[_Command], _Command]:
    """The option, as the argument `json_path`: None, a file, or what is_alone() says. what: what it writes."""
    return click.option(
        "--json",
        "json_path",
        type=_JsonFile(),
        is_flag=False,
        flag_value=str(_STANDARD_OUTPUT),
        metavar="[FILE]",
        help=f"Write {what} as JSON: to FILE, besides what is shown, or without FILE alone to standard output.",
    )


def is_alone(json_path: Path | None) -> bool:
    """Whether the JSON is all that belongs to standard output. What people are told then goes to standard error."""
    return json_path == _STANDARD_OUTPUT


@contextmanager
def saved_first(json_path: Path | None, content: Any) -> Iterator[None]:
    """write_json(), and then what the block shows: a reader that takes one line of it, as `| head -1`, costs nobody the
    file. Where the file cannot be written, the block runs all the same: what took long to find is at least seen.
    """
    try:
        write_json(json_path, content)
    finally:
        yield


def write_json(json_path: Path | None, content: Any) -> None:
    """Writes it to where the option says, as one JSON value; replaces a file that is there. None: does nothing."""
    if json_path is None:
        return
    text = json.dumps(content, indent=1)
    if is_alone(json_path):
        click.echo(text)
        return
    with naming(json_path):
        json_path.write_text(text + "\n")

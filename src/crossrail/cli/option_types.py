"""The types of options, the same in every command: sizes, times, cores, rails, URLs, files to write."""

from __future__ import annotations

import math
import os
import re
import tempfile
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from crossrail.cli.text import format_bytes

RAILS_MAX = 16
_SIZE = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>[kmgtp]?)(i?b)?", re.IGNORECASE)
_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}


class IntRange(click.IntRange):
    """click's calls itself "integer range" in help, and in complaints about what is none."""

    name = "whole number"

    def get_metavar(self, *_: Any, **__: Any) -> str:  # click 8.2 and later pass a context, too
        return "N"


def size(at_least: int, at_most: int) -> Callable[[str], int]:
    """The type of an option such as `64K`, `1.5GiB` or `4096`: bytes, within bounds. Units are powers of 1024."""

    def size(text: str) -> int:
        match = _SIZE.fullmatch(text.strip())
        if match is None:
            raise click.BadParameter(f"{text!r} is not a size; write for example 4096, 64K or 1.5G")
        nbytes = float(match["number"]) * 1024 ** _UNITS[match["unit"].lower()]
        if not at_least <= nbytes <= at_most:
            bounds = f"{format_bytes(at_least)} to {format_bytes(at_most)}"
            raise click.BadParameter(f"{text!r} is outside {bounds}")
        return int(nbytes)

    return size  # click shows the function's name


class FloatRange(click.FloatRange):
    """Likewise; and click's lets NaN through, which is within all bounds."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value} is not in the range {self._describe_range()}.", param, ctx)
        return number


def seconds() -> FloatRange:
    """The type of an option that is a time: not 0, with which services would do nothing else, at most a month."""
    return FloatRange(0.001, 30 * 86400)


class OutputFile(click.Path):
    """The type of an option that names an output file: obstacles are reported before the work begins.

    is_replaced: it will be replaced or removed, which must not happen to a device or a pipe of that name.
    """

    def __init__(self, *, is_replaced: bool = False) -> None:
        super().__init__(dir_okay=False, writable=True, path_type=Path)
        self._is_replaced = is_replaced

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if str(path).startswith("--"):  # `bench --json --only tcp`: where --json is a flag, users write it like that
            self.fail(
                f"{str(path)!r} is an option where the name of a file belongs (./{path} if it is a name)", param, ctx
            )
        folder = path.absolute().parent
        try:
            if not (_exists(folder) and folder.is_dir()):
                self.fail(f"{str(path)!r}: there is no folder {str(folder)!r}", param, ctx)
            if not _exists(path):
                _try_to_write_in(folder)
            elif path.is_file():
                os.close(os.open(path, os.O_WRONLY))
            elif self._is_replaced:
                self.fail(f"{str(path)!r}: a device or a pipe, must be a file: it is removed at the end", param, ctx)
        except OSError as error:  # a folder that may not be entered, a name that is too long
            self.fail(f"{str(path)!r}: {error.strerror}", param, ctx)
        return path


class OutputFolder(click.Path):
    """The type of an option that names a folder to write to, made if it is missing: likewise."""

    def __init__(self) -> None:
        super().__init__(file_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        try:
            there = next(folder for folder in (path.absolute(), *path.absolute().parents) if _exists(folder))
            if not there.is_dir():
                self.fail(f"{str(path)!r}: {str(there)!r} is not a folder", param, ctx)
            _try_to_write_in(there)
        except OSError as error:
            self.fail(f"{str(path)!r}: {error.strerror}", param, ctx)
        return path


def _exists(path: Path) -> bool:
    """OSError where one cannot look, which Path.exists() of Python 3.14 takes for no."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _try_to_write_in(folder: Path) -> None:
    """OSError, with the folder in its words, when nothing can be made there."""
    try:
        tempfile.TemporaryFile(dir=folder).close()  # root has every permission, and nothing to write in /proc
    except OSError as error:
        raise OSError(error.errno, f"cannot write in {str(folder)!r}: {error.strerror}") from None


def url_of(text: str) -> str:
    """click type: HOST:PORT is enough."""
    url = text if "://" in text else f"http://{text}"
    try:
        parts = urllib.parse.urlsplit(url)
        is_host = re.fullmatch(r"[\w.:%-]+", parts.hostname or "")
        if parts.scheme not in ("http", "https") or not is_host or parts.port == 0:
            raise ValueError("it is http:// or https://, HOST or HOST:PORT, and a path or none")
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is no URL: {error}") from None
    return url


def cpu_pair(text: str) -> tuple[int, int]:
    """The type of an option such as `0,1`: a core for each of two processes."""
    words = text.split(",")
    if len(words) != 2 or not all(word.strip().isdecimal() for word in words):
        raise click.BadParameter(f"{text!r} is not a pair of cores; write for example 0,1")
    return int(words[0]), int(words[1])


def cpu_list(text: str) -> list[int]:
    """The type of an option such as `0,2,4`; empty: no cores are named. Only cores that this process may use."""
    words = [word.strip() for word in text.split(",")] if text.strip() else []
    if not all(word.isdecimal() for word in words):
        raise click.BadParameter(f"{text!r} is not a list of cores; write for example 0,2,4")
    allowed = os.sched_getaffinity(0)
    for word in words:
        if int(word) not in allowed:
            names = ", ".join(str(core) for core in sorted(allowed))
            raise click.BadParameter(f"core {word} is not one of those that this process may use: {names}")
    return [int(word) for word in words]


def rails(text: str) -> int | list[str]:
    """The type of --rails: a number in 1..16, or as many names and addresses, as in `eth0,10.0.1.5`."""
    words = [word.strip() for word in text.split(",")]
    is_number = len(words) == 1 and words[0].isdecimal()
    count = int(words[0]) if is_number else len(words)
    if not 1 <= count <= RAILS_MAX or "" in words:
        raise click.BadParameter(f"{text!r} is neither 1 to {RAILS_MAX} nor a list of interfaces or addresses")
    return count if is_number else words

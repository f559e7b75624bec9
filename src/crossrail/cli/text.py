"""How figures, words and errors are told to people, the same in every command."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from crossrail._text import plain
from crossrail.errors import CrossrailError

_STEPS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_LONG_WORD = re.compile(r"(\S{120})\S{80,}(\S{40})")


def format_bytes(count: int) -> str:
    """1536 -> "1.5 KiB"; exact below 1 KiB."""
    value = float(count)
    for step in _STEPS:
        if value < 1024 or step == _STEPS[-1]:
            return f"{count} B" if step == "B" else f"{value:.1f} {step}"
        value /= 1024
    raise AssertionError("unreachable")


def format_count(count: int, noun: str) -> str:
    """(1, "page") -> "1 page"; (4112, "page") -> "4,112 pages"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def shown_lines(text: str) -> str:
    """plain() of a text with lines of ours."""
    return "\n".join(plain(line) for line in text.splitlines())


def clipped(text: str) -> str:
    """Words of more than 240 characters without their middle: errors repeat what they were given, however long."""
    return _LONG_WORD.sub(r"\1...\2", text)


def gb_per_s(nbytes: float, took_s: float) -> float:
    """Gigabytes (10**9) per second; 0 when no time passed."""
    return nbytes / took_s / 1e9 if took_s > 0 else 0.0


def said_of(error: Exception) -> str:
    """The message for a user. Peers choose their names, and so do files: none may carry terminal control sequences."""
    return clipped(shown_lines(_words_of(error)))


def _words_of(error: Exception) -> str:
    if isinstance(error, CrossrailError):
        more = "" if type(error) is CrossrailError else f" [more: crossrail error {error.error_code}]"
        return f"error: {error}{more}"
    if isinstance(error, OSError) and error.strerror:
        advice = "; raise the limit on open files (ulimit -n)" if error.errno in (errno.EMFILE, errno.ENFILE) else ""
        where = "" if error.filename is None else f"{error.filename}: "
        if not where and error.errno == errno.ENOENT and _is_nowhere():
            where, advice = "the current directory was removed: ", "; cd to one that is there"
        return f"error: {where}{error.strerror}{advice}"
    if isinstance(error, MemoryError):
        why = "" if str(error) in ("", "std::bad_alloc") else f": {error}"
        return f"error: out of memory{why}; free some, or raise the limit on address space (ulimit -v)"
    if isinstance(error, RuntimeError) and str(error) == "can't start new thread":  # Python's words for EAGAIN
        return f"error: {error}; raise the limit on processes (ulimit -u, the container's pids limit)"
    what = f"{type(error).__name__}: {error}"
    return f"error: a mistake in crossrail, {what}; `crossrail --debug ...` shows where, please report it"


def _is_nowhere() -> bool:
    """Whether our working directory no longer exists. Errors caused by that name nothing."""
    try:
        Path.cwd()
    except OSError:
        return True
    return False


@contextmanager
def naming(file: Path) -> Iterator[None]:
    """Errors while this file is written name it: for a full disk Python's do not."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(file)) from None

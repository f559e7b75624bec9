"""Checks the options of an engine by transport: an option that belongs to another transport is refused by its name.

Whole numbers and bounds are checked in C++, where they are used. Wrong types are checked here: from C++ they would
come back as the signature of a binding that the user never called.
"""

from __future__ import annotations

import contextlib
import operator
import os
import shlex
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any, SupportsIndex

from crossrail.errors import UsageError

DUMP_DIRECTORY_VARIABLE = "CROSSRAIL_DUMP_DIR"
SECRET_VARIABLE = "CROSSRAIL_SECRET"

# An array's shape: the length of its only dimension, or one length per dimension.
Shape = SupportsIndex | Sequence[SupportsIndex]


def check_texts(**options: object) -> None:
    """UsageError unless each is text that UTF-8 can encode."""
    for argument, value in options.items():
        if not isinstance(value, str):
            raise UsageError(f"{argument} must be text, not {_kind(value)}")
        encoded(value, argument)


def check_numbers(**options: object) -> None:
    """UsageError unless each is a number. A bool is not accepted."""
    for argument, value in options.items():
        if isinstance(value, bool) or not isinstance(value, Real):
            raise UsageError(f"{argument} must be a number, not {_kind(value)}")


def check_seconds(**options: object) -> None:
    """UsageError unless each is a time in seconds, 0 or more. None is refused: it does not mean "for ever" here."""
    check_numbers(**options)
    for argument, value in options.items():
        if not value >= 0:  # type: ignore[operator]  # a number, maybe none of those that compare
            raise UsageError(f"{argument} is {value}, must be seconds, 0 or more")


def check_waits(longest_s: float, **options: object) -> None:
    """UsageError unless each is a valid duration of a wait, in seconds: more than 0, at most longest_s."""
    check_numbers(**options)
    for argument, value in options.items():
        if not 0 < value <= longest_s:  # type: ignore[operator]  # a number, maybe none of those that compare
            raise UsageError(f"{argument} is {value}, must be seconds, more than 0 and at most {longest_s:g}")


def check_given(**options: object) -> None:
    """UsageError for None: these options have defaults, and None has no meaning for them."""
    for argument, value in options.items():
        if value is None:
            raise UsageError(f"{argument} must not be None: leave it out for its default")


def check_whole(**options: object) -> None:
    """UsageError unless each is a whole number. A bool is not accepted."""
    for argument, value in options.items():
        try:
            if not isinstance(value, bool):
                operator.index(value)  # type: ignore[arg-type]
                continue
        except TypeError:
            pass
        raise UsageError(f"{argument} must be a whole number, not {_kind(value)}")


def check_counts(least: int, **options: object) -> None:
    """UsageError unless each is a whole number, `least` or more."""
    check_whole(**options)
    for argument, value in options.items():
        if value < least:  # type: ignore[operator]  # a whole number
            raise UsageError(f"{argument} is {value}, must be {least} or more")


def whole_shape(shape: object) -> tuple[int, ...]:
    """A shape as numpy accepts it: one length or several, whole numbers of any type. UsageError for anything else."""
    lengths: tuple[Any, ...] = (shape,)
    if isinstance(shape, Iterable) and not isinstance(shape, (str, bytes)):
        with contextlib.suppress(TypeError):  # a zero-dimensional array
            lengths = tuple(shape)
    if not any(isinstance(length, bool) for length in lengths):
        with contextlib.suppress(TypeError):
            return tuple(map(operator.index, lengths))
    raise UsageError(f"shape is {shape!r:.80}, must be a whole number or several: the length of each dimension")


def check_timeout(timeout_s: object) -> None:
    """UsageError unless it is what blocking waits accept: a number of seconds, or None."""
    if timeout_s is None:
        return
    seconds = None
    if not isinstance(timeout_s, bool) and isinstance(timeout_s, Real):
        with contextlib.suppress(OverflowError):  # an int too large for a float
            seconds = float(timeout_s)
    if seconds is None:
        raise UsageError(f"timeout_s must be a number of seconds or None, not {_kind(timeout_s)}")
    if not seconds >= 0:
        raise UsageError(f"timeout_s is {seconds:g}, must be 0 or more, or None to wait for ever")


def check_kind(value: object, argument: str, kind: type, article: str) -> None:
    """UsageError unless it is an instance of `kind`. article: that class with its article, for the message: "a
    TlsConfig".
    """
    if not isinstance(value, kind):
        raise UsageError(f"{argument} must be {article}, not {_kind(value)}")


def path(value: object, argument: str) -> str:
    """A path, given as text or os.PathLike, as text."""
    if not isinstance(value, (str, os.PathLike)):
        raise UsageError(f"{argument} must be a path, as text or os.PathLike, not {_kind(value)}")
    return os.fsdecode(value)


def directory(value: object, argument: str) -> str:
    """A path as path() returns it. UsageError unless it is a directory in which this user can create files."""
    text = path(value, argument)
    if not os.path.isdir(text):  # noqa: PTH112 - pathlib is slow to import, and engines need not
        raise UsageError(f"{argument} = {text!r} is not a directory: make it first (mkdir -p {shlex.quote(text)})")
    if not os.access(text, os.W_OK | os.X_OK):
        raise UsageError(f"{argument} = {text!r} is a directory in which this user may not make files")
    return text


def dump_directory() -> str:
    """The default directory for dumps: CROSSRAIL_DUMP_DIR, else TMPDIR, else /tmp. UsageError if the first is set and
    is not a directory in which this user can create files.
    """
    if chosen := os.environ.get(DUMP_DIRECTORY_VARIABLE):
        return directory(chosen, DUMP_DIRECTORY_VARIABLE)
    return os.environ.get("TMPDIR") or "/tmp"


def encoded(text: str, argument: str) -> bytes:
    """The text as UTF-8. UsageError for a lone surrogate."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{argument} = {text!r} cannot be encoded as UTF-8: {error.reason}") from None


def _kind(value: object) -> str:
    return "None" if value is None else type(value).__name__

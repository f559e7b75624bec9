"""Imports of packages that only an optional extra of crossrail installs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needs(who: str, install: str) -> Iterator[None]:
    """If a package imported in this block is not installed, raises an error that says in one line how to install it.

    who: what needs the package; install: the argument for pip, such as "'crossrail[kv]'".
    """
    try:
        yield
    except ModuleNotFoundError as error:
        name = error.name or ""
        if name == "crossrail" or "." in name or "pip install" in str(error):
            raise  # a part of an installed package of another version, or this error from a nested block
        raise ModuleNotFoundError(f"{who} needs {name}: pip install {install}", name=name) from None

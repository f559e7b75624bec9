"""Imports of packages that only an optional extra of crossrail installs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needs(who: str, install: str) -> Iterator[None]:
    """What is imported within, and is not installed, is missed in one line that says how to get it.

    who: needs it; install: what to give to pip, such as "'crossrail[kv]'".
    """
    try:
        yield
    except ModuleNotFoundError as error:
        name = error.name or ""
        if name == "crossrail" or "." in name or "pip install" in str(error):
            raise  # a part of a package that is there, in another version; or it has been said
        raise ModuleNotFoundError(f"{who} needs {name}: pip install {install}", name=name) from None

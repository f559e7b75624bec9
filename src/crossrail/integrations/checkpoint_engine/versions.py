"""Whether the installed checkpoint-engine is one that our classes were written for: checked when one is made."""

from __future__ import annotations

import importlib.metadata
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from crossrail.errors import UsageError

TESTED = ("0.4.2",)


def check_version() -> None:
    """Raises UsageError, which names the tested versions, for any other minor version."""
    installed = importlib.metadata.version("checkpoint-engine")
    if installed.split(".")[:2] not in [version.split(".")[:2] for version in TESTED]:
        raise UsageError(_refusal(installed, "its parts may have changed"))


def check_parts(parts: Mapping[Callable[..., Any], str]) -> None:
    """The parameters of each function of theirs that we call or replace. UsageError names what is otherwise."""
    for function, known in parts.items():
        now = " ".join(inspect.signature(function).parameters)
        if now != known:
            what = f"{function.__qualname__} takes {now!r}, not {known!r}"
            raise UsageError(_refusal(importlib.metadata.version("checkpoint-engine"), what))


def _refusal(installed: str, why: str) -> str:
    return (
        f"this checkpoint-engine is {installed}, crossrail's was tested with {', '.join(TESTED)}: {why}; "
        f"install checkpoint-engine=={TESTED[-1]}, or a crossrail for yours"
    )

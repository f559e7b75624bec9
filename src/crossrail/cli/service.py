"""What commands share that open an engine for others to reach: options, and the secret."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from crossrail.engine import SECRET_VARIABLE
from crossrail.errors import UsageError

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def together(*decorators: Decorator) -> Decorator:
    """Several options as one decorator, shown in this order."""

    def apply(fn: Callable[..., Any]) -> Callable[..., Any]:
        for decorator in reversed(decorators):
            fn = decorator(fn)
        return fn

    return apply


engine_options = together(
    click.option("--transport", default="auto", show_default=True, help="Of the engine: auto, shm, tcp, verbs, ofi."),
    click.option("--rails", multiple=True, help="What the engine's rails are bound to; several times for several."),
    click.option(
        "--secret-file",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help=f"File with the secret that all share; without it the environment's {SECRET_VARIABLE}.",
    ),
)


def read_secret(file: Path | None) -> bytes:
    """Of the file, else of the environment. UsageError when there is none: whoever can reach a node without one could
    give it work.
    """
    secret = file.read_bytes().strip() if file is not None else os.environb.get(SECRET_VARIABLE.encode(), b"")
    if not secret:
        raise UsageError(f"a secret that all nodes share is needed: --secret-file, or {SECRET_VARIABLE}")
    return secret

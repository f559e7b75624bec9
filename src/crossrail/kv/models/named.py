"""Models by the names that commands accept, with their options as text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TypeVar

import msgspec

from crossrail.errors import UsageError
from crossrail.kv.models.checkpoint import open_checkpoint
from crossrail.kv.models.examples import EXAMPLES, ExampleOptions, open_example
from crossrail.kv.models.hosted import HostedModel, HostOptions

Options = TypeVar("Options", bound=HostOptions)


def open_named(name: str, options: Mapping[str, str]) -> HostedModel:
    """Opens one of EXAMPLES, or a checkpoint's directory. options: fields of ExampleOptions, or of HostOptions."""
    if name in EXAMPLES:
        return open_example(name, _parsed(name, ExampleOptions, options))
    if Path(name).is_dir():
        return open_checkpoint(Path(name), _parsed(name, HostOptions, options))
    raise UsageError(f"model {name!r} is not one of {', '.join(EXAMPLES)}, nor a directory")


def _parsed(name: str, kind: type[Options], options: Mapping[str, str]) -> Options:
    known = [field.name for field in fields(kind)]
    if unknown := [key for key in options if key not in known]:
        raise UsageError(f"model {name!r} has no option {unknown[0]!r}; there are {', '.join(known)}")
    try:
        return msgspec.convert(options, kind, strict=False)
    except msgspec.ValidationError as error:
        raise UsageError(f"option of model {name!r}: {error}") from None

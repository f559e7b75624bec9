"""Whether our classes take what the installed SGLang gives: known at start-up, not at the first request."""

from __future__ import annotations

import importlib.metadata
import inspect

from crossrail.errors import UsageError

WRITTEN_AGAINST = "0.5.23"


def check_interface(ours: type, theirs: type) -> None:
    """Raises UsageError, which names the method, when `theirs`, a base class of SGLang's, wants more than we have."""
    if missing := sorted(getattr(ours, "__abstractmethods__", ())):
        raise UsageError(refusal(f"{theirs.__name__} wants {', '.join(missing)}"))
    for name, method in vars(theirs).items():
        if not inspect.isfunction(method):
            continue
        taken = inspect.signature(getattr(ours, name)).parameters
        if unknown := [given for given in inspect.signature(method).parameters if given not in taken]:
            raise UsageError(refusal(f"{theirs.__name__}.{name} is given {', '.join(unknown)}"))


def refusal(why: str) -> str:
    """For an error's text. why: what this SGLang does that we do not know."""
    try:
        installed = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        installed = "of a version nobody knows"
    return (
        f"this SGLang is {installed}, crossrail's transfer backend is written against {WRITTEN_AGAINST}: {why}; "
        f"install sglang=={WRITTEN_AGAINST}, or a crossrail for yours"
    )

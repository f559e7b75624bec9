"""Checks at start-up that our classes take the arguments that an inference engine passes."""

from __future__ import annotations

import importlib.metadata
import inspect


def misfit(ours: type, theirs: type) -> str:
    """What `theirs`, a base class of the engine's, requires and `ours` lacks; names the method. Empty: nothing."""
    if missing := sorted(getattr(ours, "__abstractmethods__", ())):
        return f"{theirs.__name__} wants {', '.join(missing)}"
    for name, method in vars(theirs).items():
        if not inspect.isfunction(method):
            continue
        taken = inspect.signature(getattr(ours, name)).parameters
        if unknown := [given for given in inspect.signature(method).parameters if given not in taken]:
            return f"{theirs.__name__}.{name} is given {', '.join(unknown)}"
    return ""


def uncalled(ours: type, theirs: type) -> str:
    """Which public methods of ours `theirs` does not know, so that the engine never calls them. Empty: none."""
    public = (name for name, method in vars(ours).items() if name[0] != "_" and callable(getattr(ours, name)))
    unknown = [name for name in public if not hasattr(theirs, name)]
    return f"{theirs.__name__} has no {', '.join(unknown)}" if unknown else ""


def installed_version(*packages: str) -> str:
    """The version of the first of these packages that is installed."""
    for package in packages:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "of a version nobody knows"

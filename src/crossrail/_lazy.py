"""Names that a package offers, and whose modules are imported when somebody first asks for them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any


def lazily(package: str, homes: Mapping[str, str], modules: Collection[str] = ()) -> Callable[[str], Any]:
    """A package's __getattr__. homes: by name, in which of its modules it is, relative to the package. modules: those
    that are there, as attributes by their last names, without an import of their own.
    """
    places = {module.rpartition(".")[2]: module for module in modules}

    def get(name: str) -> Any:
        if name in places:
            return importlib.import_module(f"{package}.{places[name]}")
        home = homes.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(f"{package}.{home}"), name)
        setattr(sys.modules[package], name, found)  # not asked for again
        return found

    return get

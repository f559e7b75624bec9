"""Lets a package offer names whose modules are imported at first use."""

from __future__ import annotations

import importlib
import importlib.util
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
            raise _no_attribute(package, name)
        found = getattr(importlib.import_module(f"{package}.{home}"), name)
        setattr(sys.modules[package], name, found)  # not asked for again
        return found

    return get


def _no_attribute(package: str, name: str) -> AttributeError:
    """As Python's own. Of a module that is there, and was not imported, it says so."""
    module = f"{package}.{name}"
    is_module = not name.startswith("_") and importlib.util.find_spec(module) is not None
    hint = f": it is a module, for `import {module}`" if is_module else ""
    return AttributeError(f"module {package!r} has no attribute {name!r}{hint}", name=name, obj=sys.modules[package])


def listed(package: str, names: Collection[str], packages: Collection[str] = ()) -> Callable[[], list[str]]:
    """A package's __dir__, which is what an editor or a shell offers behind its dot: these names, whether they are
    loaded or not; of these packages in it those that are; and what Python itself has in every module.
    """

    def everything() -> list[str]:
        there = vars(sys.modules[package])
        own = (name for name in there if name.startswith("__") or name in packages)
        return sorted({*names, *own})

    return everything

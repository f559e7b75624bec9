"""Lets a package offer names whose modules are imported at first use."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any


def lazily(package: str, homes: Mapping[str, str], modules: Collection[str] = ()) -> Callable[[str], Any]:
    """A package's __getattr__. homes: maps each name to the module that defines it, relative to the package. modules:
    submodules that are available as attributes, by their last names, without an explicit import.
    """
    places = {module.rpartition(".")[2]: module for module in modules}

    def get(name: str) -> Any:
        if name in places:
            return importlib.import_module(f"{package}.{places[name]}")
        home = homes.get(name)
        if home is None:
            raise _no_attribute(package, name)
        found = getattr(importlib.import_module(f"{package}.{home}"), name)
        setattr(sys.modules[package], name, found)  # later lookups bypass __getattr__
        return found

    return get


def _no_attribute(package: str, name: str) -> AttributeError:
    """The same AttributeError that Python raises. For a submodule that exists but was not imported, it says so."""
    module = f"{package}.{name}"
    is_module = not name.startswith("_") and importlib.util.find_spec(module) is not None
    hint = f": it is a module, for `import {module}`" if is_module else ""
    return AttributeError(f"module {package!r} has no attribute {name!r}{hint}", name=name, obj=sys.modules[package])


def listed(package: str, names: Collection[str], packages: Collection[str] = ()) -> Callable[[], list[str]]:
    """A package's __dir__, from which editors and shells complete: `names`, loaded or not; those of `packages` that are
    loaded; and the attributes that Python gives every module.
    """

    def everything() -> list[str]:
        there = vars(sys.modules[package])
        own = (name for name in there if name.startswith("__") or name in packages)
        return sorted({*names, *own})

    return everything

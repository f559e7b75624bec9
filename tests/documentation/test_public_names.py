"""All that the public modules offer says what it does: names in __all__, and what their classes have."""

from __future__ import annotations

import ast
import dataclasses
import enum
import importlib
import inspect
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.process import REPOSITORY

MODULES = [
    "crossrail",
    "crossrail.kv",
    "crossrail.kv.model",
    "crossrail.moe",
    "crossrail.observe",
    "crossrail.observe.files",
    "crossrail.sim",
    "crossrail.testing",
    "crossrail.topology",
    "crossrail.weights",
    "crossrail.weights.inventory.mapping",
]
# Those that take torch: test_torch_public_names.py.
WITH_TORCH = ["crossrail.integrations.deepep", "crossrail.integrations.transformers", "crossrail.moe.graph"]
# Those that take what they are integrated into: they are read, not imported. Methods are those of the host's interface.
OF_HOSTS = [f"crossrail.integrations.{host}" for host in ("checkpoint_engine", "sglang", "verl", "vllm")]


@pytest.mark.parametrize("name", MODULES)
def test_each_public_name_is_documented(name: str) -> None:
    module = importlib.import_module(name)
    assert inspect.getdoc(module)
    assert not (silent := [path for path, thing in offered(module) if not described(thing)]), silent


@pytest.mark.parametrize("name", MODULES)
def test_each_public_object_says_what_it_is(name: str) -> None:
    """Not <... object at 0x7f...>, of which a log or a debugger tells nothing."""
    classes = [thing for _, thing in offered(importlib.import_module(name)) if inspect.isclass(thing)]
    made = [
        one
        for one in classes
        if not issubclass(one, (BaseException, enum.Enum)) and not getattr(one, "_is_protocol", False)
    ]
    assert [one.__name__ for one in made if one.__repr__ is object.__repr__] == []


@pytest.mark.parametrize("name", OF_HOSTS)
def test_what_hosts_are_given_is_documented(name: str) -> None:
    folder = Path(REPOSITORY, "src", *name.split("."))
    trees = {file.stem: ast.parse(file.read_text()) for file in folder.glob("*.py")}
    (names,) = (
        ast.literal_eval(node.value)
        for node in trees["__init__"].body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    made = [
        node
        for tree in trees.values()
        for node in tree.body
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name in names
    ]
    assert {node.name for node in made} == set(names)
    assert [node.name for node in made if not ast.get_docstring(node)] == []


def test_the_reference_has_each_module() -> None:
    """And the site's menu has its page."""
    hooks = ast.parse(Path(REPOSITORY, "tools", "docs", "hooks.py").read_text())
    (modules,) = (
        ast.literal_eval(node.value)
        for node in hooks.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "MODULES"
    )
    menu = re.findall(r"reference/(crossrail.*)\.md$", Path(REPOSITORY, "mkdocs.yml").read_text(), re.MULTILINE)
    assert set(modules) == {*MODULES, *WITH_TORCH, *OF_HOSTS} == set(menu)


def test_one_without_a_word_is_seen() -> None:
    class Silent:
        """A class."""

        def method(self) -> None: ...

    module = ModuleType("of_a_user")
    module.__all__ = ["Silent"]  # type: ignore[attr-defined]
    module.Silent = Silent  # type: ignore[attr-defined]
    assert [path for path, thing in offered(module) if not described(thing)] == ["Silent.method"]


def offered(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Each name with what it stands for; of classes their public members too, inherited ones among them."""
    for name in getattr(module, "__all__", None) or [key for key in vars(module) if key.startswith("sim_")]:
        thing = getattr(module, name)
        if name.startswith("__"):
            continue
        yield name, thing
        if inspect.isclass(thing):
            for member in dir(thing):
                value = inspect.getattr_static(thing, member)
                if not member.startswith("_") and callable_or_property(value) and is_ours(thing, member):
                    # An override that says nothing does what is said of the one it overrides.
                    told = [vars(base)[member] for base in thing.__mro__ if member in vars(base)]
                    yield f"{name}.{member}", next(filter(described, told), value)


def callable_or_property(value: Any) -> bool:
    return (
        callable(value) or isinstance(value, (property, classmethod, staticmethod)) or inspect.isdatadescriptor(value)
    )


def is_ours(owner: type, member: str) -> bool:
    """Of a class of ours, and no field (of msgspec's neither): fields are told by the words of their class. Not what
    others put into theirs at run time, as transformers does into torch's.
    """
    fields = [field.name for field in dataclasses.fields(owner)] if dataclasses.is_dataclass(owner) else []
    if member in fields or member in getattr(owner, "__struct_fields__", ()):
        return False
    if issubclass(owner, enum.Enum) and member in owner.__members__:
        return False
    defines = next(base for base in owner.__mro__ if member in vars(base))
    return defines.__module__.partition(".")[0] in {"crossrail", "tests"}


def described(thing: Any) -> bool:
    """A word of its own: a dataclass without one has its signature there, and inherited ones are of another."""
    if isinstance(thing, (classmethod, staticmethod)):
        thing = thing.__func__
    text = getattr(thing, "__doc__", None) or ""
    if inspect.isclass(thing) and text.startswith(f"{thing.__name__}("):
        return False
    if typing.get_origin(thing) is not None or not (callable(thing) or hasattr(thing, "__get__")):
        return True  # an alias of types, or a constant: their values say what they are
    return bool(text.strip())

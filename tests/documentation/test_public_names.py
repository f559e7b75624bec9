"""All that the public modules offer says what it does: names in __all__, and what their classes have."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import typing
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

MODULES = [
    "crossrail",
    "crossrail.kv",
    "crossrail.moe",
    "crossrail.observe",
    "crossrail.sim",
    "crossrail.testing",
    "crossrail.topology",
    "crossrail.weights",
]


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
    """Of no class of Python's, and no field (of msgspec's neither): fields are told by the words of their class."""
    fields = [field.name for field in dataclasses.fields(owner)] if dataclasses.is_dataclass(owner) else []
    if member in fields or member in getattr(owner, "__struct_fields__", ()):
        return False
    if issubclass(owner, enum.Enum) and member in owner.__members__:
        return False
    defines = next(base for base in owner.__mro__ if member in vars(base))
    return defines.__module__.partition(".")[0] not in {"builtins", "asyncio", "enum", "typing", "msgspec", "abc"}


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

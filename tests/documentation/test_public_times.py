"""Each public call that takes a time in seconds refuses what is none, by its name, before it does anything."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import crossrail as xr
from crossrail import sim
from tests.documentation.test_public_names import MODULES, offered

# Made by us and read, or for others to implement.
REPORTS = {
    "crossrail.Heartbeat",
    "crossrail.kv.LayerTime",
    "crossrail.moe.Group.all_gather",
    "crossrail.moe.Round",
    "crossrail.observe.Traffic",
    "crossrail.weights.StepReport",
    "crossrail.weights.UpdateReport",
}
# What such calls take besides; of other parameters without a default any object does: times are looked at first.
OTHERS = {"version": 1, "name": "times", "prompt": [1], "rail": 0, "factor": 2.0, "chance": 0.5, "count": 1}


def times_of(thing: Any) -> list[str]:
    """Names of its parameters that are seconds; of an attribute that can be set its own."""
    if isinstance(thing, (classmethod, staticmethod)):
        thing = thing.__func__
    if isinstance(thing, property):
        name = getattr(thing.fget, "__name__", "")
        return [name] if thing.fset is not None and name.endswith("_s") else []
    if signatures := getattr(thing, "__nb_signature__", None):  # of C++
        names = re.findall(r"(\w+):", " ".join(str(signature[0]) for signature in signatures))
    else:
        try:
            names = list(inspect.signature(thing).parameters)
        except (TypeError, ValueError):  # not called, or Python's own
            return []
    return [name for name in names if name.endswith("_s") and not name.endswith("_per_s")]


def calls(modules: list[str]) -> list[tuple[str, str]]:
    """Path of what takes times, and one of them, for each of those."""
    found = [
        (f"{module}.{path}", thing) for module in modules for path, thing in offered(importlib.import_module(module))
    ]
    return [(path, name) for path, thing in found if path not in REPORTS for name in times_of(thing)]


class Things:
    """Objects whose calls go to C++, which looks at times itself, or that take hosts."""

    def __init__(self) -> None:
        self._ending = contextlib.ExitStack()
        self.engine = self._ending.enter_context(xr.Engine("times", transport="shm"))
        region = self._ending.enter_context(self.engine.register(np.zeros(64, np.uint8), access="write"))
        self.world = self._ending.enter_context(sim.World())
        hosts = [self.world.host("a"), self.world.host("b")]
        self.given = {"host": hosts[0], "what": hosts[0], "these": hosts[:1], "those": hosts[1:], "engine": self.engine}
        self.given |= {"descriptor": region.descriptor, "peer": self.engine.address}
        made = [
            self.engine, region, self.world, self.engine.imm_counter(3), self.engine.submit_recvs(1, 64),
            self.engine.submit_write(region, region.descriptor),
        ]  # fmt: skip
        self.made = {type(one): one for one in made}

    def close(self) -> None:
        self._ending.close()

    def owner(self, kind: type) -> Any:
        """One of the class, or a bare one: without anything that could be used before the time is refused."""
        if inspect.isabstract(kind):
            kind = type(kind.__name__, (kind,), dict.fromkeys(kind.__abstractmethods__))
        return self.made.get(kind) or kind.__new__(kind)


@pytest.fixture
def things() -> Iterator[Things]:
    made = Things()
    yield made
    made.close()


def module_of(path: str) -> ModuleType:
    return importlib.import_module(max((module for module in MODULES if path.startswith(f"{module}.")), key=len))


def arguments_of(function: Callable[..., Any], given: dict[str, Any]) -> dict[str, Any]:
    """What it must be given."""
    if signatures := getattr(function, "__nb_signature__", None):
        return {name: value for name, value in given.items() if re.search(rf"\b{name}:", str(signatures))}
    needed = [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    return {name: given.get(name, object()) for name in needed}


async def call(module: ModuleType, path: str, name: str, value: float, things: Things) -> None:
    """With this value, and awaits what it gives."""
    thing, _, member = path.partition(".")
    function = getattr(module, thing)
    if member:
        owner = things.owner(function)
        if isinstance(inspect.getattr_static(function, member), property):
            setattr(owner, member, value)
            return
        function = getattr(owner, member)
    result = function(**(arguments_of(function, OTHERS | things.given) | {name: value}))
    if inspect.isawaitable(result):
        await result
    elif hasattr(result, "__aenter__"):
        await result.__aenter__()
    elif hasattr(result, "__anext__"):
        await anext(result)


async def refuses(module: ModuleType, path: str, name: str, things: Things) -> None:
    for value in (float("nan"), -1.0):
        with pytest.raises(xr.UsageError, match=rf"^{name} is {value:g}\b"):
            await call(module, path, name, value, things)


@pytest.mark.parametrize(("path", "name"), calls(MODULES))
async def test_what_is_no_time_is_refused_by_name(things: Things, path: str, name: str) -> None:
    module = module_of(path)
    await refuses(module, path.removeprefix(f"{module.__name__}."), name, things)


async def test_one_that_takes_any_time_is_seen(things: Things, monkeypatch: pytest.MonkeyPatch) -> None:
    class Waits:
        async def wait(self, timeout_s: float | None = None) -> None: ...

    module = ModuleType("of_a_user")
    module.__all__ = ["Waits"]  # type: ignore[attr-defined]
    module.Waits = Waits  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "of_a_user", module)
    assert calls(["of_a_user"]) == [("of_a_user.Waits.wait", "timeout_s")]
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        await refuses(module, "Waits.wait", "timeout_s", things)

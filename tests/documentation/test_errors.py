"""docs/errors.md has a section for each class that crossrail raises, and none for others."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import crossrail as xr
from crossrail.kv import NoPages
from tests.support.process import REPOSITORY

SOURCES = Path(REPOSITORY) / "src"
SECTION = re.compile(r"^### (\S+)\n`(\w+)`", re.MULTILINE)


def raised() -> Iterator[tuple[str, str]]:
    """(module, name) of all subclasses of CrossrailError, read from the sources: some need vLLM to be imported."""
    bases: dict[tuple[str, str], list[str]] = {}
    for file in sorted(SOURCES.rglob("*.py")):
        module = ".".join(file.relative_to(SOURCES).with_suffix("").parts)
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                bases[module, node.name] = [ast.unparse(base).rpartition(".")[2] for base in node.bases]
    errors = {"CrossrailError"}
    while more := {name for (_, name), of in bases.items() if errors & set(of)} - errors:
        errors |= more
    return (key for key, of in bases.items() if key[1] == "CrossrailError" or errors & set(of))


def code_of(module: str, name: str) -> str:
    """As Python makes it of a class of that name in that module."""
    if name == "CrossrailError":
        return xr.CrossrailError.error_code
    return type(name, (xr.CrossrailError,), {"__module__": module}).error_code


def test_each_error_has_its_section() -> None:
    sections = dict(SECTION.findall((Path(REPOSITORY) / "docs" / "errors.md").read_text()))
    assert sections == {code_of(module, name): name for module, name in raised()}


@pytest.mark.parametrize(
    ("kind", "code"), [(xr.PeerLost, "peer-lost"), (xr.UsageError, "usage-error"), (NoPages, "kv-no-pages")]
)
def test_code_of_a_class(kind: type[xr.CrossrailError], code: str) -> None:
    assert kind.error_code == code


def test_errors_of_users_keep_the_code_of_their_base() -> None:
    class MyOwn(xr.PeerLost):
        pass

    assert MyOwn("gone").docs == "docs/errors.md#peer-lost"

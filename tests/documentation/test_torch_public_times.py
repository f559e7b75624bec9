"""Calls of modules that take torch refuse what is no time, too."""

import importlib
from collections.abc import Iterator

import pytest

from tests.documentation.test_public_names import WITH_TORCH
from tests.documentation.test_public_times import Things, calls, refuses

FOUND = [(module, path.removeprefix(f"{module}."), name) for module in WITH_TORCH for path, name in calls([module])]


@pytest.fixture
def things() -> Iterator[Things]:
    made = Things()
    yield made
    made.close()


@pytest.mark.parametrize(("module", "path", "name"), FOUND)
async def test_what_is_no_time_is_refused_by_name(things: Things, module: str, path: str, name: str) -> None:
    await refuses(importlib.import_module(module), path, name, things)

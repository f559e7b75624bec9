"""As test_public_names.py, of modules that import torch."""

from __future__ import annotations

import importlib
import inspect

import pytest

from tests.documentation.test_public_names import WITH_TORCH, described, offered


@pytest.mark.parametrize("name", WITH_TORCH)
def test_each_public_name_is_documented(name: str) -> None:
    module = importlib.import_module(name)
    assert inspect.getdoc(module)
    assert not (silent := [path for path, thing in offered(module) if not described(thing)]), silent

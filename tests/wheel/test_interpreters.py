"""Which Python `./dev wheel` takes for a name: the one that starts."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.process import REPOSITORY

TOOLS = Path(REPOSITORY) / "tools" / "wheel"


@pytest.fixture
def interpreters(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(TOOLS))
    spec = importlib.util.spec_from_file_location("interpreters", TOOLS / "interpreters.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.modules.pop("process", None)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What PATH and pyenv have, which is nothing at first."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    return tmp_path


def program(path: Path, script: str = "") -> Path:
    """A Python that says that it is itself; or that script of sh."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script or 'echo $0'}\n")
    path.chmod(0o755)
    return path


def test_first_on_the_path_is_taken(interpreters: ModuleType, folder: Path) -> None:
    python = program(folder / "bin" / "python9.9")
    program(folder / "pyenv" / "versions" / "9.9.1" / "bin" / "python9.9")

    assert interpreters.interpreter("python9.9") == python


def test_shim_that_does_not_start_is_passed_over_for_the_newest_that_pyenv_has(
    interpreters: ModuleType, folder: Path
) -> None:
    program(folder / "bin" / "python9.9", "echo 'pyenv: python9.9: command not found' >&2; exit 127")
    for number in ("9.9.2", "9.9.10", "9.9.1"):
        program(folder / "pyenv" / "versions" / number / "bin" / "python9.9")

    assert interpreters.interpreter("python9.9") == folder / "pyenv" / "versions" / "9.9.10" / "bin" / "python9.9"


def test_path_is_taken_as_it_is(interpreters: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = program(folder / "elsewhere" / "python9.9")
    program(folder / "bin" / "python9.9")
    monkeypatch.chdir(folder)

    assert interpreters.interpreter(str(python)) == python
    assert interpreters.interpreter("elsewhere/python9.9") == Path("elsewhere/python9.9")


def test_none_that_starts_is_a_failure_that_says_why(interpreters: ModuleType, folder: Path) -> None:
    with pytest.raises(sys.modules["process"].Failure, match=r"no python9\.9 on PATH"):
        interpreters.interpreter("python9.9")

    shim = program(folder / "bin" / "python9.9", "echo 'not chosen' >&2; exit 127")
    with pytest.raises(sys.modules["process"].Failure, match=rf"{shim} does not start: not chosen"):
        interpreters.interpreter("python9.9")

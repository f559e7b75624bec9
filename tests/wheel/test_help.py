"""`./dev wheel --help` and `./dev vm --help` on a fresh clone: help, and nothing is installed or built for it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.limits import PROGRAM_S
from tests.support.process import REPOSITORY


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """What ./dev consists of, and no environment."""
    shutil.copy2(Path(REPOSITORY) / "dev", tmp_path)
    shutil.copytree(Path(REPOSITORY) / "tools", tmp_path / "tools", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def dev(clone: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-B", str(clone / "dev"), *arguments]
    return subprocess.run(command, cwd=clone, capture_output=True, text=True, timeout=PROGRAM_S)


@pytest.mark.parametrize("name", ["wheel", "vm"])
@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_needs_no_environment(clone: Path, name: str, option: str) -> None:
    asked = dev(clone, name, option)

    assert (asked.returncode, asked.stderr) == (0, "")
    assert asked.stdout.startswith(f"usage: ./dev {name}")
    assert sorted(path.name for path in clone.iterdir()) == ["dev", "tools"]


def test_option_that_is_none_is_refused_before_anything_is_installed(clone: Path) -> None:
    asked = dev(clone, "wheel", "--nonsense")

    assert asked.returncode == 2
    assert "--nonsense" in asked.stderr
    assert sorted(path.name for path in clone.iterdir()) == ["dev", "tools"]

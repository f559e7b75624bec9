"""Scripts in benchmarks/ start: what they import from the package is still there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.limits import WAIT_S
from tests.support.process import REPOSITORY

SCRIPTS = sorted((Path(REPOSITORY) / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_script_tells_its_options(script: Path) -> None:
    run = subprocess.run([sys.executable, str(script), "--help"], capture_output=True, text=True, timeout=WAIT_S)
    assert run.returncode == 0, run.stderr
    assert "usage:" in run.stdout.lower()

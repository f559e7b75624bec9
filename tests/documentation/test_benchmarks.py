"""Scripts in benchmarks/ start: what they import from the package is still there."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.limits import WAIT_S
from tests.support.process import REPOSITORY

# Those that need what `./dev test` does not install, as the tests of it, are left out where that is absent.
NEEDS = {"gpu_copies.py": ["torch"], "moe_gpu.py": ["torch", "triton"], "moe_graph.py": ["torch", "triton"]}
SCRIPTS = sorted(
    script
    for script in (Path(REPOSITORY) / "benchmarks").glob("*.py")
    if all(find_spec(module) for module in NEEDS.get(script.name, []))
)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_script_tells_its_options(script: Path) -> None:
    run = subprocess.run([sys.executable, str(script), "--help"], capture_output=True, text=True, timeout=WAIT_S)
    assert run.returncode == 0, run.stderr
    assert "usage:" in run.stdout.lower()

"""Scripts in benchmarks/ start: what they import from the package is still there. Its README describes each measure."""

from __future__ import annotations

import re
import subprocess
import sys
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path

import pytest

from crossrail.cli.bench.measures import all_measures
from tests.support.limits import PROGRAM_S
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
    run = subprocess.run([sys.executable, str(script), "--help"], capture_output=True, text=True, timeout=PROGRAM_S)
    assert run.returncode == 0, run.stderr
    assert "usage:" in run.stdout.lower()


def described(transport: str) -> list[str]:
    """Names in the first column of the table under "With `--transport ...`" that names it; of shm, of the first."""
    sections = re.split(r"(?m)^(?=With `--transport )", (Path(REPOSITORY) / "benchmarks" / "README.md").read_text())
    heads = [section.partition("\n")[0] for section in sections]
    named = [index for index, head in enumerate(heads) if f"`{transport}`" in head.replace("--transport ", "")]
    index = 0 if transport == "shm" else named[0]
    rows = re.findall(r"(?m)^\| (`[^|]*`) \|", sections[index])
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


@pytest.mark.parametrize("transport", ["shm", "tcp", "ofi:tcp", "verbs", "ofi"])
def test_each_measure_is_described(transport: str) -> None:
    patterns = described(transport)

    names = [measure.name for measure in all_measures(transport)]

    assert [name for name in names if not any(fnmatch(name, pattern) for pattern in patterns)] == []

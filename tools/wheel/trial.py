"""A wheel as a stranger gets it: a fresh environment, no source on the path, the examples of README.md and docs/."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import time
from pathlib import Path

from process import ROOT, WORK, Failure, make_venv, pip_install, run, say

# What pip may bring along with a crossrail without extras: five packages, and what those need themselves.
ALLOWED = {"numpy", "msgspec", "click", "rich", "prometheus-client"}
OF_THOSE = {"markdown-it-py", "mdurl", "pygments", "typing-extensions"}
TOOLS = {"pip", "setuptools"}
HELP_RUNS = 5
PROGRAMS_S = 600


def try_out(wheel: Path, python: Path) -> None:
    """Raises Failure at the first thing that does not hold."""
    place = WORK / "trial"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    say(f"{wheel.name}: tried in an environment of its own")
    inside = make_venv(place / "venv", python, wheel)
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    env["PATH"] = f"{inside.parent}{os.pathsep}{env['PATH']}"

    check_packages(inside)
    check_origin(inside, place, env)
    measure_help(inside, place, env)
    run([inside.parent / "crossrail", "demo"], 120, cwd=place, env=env)
    say(f"  {wheel.name}: `crossrail demo` ran from it")
    run_documentation(wheel, inside, place, env)


def check_packages(inside: Path) -> None:
    listed = json.loads(run([inside, "-m", "pip", "--disable-pip-version-check", "list", "--format", "json"], 120))
    names = {entry["name"].lower().replace("_", "-") for entry in listed} - TOOLS - {"crossrail"}
    if more := names - ALLOWED - OF_THOSE:
        raise Failure(f"pip brought {sorted(more)} along")
    say(f"  with it came {', '.join(sorted(names))}")


def check_origin(inside: Path, place: Path, env: dict[str, str]) -> None:
    """What is imported is what was installed, and needs nothing but what came with it."""
    code = "import crossrail, crossrail.sim, crossrail.topology, crossrail.moe; print(crossrail.__file__)"
    origin = run([inside, "-c", code], 60, cwd=place, env=env).strip()
    if not origin.startswith(str(place)):
        raise Failure(f"crossrail was imported from {origin}")
    run([inside, "-m", "crossrail", "--version"], 60, cwd=place, env=env)
    run([inside, "-m", "crossrail", "error", "peer-lost"], 60, cwd=place, env=env)


def measure_help(inside: Path, place: Path, env: dict[str, str]) -> None:
    """Said, not judged: how long it takes is up to the machine and to what else runs there."""
    command = [str(inside.parent / "crossrail"), "--help"]
    taken = []
    for _ in range(HELP_RUNS):
        started = time.monotonic()
        subprocess.run(command, cwd=place, env=env, check=True, stdout=subprocess.DEVNULL, timeout=60)
        taken.append(time.monotonic() - started)
    middle = statistics.median(taken)
    say(f"  `crossrail --help`: first {taken[0] * 1e3:.0f} ms, median of {HELP_RUNS} {middle * 1e3:.0f} ms")


def run_documentation(wheel: Path, inside: Path, place: Path, env: dict[str, str]) -> None:
    """The tests of README.md's, docs/' and examples/' code, in a folder that has them and no source of the package."""
    pip_install(inside, f"{wheel}[kv,test]", "mypy>=2.4,<3")
    for name in ("README.md", "pyproject.toml"):
        shutil.copy2(ROOT / name, place / name)
    for name in ("docs", "examples", "tests"):
        shutil.copytree(ROOT / name, place / name, ignore=shutil.ignore_patterns("__pycache__"))
    say("  types of a user's program")
    run([inside, "-m", "mypy", "--strict", "tests/user_types"], PROGRAMS_S, cwd=place, env=env)
    programs = ["tests/documentation/test_code_blocks.py", "tests/examples/test_examples.py"]
    command = [inside, "-m", "pytest", "-q", "-p", "no:cacheprovider", *programs]
    said = run(command, PROGRAMS_S, cwd=place, env=env, what="  the examples")
    say(f"  examples of README.md and docs/ from it: {said.strip().splitlines()[-1].strip('= ')}")

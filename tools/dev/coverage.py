"""./dev coverage: lines of ours that the tests reach."""

from __future__ import annotations

import json
import os
import shutil
import subprocess

from tools.dev.build import NATIVE_TESTS, build, locked, python_overlay, set_up, verbs_option
from tools.dev.processes import BUILD, PYTHON, ROOT, environment, must, run_here, say, tool
from tools.dev.testing import once_more, run_native_tests, side_by_side
from tools.dev.venv import ensure_extra

PYTHON_MIN_PERCENT = 90.0
NATIVE_MIN_PERCENT = 85.0

# Threads share counters. The counts of a killed process are lost.
FLAGS = "--coverage -fprofile-update=atomic -fprofile-abs-path"


def coverage(arguments: list[str]) -> int:
    with locked():
        version = set_up(native_tests=True)
        ensure_extra("coverage")
        options = {
            "CMAKE_BUILD_TYPE": "",
            "CMAKE_CXX_FLAGS": f"-O1 {FLAGS}",
            "CROSSRAIL_NATIVE_TESTS": "ON",
            **verbs_option(),
        }
        folder = build("coverage", version, options, ["all", NATIVE_TESTS])
        overlay = python_overlay(folder)
    for counts in folder.rglob("*.gcda"):
        counts.unlink()
    data = folder / "data"
    shutil.rmtree(data, ignore_errors=True)
    data.mkdir()
    data.chmod(0o1777)  # processes of tests that are another user's count, too
    say("native tests, counted")
    code = run_native_tests(folder, [])
    say("Python tests, counted")
    variables = {"COVERAGE_FILE": str(data / "counts"), "PYTHONPATH": str(overlay)}
    command = [PYTHON, "-m", "coverage", "run", "-m", "pytest", "-rfEs", "-p", "no:cacheprovider"]
    command += ["-m", "not no_coverage"]
    command += [*once_more(), *side_by_side(arguments), *(arguments or ["--sample", "1"])]
    pytest_code = run_here(command, **variables)
    pages = folder / "html"
    shutil.rmtree(pages, ignore_errors=True)
    pages.mkdir()
    python = _python(variables)
    native = _native()
    say(f"Python: {python:.1f} % of lines (at least {PYTHON_MIN_PERCENT:g}); see {pages / 'python' / 'index.html'}")
    say(f"C++:    {native:.1f} % of lines (at least {NATIVE_MIN_PERCENT:g}); see {pages / 'native' / 'index.html'}")
    return code or pytest_code or int(python < PYTHON_MIN_PERCENT or native < NATIVE_MIN_PERCENT)


def _python(variables: dict[str, str]) -> float:
    pages = BUILD / "coverage" / "html" / "python"
    env = environment(**variables)
    must([tool("coverage"), "combine", "-q"], timeout_s=300, env=env)
    must([tool("coverage"), "html", "-q", "-d", str(pages)], timeout_s=300, env=env)
    must([tool("coverage"), "report", "--skip-covered"], timeout_s=300, env=env)
    total = [tool("coverage"), "report", "--format=total", "--precision=2"]
    return float(subprocess.run(total, cwd=ROOT, env=env, capture_output=True, text=True, check=True).stdout)


def _native() -> float:
    folder = BUILD / "coverage"
    pages = folder / "html" / "native"
    pages.mkdir()
    summary = folder / "summary.json"
    command = [tool("gcovr"), "--root", str(ROOT), "--filter", "native/", "--object-directory", str(folder)]
    command += ["-j", str(os.cpu_count() or 1)]
    # Headers alone have lines in several objects, of which some never ran.
    command += ["--merge-mode-functions=merge-use-line-0", "--json-summary", str(summary)]
    must([*command, "--html-nested", str(pages / "index.html"), "--txt", "-", str(folder)], timeout_s=900)
    return float(json.loads(summary.read_text())["line_percent"])

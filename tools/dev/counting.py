"""Counting which lines of ours the tests reach, in whatever runs them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tools.dev.processes import BUILD, ROOT, must, say, tool

PAGES = BUILD / "coverage" / "html"
PYTHON_MIN_PERCENT = 90.0
NATIVE_MIN_PERCENT = 85.0

# Counters are shared by threads. What a process that is killed has counted is lost.
COMPILER_FLAGS = "--coverage -fprofile-update=atomic -fprofile-abs-path"


def counting_python() -> tuple[list[str], dict[str, str]]:
    """Arguments of pytest and variables with which it counts, says how much that is, and fails if it is too little."""
    shutil.rmtree(PAGES / "python", ignore_errors=True)
    data = BUILD / "coverage" / "data"
    shutil.rmtree(data, ignore_errors=True)
    data.mkdir(parents=True)
    reports = ["--cov-report=term:skip-covered", f"--cov-report=html:{PAGES / 'python'}"]
    arguments = ["--cov=crossrail", *reports, f"--cov-fail-under={PYTHON_MIN_PERCENT:g}"]
    # An absolute path: processes that tests start in other folders find it, too.
    return arguments, {"COVERAGE_FILE": str(data / "counts")}


def forget_native_counts(folder: Path) -> None:
    for counts in folder.rglob("*.gcda"):
        counts.unlink()


def native_coverage(folder: Path) -> int:
    """Says what the programs built in `folder` with COMPILER_FLAGS have counted; 1 if that is too little."""
    pages = PAGES / "native"
    shutil.rmtree(pages, ignore_errors=True)
    pages.mkdir(parents=True)
    summary = folder / "summary.json"
    command = [tool("gcovr"), "--root", str(ROOT), "--filter", "native/", "--object-directory", str(folder)]
    # Headers alone have lines in several objects, of which some never ran.
    command += ["--merge-mode-functions=merge-use-line-0", "--json-summary", str(summary)]
    must([*command, "--html-nested", str(pages / "index.html"), "--txt", "-", str(folder)], timeout_s=900)
    percent = float(json.loads(summary.read_text())["line_percent"])
    say(f"C++: {percent:.1f} % of lines (at least {NATIVE_MIN_PERCENT:g}); see {pages / 'index.html'}")
    return int(percent < NATIVE_MIN_PERCENT)

"""./dev coverage: lines of ours that tests reach. CI counts in ./dev test --coverage and ./dev asan --coverage."""

from __future__ import annotations

from tools.dev.build import NATIVE_TESTS, build, locked, python_overlay, set_up, verbs_option
from tools.dev.counting import COMPILER_FLAGS, counting_python, forget_native_counts, native_coverage
from tools.dev.processes import PYTHON, run_here, say
from tools.dev.testing import run_native_tests, side_by_side
from tools.dev.venv import ensure_extra


def coverage(arguments: list[str]) -> int:
    with locked():
        version = set_up(native_tests=True)
        ensure_extra("coverage")
        options = {
            "CMAKE_BUILD_TYPE": "",
            "CMAKE_CXX_FLAGS": f"-O1 {COMPILER_FLAGS}",
            "CROSSRAIL_NATIVE_TESTS": "ON",
            "CROSSRAIL_PCH": "OFF",
            **verbs_option(),
        }
        folder = build("coverage", version, options, ["all", NATIVE_TESTS])
        overlay = python_overlay(folder)
    forget_native_counts(folder)
    say("native tests, counted")
    code = run_native_tests(folder, [])
    say("Python tests, counted")
    counted, variables = counting_python()
    command = [PYTHON, "-m", "pytest", "-rfEs", "-p", "no:cacheprovider", *counted]
    more = [*side_by_side(arguments), *(arguments or ["--sample", "1"])]
    python_code = run_here([*command, *more], PYTHONPATH=str(overlay), **variables)
    return code or python_code or native_coverage(folder)

"""./dev test, asan, tsan, aarch64."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.dev.arguments import take_flag
from tools.dev.build import NATIVE_TESTS, build, locked, prepare, python_overlay, set_up, verbs_option
from tools.dev.packages import install_packages
from tools.dev.processes import PYTHON, ROOT, VENV, Failure, environment, run_bounded, run_here, run_together, say

NATIVE_TESTS_TIMEOUT_S = 600
# numpy's threads, which start in each of thousands of processes, spin before they sleep, and have nothing to do.
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}
UBSAN_OPTIONS = "print_stacktrace=1:halt_on_error=1"
# In CI, on a shared machine, a failed test is rerun once, at once. This is bounded, and both outcomes are shown. These
# fail the session: a second failure, a fourth rerun in a session, a pytest-timeout, a sanitizer's report, a dead
# worker.
ONCE_MORE = (
    *("--reruns", "1", "--max-suite-reruns", "3", "--rerun-show-tracebacks"),
    *("--rerun-except", "from pytest-timeout", "--rerun-except", "Sanitizer|runtime error"),
)
# Python tests that hardly enter the core: processes that start under a sanitizer take seconds, and find nothing.
OUTSIDE = (
    "architecture",
    "campaign",
    "cli",
    "doctor",
    "documentation",
    "integrations",
    "sglang",
    "topology",
    "verl",
    "wheel",
)


def test(arguments: list[str]) -> int:
    native_only = take_flag(arguments, "--native")
    no_native = take_flag(arguments, "--no-native")
    folder = prepare(native_tests=not no_native)
    code = 0 if no_native else run_native_tests(folder, arguments if native_only else [])
    if native_only:
        return code
    # A skip is shown with its reason, always.
    command = [PYTHON, "-m", "pytest", "-rfEs", *once_more(), *side_by_side(arguments), *arguments]
    pytest_code = run_here(command, **ONE_THREAD)
    if code != 0:
        say("FAILED: native tests (above)")
    return code or pytest_code


def asan(arguments: list[str]) -> int:
    folder = build_with_asan()
    say("native tests under AddressSanitizer and UndefinedBehaviorSanitizer")
    code = run_native_tests(
        folder,
        [],
        ASAN_OPTIONS="detect_leaks=1:detect_stack_use_after_return=1",
        LSAN_OPTIONS=f"suppressions={ROOT / 'tests' / 'native' / 'lsan.supp'}:print_suppressions=0",
        UBSAN_OPTIONS=UBSAN_OPTIONS,
    )
    say("Python tests under AddressSanitizer and UndefinedBehaviorSanitizer")
    # AddressSanitizer reports to files, since tests may swallow what their children say. The other one of gcc does
    # not: hence --capture=sys below, without which its last words would die with pytest.
    reports = folder / "reports"
    shutil.rmtree(reports, ignore_errors=True)
    reports.mkdir()
    with locked():
        overlay = python_overlay(folder)
    # torch takes minutes to import here and is not ours to check; transformers and Triton's tests import it.
    command = [
        *python_under_asan(overlay, reports),
        "-m",
        "pytest",
        "-rfEs",
        "-p",
        "no:cacheprovider",
        "--capture=sys",
        "--ignore-glob=*test_checkpoint_engine*",
        "--ignore-glob=*test_torch*",
        "--ignore-glob=*test_transformers*",
        "--ignore-glob=*test_triton*",
    ]
    command += ["-m", "not no_sanitizer and not slow", "--timeout=300", "-o", "faulthandler_timeout=330"]
    if selects_nothing(arguments):
        command += [f"--ignore={ROOT / 'tests' / outside}" for outside in OUTSIDE]
    pytest_code = run_here([*command, *once_more(), *side_by_side(arguments), *arguments])
    found = sorted(reports.iterdir())
    for report in found:
        print(report.read_text(errors="replace"))
    if code != 0:
        say("FAILED: native tests under AddressSanitizer (above)")
    if found:
        say(f"FAILED: {len(found)} processes of the Python tests ended with a sanitizer's report (above)")
    return code or pytest_code or int(bool(found))


def build_with_asan() -> Path:
    with locked():
        version = set_up(native_tests=True)
        options = {
            "CMAKE_BUILD_TYPE": "RelWithDebInfo",
            "CROSSRAIL_SANITIZE": "address",
            "CROSSRAIL_NATIVE_TESTS": "ON",
            **verbs_option(),
        }
        return build("asan", version, options, ["all", NATIVE_TESTS])


def python_under_asan(overlay: Path, reports: Path) -> list[str]:
    """The interpreter with the preloaded runtime, whose reports go into that folder; it loads the overlay's module."""
    log = f"log_path={reports / 'report'}"
    # libstdc++ comes along so that the sanitizer finds the real __cxa_throw in a Python that is not C++. The
    # interpreter's own leaks are not ours to report; its small-object allocator would hide overruns.
    variables = {
        "ASAN_OPTIONS": f"detect_leaks=0:detect_stack_use_after_return=1:allocator_may_return_null=1:{log}",
        "CROSSRAIL_SANITIZER": "address",
        "LD_PRELOAD": f"{compiler_library('libasan.so')} {compiler_library('libstdc++.so.6')}",
        "PYTHONMALLOC": "malloc",
        "PYTHONPATH": str(overlay),
        "UBSAN_OPTIONS": UBSAN_OPTIONS,
        **ONE_THREAD,
    }
    python = [*fixed_addresses(), "env", *(f"{k}={v}" for k, v in variables.items()), PYTHON]
    loaded = "import crossrail._core as c; print(c.__file__)"
    probe = subprocess.run([*python, "-c", loaded], cwd=ROOT, env=environment(), capture_output=True, text=True)
    if probe.returncode != 0 or not probe.stdout.startswith(str(overlay)):
        raise Failure(f"the sanitized module did not load:\n{probe.stdout}{probe.stderr}")
    return python


def side_by_side(arguments: Sequence[str]) -> list[str]:
    """Processes among which pytest shares the whole suite, or folders of it: many of its tests wait more than they
    compute. Less than a folder runs in one, which prints as it goes and can be debugged."""
    if not selects_nothing([argument for argument in arguments if not Path(argument).is_dir()]):
        return []
    return ["-n", str(2 * len(os.sched_getaffinity(0)) + 1), "--dist", "worksteal"]


def once_more() -> Sequence[str]:
    return ONCE_MORE if os.environ.get("CI") == "true" else ()


def selects_nothing(arguments: Sequence[str]) -> bool:
    """Whether these leave pytest the whole suite, or a sample of all of it."""
    follow_up = {"--sample", "--seed"}  # the only options with a value that select nothing
    values = {at + 1 for at, argument in enumerate(arguments) if argument in follow_up}
    return all(at in values or argument in {*follow_up, "--all"} for at, argument in enumerate(arguments))


def tsan(arguments: list[str]) -> int:
    with locked():
        version = set_up(native_tests=True)
        options = {
            "CMAKE_BUILD_TYPE": "RelWithDebInfo",
            "CROSSRAIL_BINDINGS": "OFF",
            "CROSSRAIL_NATIVE_TESTS": "ON",
            "CROSSRAIL_PCH": "OFF",  # where a native test lacks an include, this build has to find it
            "CROSSRAIL_SANITIZE": "thread",
            **verbs_option(),
        }
        folder = build("tsan", version, options, [NATIVE_TESTS])
    say("native tests under ThreadSanitizer")
    tsan_options = "second_deadlock_stack=1:history_size=4"
    suppressions = ROOT / "tests" / "native" / "tsan.supp"
    if suppressions.exists():
        tsan_options += f":suppressions={suppressions}"
    return run_native_tests(folder, arguments, TSAN_OPTIONS=tsan_options)


def aarch64(arguments: list[str]) -> int:
    compiler, emulator, root = "aarch64-linux-gnu-g++", "qemu-aarch64-static", "/usr/aarch64-linux-gnu"
    with locked():
        version = set_up(native_tests=True)
        packages = {compiler: "g++-aarch64-linux-gnu", emulator: "qemu-user-static"}
        if missing := [package for program, package in packages.items() if not shutil.which(program)]:
            install_packages(missing)
        options = {
            "CMAKE_BUILD_TYPE": "RelWithDebInfo",
            "CMAKE_CXX_COMPILER": compiler,
            "CMAKE_SYSTEM_NAME": "Linux",
            "CMAKE_SYSTEM_PROCESSOR": "aarch64",
            "CROSSRAIL_BINDINGS": "OFF",
            "CROSSRAIL_NATIVE_TESTS": "ON",
            **verbs_option(),
        }
        folder = build("aarch64", version, options, [NATIVE_TESTS])
    say("native tests for aarch64, by an emulator; without those of TLS and libfabric, which are not there for aarch64")
    program = str(folder / "tests" / "native" / NATIVE_TESTS)
    command = [emulator, "-L", root, program, "-tce=*tls*", *arguments]
    return run_bounded(command, timeout_s=NATIVE_TESTS_TIMEOUT_S, env=environment(), stdout=sys.stdout)


def run_native_tests(folder: Path, arguments: Sequence[str], **sanitizer_options: str) -> int:
    """All of them in several processes, since many wait more than they compute: a range each, though what doctest says
    at the end of each names all test cases. Those that arguments select run in one."""
    program = str(folder / "tests" / "native" / NATIVE_TESTS)
    command = [*(fixed_addresses() if sanitizer_options else []), program, *arguments]
    env = environment(**libfabric(), **sanitizer_options)
    try:
        if arguments:
            return run_bounded(command, timeout_s=NATIVE_TESTS_TIMEOUT_S, env=env, stdout=sys.stdout)
        counted = subprocess.run([*command, "--count"], env=env, capture_output=True, text=True, timeout=60)
        if counted.returncode != 0:
            raise Failure(f"exit status {counted.returncode} of --count: {counted.stdout}{counted.stderr}")
        count = int(counted.stdout.split()[-1])
        share = -(-count // (len(os.sched_getaffinity(0)) + 1))
        ranges = [[f"--first={first}", f"--last={first + share - 1}"] for first in range(1, count + 1, share)]
        return run_together([[*command, *each] for each in ranges], timeout_s=NATIVE_TESTS_TIMEOUT_S, env=env)
    except Failure as failure:
        say(f"FAILED: {failure}")
        return 1


def libfabric() -> dict[str, str]:
    """Where the native tests find a new enough libfabric; Python finds it by itself (crossrail/_libfabric.py)."""
    brought = VENV / "lib" / "mpich" / "libfabric.so.1"
    if "CROSSRAIL_LIBFABRIC" in os.environ or not brought.exists():
        return {}
    return {"CROSSRAIL_LIBFABRIC": str(brought)}


def fixed_addresses() -> list[str]:
    """A prefix that turns address randomisation off where that is allowed: the sanitizers of gcc 12 and older
    do not start on kernels that randomise 32 bits."""
    prefix = ["setarch", os.uname().machine, "-R"]
    try:
        allowed = subprocess.run([*prefix, "true"], capture_output=True, timeout=10).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        allowed = False
    return prefix if allowed else []


def compiler_library(name: str) -> str:
    compiler = shlex.split(os.environ.get("CXX", "")) or ["c++" if shutil.which("c++") else "g++"]
    found = subprocess.run([*compiler, f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
    if not Path(found).is_absolute():
        raise Failure(f"{compiler[0]} has no {name}, which the sanitizer build needs")
    return str(Path(found).resolve())

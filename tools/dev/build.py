"""Builds of the native module and the native tests, each in a folder of build/."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tools.dev.packages import doctest_present, ensure_system_packages, verbs_headers_present
from tools.dev.processes import BUILD, PYTHON, ROOT, must, say, tool
from tools.dev.stamps import read_stamp, restamped
from tools.dev.venv import ensure_venv

NATIVE_TESTS = "crossrail_native_tests"
MUTATIONS = "crossrail_mutations"
BUILD_TIMEOUT_S = 1800


def build(name: str, python_version: str, options: dict[str, str], targets: Sequence[str]) -> Path:
    """Configures build/<name> when its options changed, and builds the targets. Returns the folder."""
    folder = BUILD / name
    arguments = [f"-D{key}={value}" for key, value in options.items()]
    wanted = {"python": python_version, "arguments": arguments, "cxx": os.environ.get("CXX", "")}
    known = read_stamp(folder)
    if known != wanted or not (folder / "build.ninja").exists():
        say(f"configuring build/{name}")
        if any(known.get(key) != wanted[key] for key in ("python", "cxx")) and folder.exists():
            shutil.rmtree(folder)  # what CMake cached about the compiler and Python is wrong now
        command = [tool("cmake"), "-S", str(ROOT), "-B", str(folder), "-G", "Ninja"]
        command += [f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}", f"-DPython_EXECUTABLE={PYTHON}"]
        with restamped(folder, wanted):
            must([*command, "-DCROSSRAIL_DEV=ON", *arguments], timeout_s=300, quiet=True)
    # Ninja's one moving line on a terminal; elsewhere silence, and everything if it fails.
    ninja = [tool("ninja"), "-C", str(folder), "-j", str(os.cpu_count() or 1), *targets]
    must(ninja, timeout_s=BUILD_TIMEOUT_S, quiet=not sys.stderr.isatty())
    return folder


def install(folder: Path, prefix: Path, component: str = "") -> None:
    """Copies crossrail/_core*.so and its stub below prefix; or, of that component, the module alone."""
    command = [tool("cmake"), "--install", str(folder), "--prefix", str(prefix)]
    must(command + (["--component", component] if component else []), timeout_s=120, quiet=True)


def build_release(python_version: str, *targets: str) -> Path:
    """The module, and those targets."""
    # Depends on the machine, not on the command, so that demo and test do not take turns in reconfiguring.
    options = {"CMAKE_BUILD_TYPE": "Release", "CROSSRAIL_NATIVE_TESTS": "ON" if doctest_present() else "OFF"}
    options |= verbs_option()
    folder = build("release", python_version, options, ["all", *targets])
    install(folder, ROOT / "src")
    return folder


def verbs_option() -> dict[str, str]:
    """Said aloud, so that headers that come or go configure anew."""
    return {"CROSSRAIL_VERBS": "ON" if verbs_headers_present() else "OFF"}


def python_overlay(folder: Path, component: str = "") -> Path:
    """The package with the native module of that build, to be put before ours on PYTHONPATH."""
    overlay = folder / (f"python-{component}" if component else "python")
    if overlay.exists():
        shutil.rmtree(overlay)
    not_ours = shutil.ignore_patterns("_core*.so", "__pycache__")
    shutil.copytree(ROOT / "src" / "crossrail", overlay / "crossrail", ignore=not_ours)
    install(folder, overlay, component)
    (overlay / "crossrail" / "py.typed").touch()  # with the stubs, which builds that cannot be imported plainly lack
    return overlay


@contextlib.contextmanager
def locked() -> Iterator[None]:
    """Lets one ./dev at a time set up and build in a tree; the others wait, then find the work done."""
    BUILD.mkdir(exist_ok=True)
    with (BUILD / "dev.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another ./dev that sets up or builds here")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def set_up(*, native_tests: bool = False) -> str:
    ensure_system_packages(native_tests=native_tests)
    return ensure_venv()


def prepare(*, native_tests: bool = False) -> Path:
    """Everything up to a built and importable crossrail; returns the build folder."""
    with locked():
        version = set_up(native_tests=native_tests)
        return build_release(version, *([NATIVE_TESTS] if native_tests else []))

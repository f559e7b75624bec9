"""./dev fuzz."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tools.dev.arguments import take_flag, take_option
from tools.dev.build import build, locked, prepare, verbs_option
from tools.dev.packages import install_packages
from tools.dev.processes import BUILD, PYTHON, ROOT, Failure, run_here, say
from tools.dev.venv import ensure_venv

FUZZ_CANARY = "fuzz_canary"
CLANG_MIN = 16  # older ones do not compile gcc's <ranges>
CLANG_MAX = 24


def fuzz(arguments: list[str]) -> int:
    seconds = take_option(arguments, "--seconds", "60")
    native_only = take_flag(arguments, "--native")
    prepare()
    code = 0
    if not native_only:
        code = run_here([PYTHON, "-m", "pytest", "-rfEs", "tests/fuzz", *arguments], CROSSRAIL_FUZZ_SECONDS=seconds)
    clang = fuzzing_compiler()
    with locked():
        options = {
            "CMAKE_BUILD_TYPE": "",
            "CMAKE_CXX_FLAGS": "-O1 -g1",
            "CMAKE_CXX_COMPILER": clang,
            "CROSSRAIL_BINDINGS": "OFF",
            "CROSSRAIL_DEV": "OFF",  # gcc's warnings are errors; clang has others
            "CROSSRAIL_FUZZ": "ON",
            **verbs_option(),
        }
        folder = build("fuzz", ensure_venv(), options, ["all"]) / "tests" / "native"
    names = sorted(source.stem for source in (ROOT / "tests" / "native").glob("fuzz_*.cc"))
    names.remove(FUZZ_CANARY)
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        checks = [finds_canary(folder), *pool.map(lambda name: fuzz_one(folder, name, int(seconds)), names)]
    return code or int(not all(checks))


def fuzzing_compiler() -> str:
    """A clang++ that is new enough; installed from apt if there is none."""
    if found := find_clang():
        return found
    for version in range(CLANG_MAX, CLANG_MIN - 1, -1):
        known = (
            subprocess.run(["apt-cache", "show", f"clang-{version}"], capture_output=True, timeout=60).returncode == 0
        )
        if known:
            with locked():
                install_packages([f"clang-{version}", f"libclang-rt-{version}-dev"])
            break
    if found := find_clang():
        return found
    raise Failure(f"fuzzing needs clang++ {CLANG_MIN} or newer with libFuzzer (Debian: clang-19, libclang-rt-19-dev)")


def find_clang() -> str:
    for name in ["clang++", *(f"clang++-{version}" for version in range(CLANG_MAX, CLANG_MIN - 1, -1))]:
        if (path := shutil.which(name)) is None:
            continue
        version = subprocess.run([path, "-dumpversion"], capture_output=True, text=True, timeout=60).stdout
        if int(version.split(".")[0] or 0) >= CLANG_MIN:
            return path
    return ""


def fuzz_one(folder: Path, name: str, seconds: int) -> bool:
    """False: it found something. Inputs that reach new code are kept in build/corpus, as a start for the next time."""
    corpus = BUILD / "corpus" / name
    corpus.mkdir(parents=True, exist_ok=True)
    log = corpus.with_suffix(".log")
    limits = [f"-max_total_time={seconds}", "-timeout=20", "-rss_limit_mb=2048", "-print_final_stats=1"]
    command = [str(folder / name), *limits, f"-artifact_prefix={corpus}-", str(corpus)]
    with log.open("w") as output:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, timeout=seconds + 120
        )
    text = log.read_text(errors="replace")
    runs = re.search(r"number_of_executed_units: (\d+)", text)
    covered = re.findall(r"cov: (\d+)", text)
    if done.returncode != 0 or runs is None or not covered:
        say(f"FAILED: {name}, see {log}; the input is beside it, and {folder / name} FILE repeats it")
        sys.stderr.write("".join(text.splitlines(keepends=True)[-60:]))
        return False
    say(f"{name}: {seconds} s, {runs[1]} runs, {covered[-1]} points of the code reached")
    return True


def finds_canary(folder: Path) -> bool:
    """A decoder with a planted mistake: the fuzzer must find it, else its finding nothing means nothing."""
    with tempfile.TemporaryDirectory() as empty:
        # From an empty corpus, with a fixed seed: the same search every time.
        command = [str(folder / FUZZ_CANARY), "-seed=1", "-runs=2000000", f"-artifact_prefix={empty}/", empty]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    found = done.returncode != 0 and "heap-buffer-overflow" in done.stderr
    say(f"{FUZZ_CANARY}: {'the planted mistake was found' if found else 'FAILED: the planted mistake was not found'}")
    return found

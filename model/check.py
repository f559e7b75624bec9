"""Checks the models here with Spin: every state of each, in every configuration that it names.

A line `// CONFIG NAME=1 ...` of a model is one configuration; none is one without names. What is defined by name in the
text of a model is checked too: each WRONG_x leaves a rule out, each REACH_x denies that a state can be reached. Spin
must find fault with all of them in some configuration, else the model says nothing.

    python model/check.py [--keep FOLDER] [NAME ...]    all models, or those named (without .pml)
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
RUN_TIMEOUT_S = 120
DEPTH_MAX = 1_000_000
MEMORY_MIB = 2048


@dataclass(frozen=True)
class Result:
    states: int
    fault: str  # Spin's words; empty: none


def search(model: Path, defines: list[str], folder: Path) -> Result:
    """One exhaustive search. Raises RuntimeError when it did not end as a search does."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(model, folder)
    command(["spin", *(f"-D{define}" for define in defines), "-a", model.name], folder)
    compiler = shutil.which("cc") or shutil.which("gcc") or "clang"
    options = ["-O1", "-w", "-DSAFETY", "-DCOLLAPSE", f"-DMEMLIM={MEMORY_MIB}"]
    command([compiler, *options, "-o", "pan", "pan.c"], folder)
    output = command(["./pan", f"-m{DEPTH_MAX}"], folder)
    counted = re.search(r"^\s*(\d+) states, stored", output, re.MULTILINE)
    faults = re.search(r"errors: (\d+)", output)
    if counted is None or faults is None or "max search depth too small" in output or "out of memory" in output:
        raise RuntimeError(f"{model.name} {defines}: the search did not end:\n{output}")
    fault = re.search(r"^pan:\d*:? ?(.*) \(at depth", output, re.MULTILINE)
    if int(faults[1]) == 0:
        if "Search not completed" in output:
            raise RuntimeError(f"{model.name} {defines}: the search was not whole:\n{output}")
        return Result(int(counted[1]), "")
    return Result(int(counted[1]), fault[1] if fault else "fault")


def command(arguments: list[str], folder: Path) -> str:
    done = subprocess.run(
        arguments, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=RUN_TIMEOUT_S
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(arguments)}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def trail(model: Path, defines: list[str], folder: Path) -> str:
    """What happened, step by step, up to the fault that search() has just found."""
    return command(["spin", *(f"-D{define}" for define in defines), "-t", "-p", "-g", model.name], folder)


def check(model: Path, folder: Path, pool: Executor) -> list[str]:
    """Prints a line for each configuration and variant; returns what is wrong."""
    text = model.read_text()
    configurations = [line.split() for line in re.findall(r"^// CONFIG (.*)$", text, re.MULTILINE)] or [[]]
    variants = sorted(set(re.findall(r"^#ifn?def ((?:WRONG|REACH)_\w+)", text, re.MULTILINE)))
    if not variants:
        return [f"{model.name} has no variant that must fail"]

    def is_whole(configuration: list[str]) -> str:
        own = folder / "-".join([model.stem, *configuration])
        result = search(model, configuration, own)
        name = " ".join([model.stem, *configuration])
        print(f"{name}: {result.fault or 'holds'} in {result.states} states", flush=True)
        return f"{name}: {result.fault}\n{trail(model, configuration, own)}" if result.fault else ""

    def is_refused(variant: str) -> str:
        for configuration in configurations:
            defines = [*configuration, variant]
            result = search(model, defines, folder / "-".join([model.stem, *defines]))
            if result.fault:
                print(f"{model.stem} {variant}: refused after {result.states} states ({result.fault})", flush=True)
                return ""
        return f"{model.stem} {variant}: nothing is found wrong with it"

    return [fault for fault in [*pool.map(is_whole, configurations), *pool.map(is_refused, variants)] if fault]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--keep", type=Path, help="folder for Spin's files; else a temporary one")
    arguments = parser.parse_args()
    models = [HERE / f"{name}.pml" for name in arguments.names] or sorted(HERE.glob("*.pml"))
    started = time.monotonic()
    wrong: list[str] = []
    with tempfile.TemporaryDirectory(prefix="crossrail-model.") as temporary:
        folder = arguments.keep or Path(temporary)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for model in models:
                wrong += check(model, folder, pool)
    for text in wrong:
        print(f"\nFAILED: {text}", file=sys.stderr)
    print(f"{len(models)} models, {time.monotonic() - started:.0f} s: {'FAILED' if wrong else 'ok'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

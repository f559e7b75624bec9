"""./dev demo, bench, run, setup, clean, and commands that hand over to another program."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

from tools.dev.arguments import no_arguments, take_flag
from tools.dev.build import MUTATIONS, build_release, locked, prepare, python_overlay, set_up
from tools.dev.packages import install_packages
from tools.dev.processes import BUILD, PYTHON, ROOT, VENV, Failure, replace_process, run_here, tool
from tools.dev.venv import ensure_extra, install_torch


def demo(arguments: list[str]) -> int:
    prepare()
    if arguments[:1] in (["kv"], ["moe"], ["weights"]):
        return replace_process([tool("crossrail"), arguments[0], "demo", *arguments[1:]])
    if arguments:
        return replace_process([tool("crossrail"), "demo", *arguments])
    status = run_here([tool("crossrail"), "demo"])
    return status or replace_process([tool("crossrail"), "kv", "demo", "--out", str(BUILD / "demo")])


def bench(arguments: list[str]) -> int:
    prepare()
    return replace_process([tool("crossrail"), "bench", *arguments])


def run(arguments: list[str]) -> int:
    if not arguments:
        raise Failure("run what? ./dev run COMMAND...")
    prepare()
    return replace_process(arguments)


def setup(arguments: list[str]) -> int:
    transformers = take_flag(arguments, "--transformers")
    triton = take_flag(arguments, "--triton")
    torch = take_flag(arguments, "--torch") or transformers or triton
    no_arguments("setup", arguments)
    prepare()
    if torch:
        with locked():
            install_torch()
    if transformers:
        with locked():
            ensure_extra("transformers")
            ensure_extra("checkpoint-engine")
    if triton:
        with locked():
            ensure_extra("triton")
    return 0


def model(arguments: list[str]) -> int:
    missing = [] if shutil.which("spin") else ["spin"]
    if not any(shutil.which(compiler) for compiler in ("cc", "gcc", "clang")):
        missing.append("gcc")  # Spin makes a C program of a model
    if missing:
        with locked():  # apt-get update does not wait for another one
            install_packages(missing)
    return replace_process([sys.executable, str(ROOT / "model" / "check.py"), *arguments])


def sim(arguments: list[str]) -> int:
    if not take_flag(arguments, "--mutations"):
        prepare()
        besides = ["--scenario", "tests.moe.campaign:rounds", *arguments]
        return replace_process([PYTHON, "-m", "crossrail.sim.campaign", *besides], PYTHONPATH=str(ROOT))
    with locked():
        folder = build_release(set_up(), MUTATIONS)
        overlay = python_overlay(folder, "mutations")
    command = [PYTHON, str(ROOT / "tests" / "sim" / "mutations.py"), *arguments]
    return replace_process(command, PYTHONPATH=f"{overlay}{os.pathsep}{ROOT}")


def campaign(arguments: list[str]) -> int:
    prepare()
    return replace_process([PYTHON, "-m", "crossrail.campaign", *arguments], OPENBLAS_NUM_THREADS="1")


def soak(arguments: list[str]) -> int:
    prepare()
    return replace_process([PYTHON, "-m", "crossrail.campaign.soak", *arguments], OPENBLAS_NUM_THREADS="1")


def vm(arguments: list[str]) -> int:
    script = str(ROOT / "tools" / "vm" / "vm.py")
    if arguments[:1] in (["-h"], ["--help"]):
        return replace_process([sys.executable, script, "--help"])  # before anything is installed
    program = [PYTHON, script]
    folder = prepare(native_tests=True)
    asked = subprocess.run([*program, "--missing"], capture_output=True, text=True, timeout=60)
    if missing := asked.stdout.split():
        try:
            with locked():
                install_packages(missing)
        except Failure as failure:  # the program names what is missing, and ends with 125: this machine cannot
            print(f"dev: {failure}", file=sys.stderr, flush=True)
    return replace_process([*program, *arguments], CROSSRAIL_BUILD=str(folder))


def vllm(arguments: list[str]) -> int:
    return _with_engine("vllm", arguments)


def sglang(arguments: list[str]) -> int:
    return _with_engine("sglang", arguments)


def verl(arguments: list[str]) -> int:
    return _with_engine("verl", arguments)


def _with_engine(engine: str, arguments: list[str]) -> int:
    if not take_flag(arguments, "test"):
        raise Failure(f"'{engine}' knows 'test': ./dev {engine} test [args of pytest]")
    prepare()
    return replace_process([PYTHON, str(ROOT / "tools" / "foreign.py"), engine, *arguments])


def clean(arguments: list[str]) -> int:
    everything = take_flag(arguments, "--all")
    no_arguments("clean", arguments)
    with locked():
        for path in [*(p for p in BUILD.iterdir() if p.name != "dev.lock"), *([VENV] if everything else [])]:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        package = ROOT / "src" / "crossrail"
        for path in [*package.glob("_core*.so"), package / "py.typed"]:
            path.unlink(missing_ok=True)
        caches = [ROOT / name for name in (".mypy_cache", ".pytest_cache", ".ruff_cache", ".hypothesis")]
        for folder in [package / "_core", *caches]:
            shutil.rmtree(folder, ignore_errors=True)
    return 0

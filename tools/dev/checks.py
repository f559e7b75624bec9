"""./dev check and format."""

from __future__ import annotations

import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tools.dev.arguments import no_arguments, take_flag
from tools.dev.build import locked, prepare, set_up
from tools.dev.comments import WIDTH, too_wide, wrapped
from tools.dev.processes import PYTHON, ROOT, must, run_bounded, say, tool
from tools.dev.venv import ensure_extra


def check(arguments: list[str]) -> int:
    tidy = take_flag(arguments, "--tidy")
    pyright = take_flag(arguments, "--pyright")
    no_arguments("check", arguments)
    folder = prepare()
    steps: list[tuple[str, list[str]]] = [
        ("clang-format", [tool("clang-format"), "--dry-run", "-Werror", "--ferror-limit=10", *native_files()]),
        ("ruff format", [tool("ruff"), "format", "--check", "."]),
        ("ruff check", [tool("ruff"), "check", "."]),
        ("mypy", [tool("mypy")]),
    ]
    if pyright:
        with locked():
            ensure_extra("pyright")
        steps.append(("pyright", [tool("basedpyright"), "--pythonpath", PYTHON, "-p", "tests/user_types"]))
    failed = []
    for name, command in steps:
        started = time.monotonic()
        code = run_bounded(command, timeout_s=600, quiet=True)
        say(f"{name}: {'ok' if code == 0 else 'FAILED'} ({time.monotonic() - started:.1f} s)")
        if code != 0:
            failed.append(name)
    if not comments_fit():
        failed.append("comments")
    if tidy and not run_tidy(folder):
        failed.append("clang-tidy")
    if failed:
        say(f"FAILED: {', '.join(failed)}. './dev format' repairs formatting.")
    return 1 if failed else 0


def comments_fit() -> bool:
    found = [f"{file}:{line}" for file in native_files() for line in too_wide((ROOT / file).read_text())]
    for place in found[:10]:
        say(f"{place}: a comment of more than {WIDTH} columns")
    say(f"comments: {f'FAILED ({len(found)} are too wide)' if found else 'ok'}")
    return not found


def run_tidy(folder: Path) -> bool:
    with locked():
        ensure_extra("tidy")
    # nanobind's and doctest's macros would drown what is ours.
    ours = [f for f in native_files() if not f.startswith(("native/bindings/", "tests/"))]
    sources = [f for f in ours if f.endswith(".cc")]
    commands = without_precompiled(folder)

    def one(source: str) -> bool:
        command = [tool("clang-tidy"), "--quiet", "-p", str(commands)]
        command += ["--extra-arg=-Wno-unknown-warning-option", source]  # the flags were made for gcc
        return run_bounded(command, timeout_s=600, quiet=True) == 0

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        results = list(pool.map(one, sources))
    say(f"clang-tidy: {results.count(False)} of {len(sources)} files with findings")
    return all(results)


def without_precompiled(folder: Path) -> Path:
    """A folder whose compile_commands.json names no precompiled headers, which belong to another compiler."""
    commands = folder / "tidy" / "compile_commands.json"
    commands.parent.mkdir(exist_ok=True)
    text = (folder / commands.name).read_text()
    commands.write_text(
        re.sub(r" -Winvalid-pch| (-Xclang )?-include(-pch)? (-Xclang )?\S*/cmake_pch\.hxx\S*", "", text)
    )
    return commands.parent


def native_files() -> list[str]:
    files = [f for top in ("native", "tests/native") for f in (ROOT / top).rglob("*")]
    return sorted(str(f.relative_to(ROOT)) for f in files if f.suffix in (".cc", ".h"))


def format_(arguments: list[str]) -> int:
    no_arguments("format", arguments)
    with locked():
        set_up()
    must([tool("clang-format"), "-i", *native_files()], timeout_s=300)
    for file in native_files():
        text = (ROOT / file).read_text()
        if too_wide(text):
            (ROOT / file).write_text(wrapped(text))
    must([tool("ruff"), "check", "--fix-only", "--quiet", "."], timeout_s=300)
    must([tool("ruff"), "format", "."], timeout_s=300)
    return 0

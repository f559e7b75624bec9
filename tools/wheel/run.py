"""./dev wheel: builds the wheels that are published, looks at what is in them, and uses them in a clean environment."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import time
from pathlib import Path

import assemble
import contents
import options
import trial
from interpreters import interpreter
from process import ROOT, WORK, Failure, say

DIST = ROOT / "dist"
ALL = ["python3.10", "python3.11", "python3.12"]


def main() -> int:
    asked = options.parse()

    # A wheel has the modes of its files; they are the same whoever builds it.
    os.umask(0o022)
    pythons = [interpreter(name) for name in (ALL if asked.all else asked.python or [sys.executable])]
    source = assemble.make_source(WORK / "first", asked.compiler)
    again = assemble.make_source(WORK / "second", asked.compiler) if asked.twice else None
    compare(source.sdist, again.sdist if again is not None else assemble.sdist_again(source), "made")
    wheels = [make(python, source, again) for python in pythons]
    if not asked.no_trial:
        for wheel, python in zip(wheels, pythons, strict=True):
            trial.try_out(wheel, python)
    DIST.mkdir(exist_ok=True)
    for file in (source.sdist, *wheels):
        shutil.copy2(file, DIST / file.name)
        say(f"dist/{file.name}")
    return 0


def make(python: Path, source: assemble.Source, again: assemble.Source | None) -> Path:
    """The wheel for one Python, checked, and compared with the one built from `again`."""
    started = time.monotonic()
    wheel = assemble.build_wheel(source, python)
    say(f"{wheel.name}: built in {time.monotonic() - started:.0f} s")
    found = contents.check(wheel, source.folder, source.work)
    for line in found.facts:
        say(f"  {line}")
    if found.wrong:
        raise Failure("\n  ".join([f"{wheel.name} is not what it should be:", *found.wrong]))
    compare(wheel, assemble.pack_again(source, python), "packed")
    if again is not None:
        compare(wheel, assemble.build_wheel(again, python), "compiled and packed")
    return wheel


def compare(first: Path, second: Path, done: str) -> None:
    """Both were made in folders of their own; what differs would be a path, a time, a mode or an order."""
    if first.read_bytes() != second.read_bytes():
        raise Failure(f"{done} twice, and not the same bytes:\n  {first}\n  {second}")
    say(f"{first.name}: {done} twice, the same bytes, SHA-256 {hashlib.sha256(first.read_bytes()).hexdigest()}")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Failure as failure:
        say(f"FAILED: {failure}")
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)

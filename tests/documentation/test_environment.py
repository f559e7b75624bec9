"""docs/environment.md names each CROSSRAIL_* variable that the code reads, and no other."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tests.support.process import REPOSITORY

TOP = Path(REPOSITORY)
SUFFIXES = {".py", ".cc", ".h", ".sh", ""}
# Names that stand in strings or after a $, as those of the environment do. Macros of C++ and options of CMake do not.
_BEFORE = [
    r"""environb?(?:\.get)?[\[(]\s*["']""",
    r"""getenv\(\s*\"""",
    r"\$\{?",
    r"""^\w+ = \"""",
    r"""["'](?=CROSSRAIL_\w+["'] (?:not )?in os\.environ)""",
]
USES = re.compile(f"(?:{'|'.join(_BEFORE)})(CROSSRAIL_[A-Z_]+)", re.MULTILINE)
OF_CMAKE = {"CROSSRAIL_VERBS_INCLUDE_DIR"}


def read_by_code() -> Iterator[str]:
    files = [TOP / "dev", TOP / ".ci" / "run"]
    files += [file for top in ("src", "native", "tools", "tests") for file in (TOP / top).rglob("*")]
    for file in files:
        if file.is_file() and file.suffix in SUFFIXES and "__pycache__" not in file.parts and file != Path(__file__):
            yield from USES.findall(file.read_text())
    yield "CROSSRAIL_VM_NICS"  # told in the machine by tools/vm/vm.py, for whoever works there


def test_the_table_has_each_variable() -> None:
    text = (TOP / "docs" / "environment.md").read_text()
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `CROSSRAIL_")]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert named == set(read_by_code()) - OF_CMAKE

"""No file and no function is so long that nobody reads it in one go."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from tests.support.process import REPOSITORY

FILE_LINES_MAX = 570
FUNCTION_LINES_MAX = 80  # of Python
TOPS = ("benchmarks", "native", "src", "tests", "tools")
SUFFIXES = {".py", ".cc", ".h", ".cu", ".cuh"}


def sources() -> dict[str, str]:
    """Text by path."""
    files = (file for top in TOPS for file in sorted((REPOSITORY / top).rglob("*")) if file.suffix in SUFFIXES)
    return {file.relative_to(REPOSITORY).as_posix(): file.read_text(encoding="utf-8") for file in files}


def too_long(texts: Mapping[str, str]) -> list[str]:
    found = []
    for path, text in texts.items():
        count = text.count("\n")
        if count > FILE_LINES_MAX:
            found.append(f"{path}: {count} lines")
        if path.endswith(".py") and count > FUNCTION_LINES_MAX:
            for node in ast.walk(ast.parse(text, path)):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno:
                    lines = node.end_lineno - node.lineno + 1
                    if lines > FUNCTION_LINES_MAX:
                        found.append(f"{path}: {node.name}() has {lines} lines")
    return found


def test_files_and_functions_stay_short() -> None:
    texts = sources()
    assert {"src/crossrail/engine.py", "native/engine/engine.h"} <= set(texts)
    assert too_long(texts) == []


def test_what_is_too_long_is_seen() -> None:
    line = "pass\n"
    function = "def f():\n" + "    pass\n" * FUNCTION_LINES_MAX
    assert too_long({"a.h": line * FILE_LINES_MAX, "a.py": function.removesuffix("    pass\n")}) == []
    assert too_long({"a.h": line * (FILE_LINES_MAX + 1)}) == ["a.h: 571 lines"]
    assert too_long({"a.py": f"class A:\n{''.join(f' {part}' for part in function.splitlines(True))}"}) == [
        "a.py: f() has 81 lines"
    ]

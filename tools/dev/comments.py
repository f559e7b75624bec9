"""C++ comments that are too wide: clang-format leaves comments as they are (.clang-format says why)."""

from __future__ import annotations

import re

WIDTH = 120
_COMMENT = re.compile(r"( *//)( *)(.*)")
_BEHIND_CODE = re.compile(r"\S  // ")
_ITEM = re.compile(r"(?:\d+\.|[-*]) +")
_HEADED = re.compile(r"Invariant|NOLINT|---")
_TABLE = re.compile(r"\S {2,}\S")


def too_wide(text: str) -> list[int]:
    """The numbers of lines with comments that are too wide."""
    lines = enumerate(text.split("\n"), 1)
    return [n for n, line in lines if len(line) > WIDTH and (_COMMENT.fullmatch(line) or _BEHIND_CODE.search(line))]


def wrapped(text: str) -> str:
    """Wraps such comments: the excess goes into the next line if that continues the text, else into a new line.

    Tables, and comments after code, stay as they are.
    """
    lines = text.split("\n")
    for at, line in enumerate(lines):  # grows meanwhile
        comment = _COMMENT.fullmatch(line)
        if len(line) <= WIDTH or not comment or _TABLE.search(comment[3]):
            continue
        item = _ITEM.match(comment[3])
        begin = comment[1] + comment[2] + " " * (item.end() if item else 0)
        lines[at], _, beyond = line[: WIDTH + 1].rpartition(" ")
        rest = begin + beyond + line[WIDTH + 1 :]
        following = lines[at + 1] if at + 1 < len(lines) else ""
        if following.startswith(begin) and _continues(comment[3], following.removeprefix(begin)):
            lines[at + 1] = f"{rest} {following.removeprefix(begin)}"
        else:
            lines.insert(at + 1, rest)
    return "\n".join(lines)


def _continues(text: str, following: str) -> bool:
    if not following or following[0] == " " or _ITEM.match(following) or _HEADED.match(following):
        return False
    is_label = text.endswith(".") and following[0].islower()  # of the next thing that is described
    return not is_label and not _TABLE.search(following)

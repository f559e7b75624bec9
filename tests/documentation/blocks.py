"""Python and shell in README.md and docs/."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import crossrail
from tests.support.process import REPOSITORY

LANGUAGES = {"bash", "python", "text", "yaml"}  # of fences; text: what something prints, and pictures
_FENCE = re.compile(r"^[ >]*(```+|~~~+)(.*)$", re.MULTILINE)
_BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```", re.DOTALL | re.MULTILINE)


@cache
def pages() -> dict[str, str]:
    """By file, as its name stands in the repository."""
    top = Path(REPOSITORY)
    files = [top / "README.md", *sorted((top / "docs").rglob("*.md"))]
    in_package = Path(crossrail.__file__).with_name("errors.md")
    return {str(file.relative_to(top)): file.read_text() for file in files} | {"errors.md": in_package.read_text()}


@cache
def blocks(language: str = "python") -> dict[str, list[str]]:
    """Of each page that has any."""
    found = {name: [block for of, block in _BLOCK.findall(text) if of == language] for name, text in pages().items()}
    return {name: texts for name, texts in found.items() if texts}


def strange_fences(text: str) -> list[str]:
    """Fences that blocks() would pass over although a reader sees code: indented, of tildes, without a language."""
    fences = list(_FENCE.finditer(text))
    opening, closing = fences[::2], fences[1::2]
    strange = [fence[0] for fence in opening if fence[0] != f"```{fence[2]}" or fence[2] not in LANGUAGES]
    return strange + [fence[0] for fence in closing if fence[0] != "```"] + ["no end"] * (len(fences) % 2)

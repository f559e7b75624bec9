"""Python in README.md and docs/."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from tests.support.process import REPOSITORY

_BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


@cache
def blocks() -> dict[str, list[str]]:
    """By file, as its name stands in the repository."""
    top = Path(REPOSITORY)
    files = [top / "README.md", *sorted((top / "docs").glob("*.md"))]
    found = {str(file.relative_to(top)): _BLOCK.findall(file.read_text()) for file in files}
    return {name: texts for name, texts in found.items() if texts}

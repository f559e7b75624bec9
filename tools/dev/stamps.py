"""Stamps: what a folder was made from, so that only what is stale is made again."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

STAMP = "dev-stamp.json"


def read_stamp(folder: Path) -> dict[str, object]:
    try:
        stamp = json.loads((folder / STAMP).read_text())
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


@contextlib.contextmanager
def restamped(folder: Path, content: Mapping[str, object]) -> Iterator[None]:
    """No stamp while the body changes the folder, so that what is killed halfway is made anew."""
    (folder / STAMP).unlink(missing_ok=True)
    yield
    (folder / STAMP).write_text(json.dumps(content))

"""A table in Markdown, as docs/measured.md has them, of what `crossrail bench --json FILE` wrote.

python -m tools.docs.bench_table shm.json tcp.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def number(value: float | None, unit: str = "") -> str:
    """Three digits, which is more than such measurements hold."""
    if value is None:
        return ""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f} {unit}".strip()


def row(result: dict[str, Any]) -> str:
    cells = [
        result["title"],
        number(result["value"], result["unit"]),
        number(result["limit"], result["unit"]),
        number(result["ratio"]),
        (result["bar"] or "") + (", missed" if result["verdict"] == "miss" else ""),
    ]
    return f"| {' | '.join(cells)} |"


def table(run: dict[str, Any]) -> str:
    rows = [row(result) for result in run["results"] if result["value"] is not None]
    return "\n".join(["| measure | crossrail | limit | ratio | aim |", "|---|---|---|---|---|", *rows])


if __name__ == "__main__":
    for name in sys.argv[1:]:
        run = json.loads(Path(name).read_text(encoding="utf-8"))
        print(f"{run['command']}, {run['date']}\n\n{table(run)}\n")

"""How much memory is free: who would take more is better told so than killed for it."""

from __future__ import annotations

from pathlib import Path

from crossrail.cli.text import format_bytes
from crossrail.errors import UsageError


def free_bytes() -> int | None:
    """What programs may take; None where nobody can say: in a container without /proc."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def check_memory(who: str, needed_bytes: int, remedy: str) -> None:
    """UsageError when the machine has not got that much."""
    free = free_bytes()
    if free is not None and needed_bytes > free:
        raise UsageError(
            f"{who} would use {format_bytes(needed_bytes)} of memory and {format_bytes(free)} are free; {remedy}"
        )

"""How much memory is free: a command that would need more says so instead of being killed for it."""

from __future__ import annotations

import re

from crossrail.cli.text import format_bytes
from crossrail.doctor.host import Host
from crossrail.doctor.limits import memory_limits
from crossrail.errors import UsageError


def free_bytes(host: Host | None = None) -> int | None:
    """Memory that programs may allocate, also within the limits of this process's control groups; None if unknown, as
    in a container without /proc.
    """
    host = Host() if host is None else host
    available = re.search(r"^MemAvailable: +(\d+) kB$", host.read("/proc/meminfo") or "", re.MULTILINE)
    left = [max(limit.left_bytes, 0) for limit in memory_limits(host) or ()]
    return min([int(available[1]) * 1024, *left]) if available else min(left, default=None)


def check_memory(who: str, needed_bytes: int, remedy: str) -> None:
    """UsageError when the machine has not got that much."""
    free = free_bytes()
    if free is not None and needed_bytes > free:
        raise UsageError(
            f"{who} would use {format_bytes(needed_bytes)} of memory and {format_bytes(free)} are free; {remedy}"
        )

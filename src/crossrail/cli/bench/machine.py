"""The conditions of a measurement: the machine, the version, and the other load on its cores."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import crossrail as xr
from crossrail.cli.text import format_bytes

_BUSY_S = 0.5  # how long other load is watched


def version() -> str:
    """crossrail's version; in a checkout also the commit, marked when it has changes."""
    try:
        described: str = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--tags"],
            cwd=Path(xr.__file__).parent,
            capture_output=True,
            text=True,
            timeout=10.0,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return xr.__version__
    return f"{xr.__version__} ({described})"


def machine() -> dict[str, Any]:
    """The conditions that figures depend on."""
    return {
        "cpu": _proc_field("/proc/cpuinfo", "model name"),
        "cores": os.cpu_count(),
        "cores_usable": len(os.sched_getaffinity(0)),
        "caches": _caches(),
        "memory": _proc_field("/proc/meminfo", "MemTotal"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "huge_pages": _read("/sys/kernel/mm/transparent_hugepage/enabled"),
        "huge_pages_shared": _read("/sys/kernel/mm/transparent_hugepage/shmem_enabled"),
    }


def describe_machine(about: Mapping[str, Any] | None = None) -> str:
    """The machine in one line, for the table. about: a result of machine(), perhaps of another host; None: this one."""
    about = machine() if about is None else about
    caches = about.get("caches")
    sizes = [f"{name} {size}" for name, size in caches.items()] if isinstance(caches, Mapping) else []
    words = [str(about.get("cpu", "unknown")), f"{about.get('cores_usable', '?')} cores", *sizes]
    text = ", ".join([*words, f"Linux {about.get('kernel', '?')}"])
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def busy_share(cpus: tuple[int, int]) -> float:
    """How much of these cores something else uses, 0 to 1. Sleeps meanwhile."""
    before = _cpu_times(cpus)
    time.sleep(_BUSY_S)
    spent = [after - start for after, start in zip(_cpu_times(cpus), before, strict=True)]
    return 1.0 - spent[0] / spent[1] if spent[1] else 0.0


def _cpu_times(cpus: tuple[int, int]) -> tuple[int, int]:
    """(idle, all) ticks of the cores together. proc(5): user nice system idle iowait irq softirq steal ..."""
    idle = total = 0
    names = {f"cpu{cpu}" for cpu in cpus}
    for line in _read("/proc/stat").splitlines():
        name, *ticks = line.split()
        if name in names:
            counts = [int(tick) for tick in ticks[:8]]
            idle += counts[3] + counts[4]
            total += sum(counts)
    return idle, total


def _caches() -> dict[str, str]:
    sizes: dict[str, str] = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = (_read(str(index / name)) for name in ("level", "type", "size"))
        if kind != "Instruction" and size:
            sizes[f"L{level}"] = format_bytes(int(size.rstrip("K")) << 10) if size.endswith("K") else size
    return sizes


def _proc_field(path: str, name: str) -> str:
    for line in _read(path).splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return "unknown"


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""

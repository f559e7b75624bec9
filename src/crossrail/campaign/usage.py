"""Measures what a process holds (file descriptors, threads, memory) and whether that grows."""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

_PROC = Path("/proc/self")


@dataclass(frozen=True)
class Usage:
    """The resources of one process at one moment.

    heap_kib: allocated and not freed, according to glibc; 0 elsewhere. private_kib: resident memory that it shares with
    nobody: the heap with its gaps, and what a fork has copied. shared_kib: resident memory that may be shared, except
    files; mappings: of memfds.
    """

    fds: int
    threads: int
    heap_kib: int
    private_kib: int
    shared_kib: int
    mappings: int

    @staticmethod
    def take() -> Usage:
        """The usage of this process now."""
        fds = len(list((_PROC / "fd").iterdir())) - 1  # one is iterdir's own
        threads = len(list((_PROC / "task").iterdir()))
        status = dict(line.split(":", 1) for line in (_PROC / "status").read_text().splitlines())
        private_kib, shared_kib = (int(status[name].split()[0]) for name in ("RssAnon", "RssShmem"))
        mappings = (_PROC / "maps").read_text().count("/memfd:")
        return Usage(fds, threads, _heap_bytes() >> 10, private_kib, shared_kib, mappings)

    def exceeds(self, before: Usage) -> str:
        """Which of the resources that an engine's close must release exceed those of before; empty if none."""
        more = [
            f"{now - then} more {name}"
            for name, now, then in (("fds", self.fds, before.fds), ("threads", self.threads, before.threads))
            if now > then
        ]
        return " and ".join(more)


class _MallocInfo(ctypes.Structure):
    """struct mallinfo2 of glibc 2.33 and later, <malloc.h>."""

    _names = (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
    )  # fmt: skip
    _fields_: ClassVar = [(name, ctypes.c_size_t) for name in _names]


def _heap_bytes() -> int:
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return 0
    mallinfo2.restype = _MallocInfo
    info = mallinfo2()
    return int(info.uordblks) + int(info.hblkhd)


# Growth between beginning and end that is tolerated.
_ROOM = {
    "fds": 6.0,  # connections come and go
    "threads": 0.0,
    "heap_kib": 2048.0,
    "private_kib": 16384.0,  # gaps in the heap grow for a long time
    "shared_kib": 65536.0,  # arenas are touched by and by
    "mappings": 4.0,
}
_SAMPLES_MIN = 100
_PLOT_COLUMNS = 60
_BARS = "▁▂▃▄▅▆▇█"


def growth(samples: Sequence[Usage]) -> list[str]:
    """What grew, in words: compares medians of the second and the last quarter. The first is warm-up.

    Fewer than 100 samples are not enough to find any growth.
    """
    if len(samples) < _SAMPLES_MIN:
        return []
    quarter = len(samples) // 4
    early, late = samples[quarter : 2 * quarter], samples[-quarter:]
    found = []
    for name, room in _ROOM.items():
        then, now = (statistics.median(asdict(sample)[name] for sample in part) for part in (early, late))
        if now - then > room:
            found.append(f"{name} grew from {then:g} to {now:g}")
    return found


def growth_text(samples: Sequence[Usage]) -> str:
    """What grew, for people; with too few samples, that nothing was compared."""
    if len(samples) < _SAMPLES_MIN:
        return f"nobody looked whether it grew: of {len(samples)} samples in a row, where {_SAMPLES_MIN} tell something"
    return "; ".join(growth(samples)) or "nothing grew"


def plot(values: Sequence[int]) -> str:
    """A line of bars from zero to the highest, each the mean of its share of the values."""
    columns = min(_PLOT_COLUMNS, len(values))
    top = max(values, default=0) or 1
    edges = [len(values) * column // columns for column in range(columns + 1)] if columns else []
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    return "".join(_BARS[round(mean / top * (len(_BARS) - 1))] for mean in means)

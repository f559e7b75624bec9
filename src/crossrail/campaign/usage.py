"""What a process holds: file descriptors, threads, memory. And whether that grows."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

_PROC = Path("/proc/self")


@dataclass(frozen=True)
class Usage:
    """Of one process at one moment. private_kib: resident memory that it shares with nobody; mappings: of memfds."""

    fds: int
    threads: int
    private_kib: int
    mappings: int

    @staticmethod
    def take() -> Usage:
        """Of this process."""
        fds = len(list((_PROC / "fd").iterdir())) - 1  # one is iterdir's own
        threads = len(list((_PROC / "task").iterdir()))
        status = (_PROC / "status").read_text()
        private_kib = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon:"))
        mappings = (_PROC / "maps").read_text().count("/memfd:")
        return Usage(fds, threads, private_kib, mappings)

    def exceeds(self, before: Usage) -> str:
        """Which of the things that have to be gone after an engine's close are more than before; empty if none."""
        more = [
            f"{now - then} more {name}"
            for name, now, then in (("fds", self.fds, before.fds), ("threads", self.threads, before.threads))
            if now > then
        ]
        return " and ".join(more)


# What may be more at the end than at the beginning: connections come and go, allocators keep what they had at the most.
_ROOM = {"fds": 6.0, "threads": 0.0, "private_kib": 8192.0, "mappings": 4.0}
_SAMPLES_MIN = 12


def growth(samples: Sequence[Usage]) -> list[str]:
    """What grew, in words: medians of the second and of the last quarter are compared. The first is warming up.

    Fewer than 12 samples tell nothing, and no growth is found in them.
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

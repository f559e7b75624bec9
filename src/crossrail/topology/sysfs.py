"""Reads a tree of small files, any of which may be missing, unreadable or full of junk, without raising for it."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

_TEXT_BYTES_MAX = 4096
_NOTES_MAX = 200
# Kernel names contain nothing else, so nothing that we print can carry a terminal's control sequences.
_NAME = re.compile(r"[A-Za-z0-9_.@:+-]{1,128}")
_INTEGER = re.compile(r"[+-]?\d{1,18}|0[xX][0-9a-fA-F]{1,16}")
_CPUS_MAX = 1 << 16


class Tree:
    """A directory tree. `notes` collects what made no sense; missing files are normal and make no note."""

    def __init__(self, root: Path, notes: list[str]) -> None:
        """root: need not exist. notes: shared with other trees of the same reading."""
        self.root = Path(os.path.realpath(root))
        self._notes = notes

    def note(self, where: Path, text: str) -> None:
        """Add a line, once, and not without end. where: in the tree, not resolved."""
        line = f"{self.root.name}/{where.relative_to(self.root)}: {text}"
        if line not in self._notes and len(self._notes) < _NOTES_MAX:
            self._notes.append(line)

    def names(self, *parts: str) -> list[str]:
        """The entries of a directory, in natural order; empty if it is none."""
        directory = self.root.joinpath(*parts)
        try:
            found = [entry.name for entry in directory.iterdir()]
        except (OSError, ValueError):
            return []
        sane = [name for name in found if _NAME.fullmatch(name)]
        if len(sane) < len(found):
            self.note(directory, f"{len(found) - len(sane)} of its names are impossible ones; ignored")
        return sorted(sane, key=natural)

    def text(self, path: Path) -> str | None:
        """The file's first 4 KiB without surrounding space; None when it is missing, empty or refuses to be read."""
        try:
            if not stat.S_ISREG(path.stat().st_mode):
                return None  # a pipe would block, a device do who knows what
            file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                data = os.read(file, _TEXT_BYTES_MAX)
            finally:
                os.close(file)
        except (OSError, ValueError):
            return None  # many sysfs files answer EINVAL while a link is down
        return data.decode("ascii", "replace").strip() or None

    def integer(self, path: Path, *, at_least: int, at_most: int) -> int | None:
        """A decimal or 0x number within bounds; None and a note when it is something else."""
        text = self.text(path)
        if text is None:
            return None
        if not _INTEGER.fullmatch(text):
            self.junk(path, text, "a number")
            return None
        value = int(text, 16 if text[:2] in ("0x", "0X") else 10)
        if not at_least <= value <= at_most:
            self.junk(path, text, f"within {at_least} to {at_most}")
            return None
        return value

    def word(self, path: Path, allowed: frozenset[str]) -> str | None:
        """The word in the file if it is an allowed one; otherwise None and a note."""
        text = self.text(path)
        if text is None or text in allowed:
            return text
        self.junk(path, text, "a value we know")
        return None

    def cpu_list(self, path: Path) -> tuple[int, ...] | None:
        """Like parse_cpu_list. An empty file is an empty list, as for nodes that are memory alone."""
        text = self.text(path)
        if text is None:
            return () if path.is_file() else None
        cpus = parse_cpu_list(text)
        if cpus is None:
            self.junk(path, text, "a list of CPUs")
        return cpus

    def junk(self, path: Path, text: str, wanted: str) -> None:
        """Note that a file does not hold what it should."""
        shown = ascii(text if len(text) <= 40 else text[:40] + "...")
        self.note(path, f"{shown} is not {wanted}; taken as unknown")

    def directory(self, path: Path) -> Path | None:
        """The target of a link, if it is a directory inside the tree."""
        real = Path(os.path.realpath(path))
        if not real.is_dir():
            return None
        if self.root not in real.parents:
            self.note(path, "leads out of the tree; ignored")
            return None
        return real

    def link_name(self, path: Path) -> str:
        """The last component of a link's target ("mlx5_core" of device/driver); "" if there is none.

        The target need not exist: recorded trees often leave drivers out.
        """
        try:
            name = path.readlink().name
        except (OSError, ValueError):
            return ""
        return name if _NAME.fullmatch(name) else ""


def natural(name: str) -> list[tuple[int, int | str]]:
    """A sort key: "mlx5_2" before "mlx5_10"."""
    parts = re.split(r"(\d+)", name)
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in parts if part]


def parse_cpu_list(text: str) -> tuple[int, ...] | None:
    """Parses "0-3,8" to (0, 1, 2, 3, 8); None if it is no such list. sysfs has no strides ("0-7:2/4")."""
    cpus: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,6})(?:-(\d{1,6}))?\s*", part)
        if match is None:
            return None
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last >= _CPUS_MAX:
            return None
        cpus.update(range(first, last + 1))
    return tuple(sorted(cpus))


def format_cpu_list(cpus: tuple[int, ...]) -> str:
    """(0, 1, 2, 3, 8) as "0-3,8"."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and runs[-1][1] == cpu - 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)

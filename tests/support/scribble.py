"""A misbehaving peer: overwrites the shared memory of its own links while they are in use."""

import ctypes
import re
import time
from pathlib import Path

import numpy as np

LINE = 64
HEADER_BYTES = 4096
# native/transport/shm/layout.h: a line and the entries, rounded up to a page, then the staging ring.
CHANNEL_BYTES = 4096 + 64 * 1024 + (2 << 20)
ENTRY_BYTES = 64 * 1024


def link_mappings() -> list[tuple[int, int]]:
    """(address, length) of every link segment this process has mapped to write."""
    return writable_mappings("link")


def writable_mappings(kind: str) -> list[tuple[int, int]]:
    """The same of other shared memory; kind: a regular expression for its name."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        match = re.match(rf"([0-9a-f]+)-([0-9a-f]+) rw-s .*memfd:crossrail-(?:{kind})\b", line)
        if match:
            start, end = (int(text, 16) for text in match.groups())
            found.append((start, end - start))
    return found


def overwrite_homes() -> int:
    """Overwrites what it can of what engines share with all their peers, its own and those of its peers, behind the
    line that tells what it is. Returns how many bytes."""
    count = 0
    for start, length in writable_mappings("home|open"):
        ctypes.memset(start + LINE, 0xA5, length - LINE)
        count += length - LINE
    return count


def scribble(seed: int, for_s: float) -> int:
    """Writes random bytes for `for_s` seconds, most of them into ring entries behind their sequence number, so that the
    other side takes them for real. Returns how many."""
    rng = np.random.default_rng(seed)
    mappings = link_mappings()
    deadline = time.monotonic() + for_s
    count = 0
    while mappings and time.monotonic() < deadline:
        start, length = mappings[int(rng.integers(len(mappings)))]
        for value in rng.integers(0, 256, 200):
            ctypes.c_uint8.from_address(start + place(rng, length)).value = int(value)
            count += 1
    return count


def place(rng: np.random.Generator, length: int) -> int:
    if rng.random() < 0.1:
        return int(rng.integers(HEADER_BYTES, length))
    channels = (length - HEADER_BYTES) // CHANNEL_BYTES
    channel = HEADER_BYTES + int(rng.integers(channels)) * CHANNEL_BYTES
    if rng.random() < 0.1:
        return channel + int(rng.integers(8))  # how many entries were consumed
    line = int(rng.integers(ENTRY_BYTES // LINE)) * LINE
    return channel + LINE + line + int(rng.integers(4, LINE))

"""The shapes to measure, and one side's part in it: loops, clock and checks are the same for all adapters."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from time import perf_counter_ns
from typing import Any, Literal

import numpy as np

from crossrail.cli.bench.peers.base import MESSAGE_BYTES_MAX, PLACES_MAX, Memory, Pages, Side, stream
from crossrail.cli.text import format_bytes

_KIB, _MIB = 1 << 10, 1 << 20
PAGES, PAGE_BYTES = 4096, 8 * _KIB
WINDOWS = (1, 16)
_CHECK_MESSAGES = 50
_TILE_BYTES = 4 * _MIB + 4104  # not a multiple of any size measured: a write to the wrong place is seen
_QUICK = 4


@dataclass(frozen=True)
class Shape:
    """One measure. count: of writes (stream), of passes over all pages (pages) or of round trips (messages)."""

    kind: Literal["stream", "pages", "messages"]
    nbytes: int
    count: int
    window: int = 1

    @property
    def name(self) -> str:
        """The shape's name in options and in JSON."""
        size = format_bytes(self.nbytes).replace(".0", "").replace(" ", "").lower()
        if self.kind == "stream":
            return f"write-{size}-w{self.window}"
        return f"paged-{size}" if self.kind == "pages" else f"message-{size}"

    def to_json(self) -> dict[str, Any]:
        """As JSON values, for the processes."""
        return asdict(self)

    def places(self, pool_bytes: int) -> list[tuple[int, int]]:
        """(source offset, target offset) of the writes of a stream, in turn."""
        return [(at * self.nbytes, at * self.nbytes) for at in range(min(pool_bytes // self.nbytes, PLACES_MAX))]

    def pages(self, pool_bytes: int) -> tuple[Pages, Pages]:
        """Source and target pages, both shuffled over the whole pool."""
        in_pool = pool_bytes // self.nbytes
        src, dst = (np.random.default_rng(seed).permutation(in_pool)[:PAGES].astype(np.int64) for seed in (1, 2))
        return src, dst


def shapes(*, quick: bool) -> list[Shape]:
    """All, in the order of the tables. quick: a quarter of the work."""
    share = _QUICK if quick else 1
    streams = [
        Shape("stream", nbytes, max(count // share, window), window)
        for nbytes, count in ((4 * _KIB, 2048), (64 * _KIB, 1024), (_MIB, 128), (32 * _MIB, 16))
        for window in WINDOWS
    ]
    messages = [Shape("messages", nbytes, 800 // share) for nbytes in (8, 256)]
    return [*streams, Shape("pages", PAGE_BYTES, 4 // share), *messages]


# --- data that is known on both sides ---


def _tile() -> Memory:
    return np.random.default_rng(20).integers(0, 256, _TILE_BYTES, np.uint8)


def fill(side: Side) -> None:
    """The sender's pool; the receiver's is cleared."""
    pool = side.memory[: side.pool_bytes]
    if not side.is_sender:
        pool[:] = 0
        return
    tile = _tile()
    for begin in range(0, side.pool_bytes, _TILE_BYTES):
        part = pool[begin : begin + _TILE_BYTES]
        part[:] = tile[: len(part)]


def _is_pattern(memory: Memory, pattern_at: int, tile: Memory) -> bool:
    """Whether memory holds what the sender's pool has from offset pattern_at on."""
    done = 0
    while done < len(memory):
        begin = (pattern_at + done) % _TILE_BYTES
        part = tile[begin : begin + len(memory) - done]
        if not np.array_equal(memory[done : done + len(part)], part):
            return False
        done += len(part)
    return True


class WrongData(Exception):
    """The data that arrived differs from what was sent."""


# --- one side of a measure ---


def prepare(side: Side, shape: Shape) -> None:
    """Before the first pass; not timed. The receiver clears what it will check."""
    if shape.kind == "messages":
        return
    if not side.is_sender:
        side.memory[: side.pool_bytes] = 0
    elif shape.kind == "stream":
        side.prepare(shape.places(side.pool_bytes), shape.nbytes)
    else:
        side.prepare_pages(shape.nbytes, *shape.pages(side.pool_bytes))


def play(side: Side, shape: Shape) -> dict[str, Any]:
    """One timed pass. The sender returns what it timed, in ns; the receiver nothing.

    The clock runs from the first submit, after the receiver has said that it is ready, until it reports that it has
    everything.
    """
    if shape.kind == "messages":
        return _play_messages(side, shape)
    if side.is_sender:
        side.take(8)
        begun = perf_counter_ns()
        posts, moved = _send(side, shape)
        side.take(8)
        return {"took": perf_counter_ns() - begun, "posts": posts, "moved": moved}
    side.message(8)
    if shape.kind == "stream":
        side.take_stream(shape.places(side.pool_bytes), shape.nbytes, shape.count, shape.window)
    else:
        for _ in range(shape.count):
            side.take_pages(shape.nbytes, shape.pages(side.pool_bytes)[1])
    side.message(8)
    return {}


def _send(side: Side, shape: Shape) -> tuple[list[int], int]:
    """Returns what each post took, and how many bytes went."""
    if shape.kind == "stream":
        posts = stream(side, shape.places(side.pool_bytes), shape.nbytes, shape.count, shape.window)
        side.end_of_stream()
        return posts, shape.count * shape.nbytes
    src, dst = shape.pages(side.pool_bytes)
    for _ in range(shape.count):
        side.send_pages(shape.nbytes, src, dst)
        side.end_of_stream()
    return [], shape.count * len(src) * shape.nbytes


def _play_messages(side: Side, shape: Shape) -> dict[str, Any]:
    took_ns = []
    for _ in range(shape.count):
        if side.is_sender:
            begun = perf_counter_ns()
            side.message(shape.nbytes)
            side.take(shape.nbytes)
            took_ns.append(perf_counter_ns() - begun)
        else:
            side.take(shape.nbytes)
            side.message(shape.nbytes)
    return {"rounds": took_ns} if side.is_sender else {}


def check(side: Side, shape: Shape) -> None:
    """Checks after a pass; not timed. WrongData on the side that sees it."""
    if shape.kind == "messages":
        _check_messages(side, shape.nbytes)
    elif not side.is_sender:
        tile = _tile()
        pool = side.memory[: side.pool_bytes]
        if shape.kind == "stream":
            places = shape.places(side.pool_bytes)[: shape.count]
            right = all(_is_pattern(pool[dst : dst + shape.nbytes], src, tile) for src, dst in places)
        else:
            pages = zip(*(each * shape.nbytes for each in shape.pages(side.pool_bytes)), strict=True)
            right = all(_is_pattern(pool[dst : dst + shape.nbytes], int(src), tile) for src, dst in pages)
        if not right:
            raise WrongData(f"{shape.name}: what arrived is not what was sent")


def _check_messages(side: Side, nbytes: int) -> None:
    """Checks that varying messages come back unchanged, except for the last byte."""
    out = side.memory[side.outgoing : side.outgoing + MESSAGE_BYTES_MAX]
    back = side.memory[side.incoming : side.incoming + MESSAGE_BYTES_MAX]
    for index in range(_CHECK_MESSAGES):
        if side.is_sender:
            sent = np.random.default_rng(index).integers(0, 256, nbytes - 1, np.uint8)
            out[: nbytes - 1] = sent
            side.message(nbytes)
            side.take(nbytes)
            if not np.array_equal(back[: nbytes - 1], sent):
                raise WrongData(f"message of {nbytes} B: what came back is not what was sent")
        else:
            side.take(nbytes)
            out[: nbytes - 1] = back[: nbytes - 1]
            side.message(nbytes)

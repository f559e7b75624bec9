"""The records that soak processes write, in shared memory that outlives them.

Each seat has two books and two slabs that take turns: a life (one engine, from open to close or kill) uses one of each.
All are made before the first process is forked, so that every process has them: a writer checks its target's bytes
itself. Stores are plain, because the parent only reads books of processes that are dead, or reported to be at rest.
"""

from __future__ import annotations

import functools
import mmap
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from crossrail.campaign.books import Bytes

SEATS = 4
INDICES = 2  # books and slabs of a seat
THREADS = 2  # that submit, of a life
ROWS = 1 << 16  # operations of a life in a round; one of several targets takes a row for each
ARRIVALS = 1 << 16

# States of a row: INTENT is set before the submit, so that an operation interrupted by a kill is known.
EMPTY, INTENT, ACCEPTED, ENDED, REFUSED = range(5)
# States of a slot. FREE: all poison. HANDED: done, and the receiver has yet to look. SUSPECT: nothing is promised.
FREE, BUSY, HANDED, SUSPECT = range(4)

KINDS = ("write", "paged", "scatter", "read", "send", "barrier")
# Permitted values of Transfer.status; "transport-failed" only for operations confined to one rail. Others are findings.
STATUSES = (
    "pending", "done", "cancelled", "peer-lost", "engine-closed", "region-closed", "region-revoked",
    "checksum-mismatch", "transport-failed",
)  # fmt: skip
DONE, CANCELLED = STATUSES.index("done"), STATUSES.index("cancelled")
GIVEN_UP = ("peer-lost", "engine-closed")  # after these the memory of the peer is not promised anything

ROW = np.dtype(
    [("nbytes", "<u8"), ("to", "<u4"), ("number", "<u4"), ("counts", "<u4"), ("kind", "u1"), ("state", "u1"),
     ("status", "u1"), ("is_first", "u1"), ("is_verified", "u1")]
)  # fmt: skip
SLOT = np.dtype([("data_at", "<u4"), ("nbytes", "<u4"), ("row", "<u4"), ("fence", "<u4"), ("state", "u1")])
ARRIVAL = np.dtype([("life", "<u4"), ("row", "<u4"), ("is_right", "u1"), ("state", "u1")])


@dataclass(frozen=True)
class SlotClass:
    """Ranges of one length in an area; the first slot of the class, and where it begins."""

    name: str
    nbytes: int
    count: int
    first: int
    offset: int


def _classes() -> tuple[SlotClass, ...]:
    made, first, offset = [], 0, 0
    # Short works and pages; what is cut for each rail; what is cut in slices too; what the receiver looks at.
    for name, nbytes, count in (
        ("page", 4096, 64),
        ("piece", 1 << 17, 6),
        ("long", 5 << 19, 2),
        ("handed", 1 << 14, 8),
    ):
        made.append(SlotClass(name, nbytes, count, first, offset))
        first, offset = first + count, offset + nbytes * count
    return tuple(made)


CLASSES = {one.name: one for one in _classes()}
HANDED_SLOTS = CLASSES["handed"]
SLOTS = sum(one.count for one in CLASSES.values())
AREA_BYTES = sum(one.nbytes * one.count for one in CLASSES.values())
AREAS = SEATS * INDICES  # of a slab: one for each life that may write there
LIBRARY_BYTES = 1 << 20  # for peers to read, behind the areas
SLAB_BYTES = AREAS * AREA_BYTES + LIBRARY_BYTES

_DATA_BYTES = 1 << 24
_LIVES = 1 << 13
_ROUNDS = 1 << 10


class Book:
    """What one life records. fences: how often its slab was closed or revoked, and poisoned afterwards."""

    def __init__(self) -> None:
        head = np.dtype([("fences", "<u4"), ("arrivals", "<u4")])
        shapes: list[tuple[npt.DTypeLike, tuple[int, ...]]] = [
            (head, (1,)), (ROW, (ROWS,)), (ARRIVAL, (ARRIVALS,)), (SLOT, (AREAS, SLOTS)),
            ("<u4", (AREAS, HANDED_SLOTS.count)), ("<u4", (AREAS, HANDED_SLOTS.count)),
        ]  # fmt: skip
        sizes = [-(-np.dtype(kind).itemsize * int(np.prod(shape)) // 64) * 64 for kind, shape in shapes]
        memory = mmap.mmap(-1, sum(sizes))
        at, arrays = 0, []
        for (kind, shape), nbytes in zip(shapes, sizes, strict=True):
            arrays.append(np.frombuffer(memory, kind, int(np.prod(shape)), at).reshape(shape))
            at += nbytes
        self.head, self.rows, self.arrivals, self.slots = arrays[:4]
        self.taken = arrays[4]  # by area of the sender and handed slot: the last row that was checked, plus one
        self.seen = arrays[5]  # likewise: how many counts were consumed

    @property
    def fences(self) -> int:
        return int(self.head["fences"][0])

    def clear(self) -> None:
        """Between rounds, while nobody writes."""
        for array in (self.head, self.rows, self.arrivals, self.slots, self.taken, self.seen):
            array.view(np.uint8)[...] = 0


@dataclass(frozen=True)
class Stage:
    """The books and slabs of all seats, by seat and index."""

    books: list[list[Book]]
    slabs: list[list[Bytes]]

    @staticmethod
    def make() -> Stage:
        """Once, before processes are forked."""
        return Stage(
            [[Book() for _ in range(INDICES)] for _ in range(SEATS)],
            [[np.frombuffer(mmap.mmap(-1, SLAB_BYTES), np.uint8) for _ in range(INDICES)] for _ in range(SEATS)],
        )


@functools.cache
def data() -> Bytes:
    """The bytes that payloads are cut from; neither poison nor zero occurs in them."""
    return np.random.Generator(np.random.PCG64(5)).integers(1, 0xD0, _DATA_BYTES, np.uint8)


def library() -> Bytes:
    """The contents of everybody's library, as peers must find them."""
    return data()[:LIBRARY_BYTES]


def area_of(seat: int, index: int) -> int:
    """The area of a slab that this life writes to; also the area of its own sources for that life."""
    return seat * INDICES + index


def slot_offset(area: int, slot: int) -> int:
    """Offset of a slot in the slab."""
    its = next(one for one in CLASSES.values() if one.first <= slot < one.first + one.count)
    return area * AREA_BYTES + its.offset + (slot - its.first) * its.nbytes


def number_of(life: int, round_number: int, handed: int | None = None) -> int:
    """The immediate of a life's operations in a round; handed: that of this slot, which has its own."""
    return (life % _LIVES * _ROUNDS + round_number % _ROUNDS) * 16 + (0 if handed is None else 1 + handed)

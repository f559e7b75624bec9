"""Where tensors are in a bucket. All senders to a rollout rank cut the same stream of tensors in the same way.

A bucket has room for bucket_bytes. A tensor that does not fit after the others begins the next one; one that is longer
than a bucket is cut, and its pieces fill as many as needed. The table lists the contents.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from crossrail.errors import UsageError

ALIGN = 256
TABLE_BYTES = 4 << 20  # room for one; a piece takes some 100 bytes
DIGEST_BYTES = 16
_PIECE_BYTES = 64  # beside its name
_Count = Annotated[int, Meta(ge=0, le=(1 << 62))]


class Piece(Struct, frozen=True, array_like=True):
    """Bytes begin..begin + nbytes of a contiguous tensor, at `at` of the bucket. dtype: as torch names it."""

    name: str
    dtype: str
    shape: Annotated[tuple[_Count, ...], Meta(max_length=64)]
    begin: _Count
    nbytes: _Count
    at: _Count
    total: _Count  # bytes of the tensor

    @property
    def is_whole(self) -> bool:
        return self.nbytes == self.total


class Table(Struct, frozen=True, array_like=True):
    """The table of one bucket. step: verl's global_steps."""

    step: int | None
    index: _Count
    is_last: bool
    pieces: list[Piece]


class Plan:
    """Finds places for one tensor after another. bucket_bytes: at least ALIGN. Threads: one.

    Invariant: pieces do not overlap, and end within bucket_bytes; the table of `pieces` has room in TABLE_BYTES.
    """

    def __init__(self, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes
        self.pieces: list[Piece] = []
        self._used = 0
        self._table_left = TABLE_BYTES

    def place(self, name: str, dtype: str, shape: tuple[int, ...], total: int) -> Iterator[Piece | None]:
        """The tensor's pieces in order. None: no room is left; send the bucket, and call clear() before going on."""
        begin = 0
        takes = len(name.encode()) + _PIECE_BYTES + 9 * len(shape)
        while True:
            left = total - begin
            at = -(-self._used // ALIGN) * ALIGN
            room = self._bucket_bytes - at
            fits = left <= room or (left > self._bucket_bytes and room >= ALIGN)
            if not fits or takes > self._table_left:
                if not self.pieces:
                    raise UsageError(f"the name of a tensor has {takes} bytes: {name!r:.80}")
                yield None
                continue
            piece = Piece(name, dtype, shape, begin, min(left, room), at, total)
            self.pieces.append(piece)
            self._used = at + piece.nbytes
            self._table_left -= takes
            yield piece
            begin += piece.nbytes
            if begin == total:
                return

    def clear(self) -> None:
        """Empties the bucket: its contents have been sent."""
        self.pieces = []
        self._used = 0
        self._table_left = TABLE_BYTES

    @property
    def used_bytes(self) -> int:
        return self._used


def encode(table: Table) -> bytes:
    return msgspec.msgpack.encode(table)


def digest(encoded: bytes) -> bytes:
    """A digest by which senders of one rank show that they have cut alike."""
    return hashlib.blake2b(encoded, digest_size=DIGEST_BYTES).digest()


def decode(encoded: bytes, bucket_bytes: int) -> Table:
    """Raises UsageError for what does not fit a bucket of that size."""
    try:
        table = msgspec.msgpack.decode(encoded, type=Table)
    except msgspec.MsgspecError as error:
        raise UsageError(f"malformed table of a bucket: {error}") from None
    for piece in table.pieces:
        if piece.at + piece.nbytes > bucket_bytes or piece.begin + piece.nbytes > piece.total:
            raise UsageError(f"a bucket of {bucket_bytes} bytes cannot hold {piece!r}")
        count = math.prod(piece.shape)
        if piece.total % count if count else piece.total:
            raise UsageError(f"{piece.total} bytes do not make a tensor of shape {piece.shape}: {piece.name!r:.80}")
    return table

"""What a rank tells those who wait for it while it goes on: that a call has failed there, which it may make again."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from typing import NamedTuple

import crossrail as xr
from crossrail import _core
from crossrail.moe.farewell import text_of_peer
from crossrail.moe.links.either import link_of
from crossrail.moe.links.far import Far
from crossrail.moe.links.near import Near

_MEND_S = 0.2  # a call that is made again sooner was nobody's business
_LOOK_EVERY_S = 0.01  # who only looks at a round does so far more often
_HEADER = struct.Struct("<II")  # CRC32 of the rest, and the number of the note: writes may be seen half done
_WORDS_BYTES = _core.moe.FAREWELL_BYTES - _HEADER.size


class Note(NamedTuple):
    """number: of the rank's notes. words: for people; "": the note before is no longer true."""

    rank: int
    number: int
    words: str


class Notes:
    """One rank's and the others'. Threads: one at a time.

    near, far: as of Peers, with all that they know of other ranks.
    """

    def __init__(self, engine: xr.Engine, rank: int, world: int, near: Near, far: Far | None) -> None:
        self._engine = engine
        self._near, self._far = near, far
        self._others = [other for other in range(world) if other != rank]
        self._number = 0
        self._next_look_s = 0.0
        self._seen: dict[int, tuple[int, float]] = {}  # by rank: the number of the note that stands, and since when
        self._returned: dict[int, int] = {}  # by rank: the number of the last note that due() returned

    def post(self, words: str) -> None:
        """Puts it in the place of our last note."""
        self._number += 1
        body = struct.pack("<I", self._number) + words.encode(errors="replace")[:_WORDS_BYTES].ljust(
            _WORDS_BYTES, b"\0"
        )
        data = struct.pack("<I", zlib.crc32(body)) + body
        self._near.note(data)
        if self._far is not None and not self._engine.closed:
            self._far.note(data)

    def words_of(self, rank: int) -> str:
        """Of that rank's note; "" if none stands."""
        note = self._note_of(rank)
        return "" if note is None else note.words

    def due(self, is_missing: Callable[[int], bool]) -> Note | None:
        """A note that has stood for a while, of a rank whose part is missing. Each is returned once."""
        now_s = self._engine._now_s
        if now_s < self._next_look_s:
            return None
        self._next_look_s = now_s + _LOOK_EVERY_S
        for rank in self._others:
            note = self._note_of(rank)
            if note is None or not note.words or self._returned.get(rank) == note.number or not is_missing(rank):
                continue
            number, since_s = self._seen.get(rank, (0, 0.0))
            if number != note.number:
                self._seen[rank] = note.number, now_s
            elif now_s >= since_s + _MEND_S:
                self._returned[rank] = note.number
                return note
        return None

    def _note_of(self, rank: int) -> Note | None:
        data = link_of(self._near, self._far, rank).note_of(rank)
        checksum, number = _HEADER.unpack_from(data)
        if checksum != zlib.crc32(data[4:]):
            return None
        return Note(rank, number, text_of_peer(data[_HEADER.size :].partition(b"\0")[0]))

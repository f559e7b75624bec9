"""Which ranks of a group are left, and the records that ranks exchange until they agree. Plain data, nothing waits.

Words: a *half* is one round's dispatch or combine; its *mark* is 2 * ordinal of the round, plus 1 for combine. Marks of
rounds of one parity grow in the order in which their halves happen. `lasts` of a masked rank: of each parity the mark
of the last half that it is part of, at every rank alike.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

DISPATCH, COMBINE = 0, 1
Lasts = tuple[int, int]  # by parity

_HEAD = struct.Struct("<8sIQ")  # a hash of all that follows, the length of the text, a number that grows
_RECORD_BYTES, _RANK_BYTES = 512, 220  # of a record, and of each rank in it: marks of 13 digits


@dataclass(frozen=True)
class View:
    """number: decisions so far. members: ranks that go on, ascending. lasts: of each rank that is masked."""

    number: int
    members: tuple[int, ...]
    lasts: Mapping[int, Lasts]

    def absent(self, mark: int) -> tuple[int, ...]:
        """Masked ranks that are not part of that half."""
        parity = mark // 2 % 2
        return tuple(sorted(rank for rank, lasts in self.lasts.items() if lasts[parity] < mark))

    def is_quorum(self, ranks: Iterable[int]) -> bool:
        """Whether these members may decide for all: more than half, or half with the lowest among them.

        Of any two quorums of a view some rank is in both. (Dynamic-linear voting: Jajodia and Mutchler, 1987.)
        """
        some = set(ranks)
        return 2 * len(some) > len(self.members) or (2 * len(some) == len(self.members) and self.members[0] in some)


@dataclass(frozen=True)
class Record:
    """Everything that a rank says about who is left. Each record replaces the one before.

    suspects: members that it has lost sight of. promised: the greatest ballot that it has answered, 0: none. got: by
    rank, lasts as far as it had all when it promised. accepted: a ballot and the view that it would bring. proposal: a
    ballot of its own, and the view that it asks to accept, None while it asks for promises.
    """

    rank: int
    view: View
    suspects: frozenset[int] = frozenset()
    promised: int = 0
    got: tuple[Lasts, ...] = ()
    accepted: tuple[int, View] | None = None
    proposal: tuple[int, View | None] | None = None

    def encode(self, serial: int) -> bytes:
        """As it lies in memory: whoever reads it while it is being written can tell. serial: greater for each one."""
        fields = [
            self.rank, _plain(self.view), sorted(self.suspects), self.promised, self.got,
            self.accepted and [self.accepted[0], _plain(self.accepted[1])],
            self.proposal and [self.proposal[0], self.proposal[1] and _plain(self.proposal[1])],
        ]  # fmt: skip
        text = json.dumps(fields, separators=(",", ":")).encode()
        head = struct.pack("<IQ", len(text), serial)
        return _digest(head + text) + head + text

    @classmethod
    def decode(cls, data: bytes) -> tuple[int, Record] | None:
        """The inverse, serial first; None for bytes that are no whole record: zeros, or one that is being written."""
        if len(data) < _HEAD.size:
            return None
        digest, length, serial = _HEAD.unpack_from(data)
        text = data[_HEAD.size : _HEAD.size + length]
        if len(text) < length or _digest(data[8 : _HEAD.size] + text) != digest:
            return None
        rank, view, suspects, promised, got, accepted, proposal = json.loads(text)
        return serial, cls(
            rank, _view(view), frozenset(suspects), promised, tuple((one[0], one[1]) for one in got),
            accepted and (accepted[0], _view(accepted[1])),
            proposal and (proposal[0], proposal[1] and _view(proposal[1])),
        )  # fmt: skip


def record_bytes(world: int) -> int:
    """Room for any record of so many ranks."""
    return -(-(_RECORD_BYTES + _RANK_BYTES * world) // 64) * 64


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=8).digest()


def _plain(view: View) -> list[object]:
    return [view.number, list(view.members), [[rank, *lasts] for rank, lasts in sorted(view.lasts.items())]]


def _view(plain: list[Any]) -> View:
    number, members, lasts = plain
    return View(number, tuple(members), {rank: (even, odd) for rank, even, odd in lasts})

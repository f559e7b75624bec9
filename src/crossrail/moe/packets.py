"""The packets that ranks of an EngineGroup exchange. Nothing waits here."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import crossrail as xr

PART_BYTES = 16 << 10
_MAGIC = b"xrm4"
_NAME_BYTES = 8
_ID_BYTES = 8  # of an incarnation; the rest adds nothing for who reads it
# magic, kind, whose group, which of theirs, number of the exchange, rank of the sender, part, parts
_HEADER = struct.Struct("<4sI8sIIIII")
# Of an ELSEWHERE: the sender's own call, whether it has had the other's group, ranks of its own.
_ELSEWHERE = struct.Struct("<8sII?I")
_FAILED = struct.Struct("<8s8sII")  # of a FAILED: who strayed, and its call

PACKET_BYTES_MAX = _HEADER.size + PART_BYTES


class Kind(IntEnum):
    """GIVEN: what a rank gives in a call. HAS_ALL: it has what all gave there, and waits to hear that of the others.
    ELSEWHERE: it waits in another group, while it is missed in this call. FAILED: its call has failed; why, as text.
    """

    GIVEN = 0
    HAS_ALL = 1
    ELSEWHERE = 2
    FAILED = 3


_KINDS = frozenset(Kind)
_LEAST_BYTES = {Kind.ELSEWHERE: _ELSEWHERE.size, Kind.FAILED: _FAILED.size}


class Call(NamedTuple):
    """One all_gather. name: of the group, which is that of all groups of the same addresses. number: which of them;
    a rank that gives up takes a higher one. exchange: of the group's, from 0.
    """

    name: bytes
    number: int
    exchange: int


class Packet(NamedTuple):
    """call: of which it tells; the receiver's in ELSEWHERE, the sender's in the others. rank: of the sender, in its own
    group.
    """

    kind: Kind
    call: Call
    rank: int
    part: int
    parts: int
    body: bytes

    def to_bytes(self) -> bytes:
        return _HEADER.pack(_MAGIC, self.kind, *self.call, self.rank, self.part, self.parts) + self.body

    @classmethod
    def from_bytes(cls, data: bytes) -> Packet | None:
        """The packet; None if it is no packet of a group."""
        if len(data) < _HEADER.size or data[: len(_MAGIC)] != _MAGIC:
            return None
        _, kind, name, number, exchange, rank, part, parts = _HEADER.unpack_from(data)
        body = data[_HEADER.size :]
        if kind not in _KINDS or not part < parts or len(body) < _LEAST_BYTES.get(kind, 0):
            return None
        return cls(Kind(kind), Call(name, number, exchange), rank, part, parts, body)


def given(call: Call, rank: int, data: bytes) -> list[Packet]:
    """A rank's data, in as many parts as it takes."""
    parts = max(1, -(-len(data) // PART_BYTES))
    return [
        Packet(Kind.GIVEN, call, rank, part, parts, data[part * PART_BYTES : (part + 1) * PART_BYTES])
        for part in range(parts)
    ]


class Elsewhere(NamedTuple):
    """What an ELSEWHERE says. call: in which its sender waits. has_had: its sender was in the receiver's group before.
    ids: of all ranks of the sender's group, their incarnations; names: of as many as had room.
    """

    call: Call
    has_had: bool
    ids: tuple[bytes, ...]
    names: tuple[str, ...]

    def to_bytes(self) -> bytes:
        """At most PART_BYTES; ids of more ranks than fit are left out."""
        ids = b"".join(self.ids)
        packed = _ELSEWHERE.pack(*self.call, self.has_had, len(self.ids)) + ids + "\0".join(self.names).encode()
        return packed[:PART_BYTES]

    @classmethod
    def from_bytes(cls, body: bytes) -> Elsewhere:
        """body: of a Packet, which is long enough."""
        name, number, exchange, has_had, size = _ELSEWHERE.unpack_from(body)
        end = min(_ELSEWHERE.size + size * _ID_BYTES, len(body))
        ids = tuple(body[at : at + _ID_BYTES] for at in range(_ELSEWHERE.size, end, _ID_BYTES))
        names = tuple(body[end:].decode(errors="replace").split("\0")) if end < len(body) else ()
        return cls(Call(name, number, exchange), has_had, ids, names)

    def difference(self, addresses: Sequence[xr.Address]) -> str:
        """Between the sender's addresses and ours: how many, and the first that is another one."""
        ours, theirs = ids_of(addresses), self.ids
        counts = f"{len(theirs)} addresses there, {len(ours)} here"
        common = min(len(ours), len(theirs))
        rank = next((rank for rank in range(common) if ours[rank] != theirs[rank]), common)
        if rank == len(ours) == len(theirs):
            return f"{counts}, of the same engines, with other endpoints"
        there, here = "nobody", "nobody"
        if rank < len(theirs):
            there = f"{self.names[rank] if rank < len(self.names) else '?'!r} ({theirs[rank].hex()[:8]})"
        if rank < len(ours):
            here = f"{addresses[rank].name!r} ({ours[rank].hex()[:8]})"
        return f"{counts}; rank {rank} is {there} there, {here} here"


class Stray(NamedTuple):
    """A rank that was in a call of another group. who: as in ids_of()."""

    who: bytes
    call: Call


class Failed(NamedTuple):
    """The contents of FAILED: the rank that caused it, and the error as text."""

    stray: Stray
    why: str

    def to_bytes(self) -> bytes:
        return (_FAILED.pack(self.stray.who, *self.stray.call) + self.why.encode())[:PART_BYTES]

    @classmethod
    def from_bytes(cls, body: bytes) -> Failed:
        """body: of a Packet, which is long enough."""
        who, name, number, exchange = _FAILED.unpack_from(body)
        return cls(Stray(who, Call(name, number, exchange)), body[_FAILED.size :].decode(errors="replace"))


def name_of(addresses: Sequence[xr.Address]) -> bytes:
    """The name of a group: the same for the same addresses in the same order. A reopened engine makes another group."""
    return hashlib.blake2b(b"".join(map(bytes, addresses)), digest_size=_NAME_BYTES).digest()


def ids_of(addresses: Sequence[xr.Address]) -> tuple[bytes, ...]:
    """Ids by rank, as Elsewhere has them."""
    return tuple(bytes.fromhex(address.incarnation)[:_ID_BYTES] for address in addresses)

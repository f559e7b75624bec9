"""Halves of requests whose other half does not come: what the fronts of both servers know, for the prefiller's ranks.

A router sends each request to a prefill and a decode server. SGLang may refuse a half before a rank hears of it, and a
half may get lost on its way; then the other one would wait in vain. The bootstrap server, in the process of the prefill
server's front, gathers what ranks must know, and tells it with the answers to their registrations:

    refused by the prefill server      front.py there
    refused by the decode server       front.py there, by PUT /refused
    never came to the prefill server   ranks say which rooms a decoder waits for; the front says which of them it had
"""

from __future__ import annotations

import secrets
from collections import deque
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from crossrail._latest import Latest
from crossrail.errors import UsageError
from crossrail.integrations.instance import opened_line, sealed_line
from crossrail.kv import messages as m

_PURPOSE = b"crossrail sglang refusals"
_OVERDUE_PURPOSE = b"crossrail sglang overdue rooms"
_REFUSALS_MAX = 1024
_ROOMS_MAX = 1 << 16
OVERDUE_MAX = 256  # rooms that a rank asks about at a time
LOST = (
    "the prefill server has not got its half of the request, which its decode server has had for over "
    "{after_s:g} s (other_half_s): has the router sent it there?"
)

Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class Refused(Struct, frozen=True):
    """A half that was refused before a rank heard of it: too long, one too many, malformed. Or that is lost.

    number: of this refusal, drawn at random; it is told again and again. room: the other half waits for it.
    by_decoder: it was the decode server's half.
    """

    number: Number
    room: Number
    why: m.Text
    by_decoder: bool = False


class Overdue(Struct, frozen=True):
    """Rooms that decoders have waited for longer than after_s, and that SGLang has not shown to this rank."""

    rooms: Annotated[list[Number], Meta(max_length=OVERDUE_MAX)]
    after_s: m.Seconds

    def to_line(self, secret: bytes) -> str:
        return sealed_line(msgspec.msgpack.encode(self), secret, _OVERDUE_PURPOSE)

    @classmethod
    def from_line(cls, line: str, secret: bytes) -> Overdue:
        """Raises UsageError for what nobody with the secret has made."""
        try:
            return msgspec.msgpack.decode(opened_line(line, secret, _OVERDUE_PURPOSE), type=cls)
        except msgspec.MsgspecError as error:
            raise UsageError(f"malformed rooms: {error}") from None


def refusal(room: int, why: str, *, by_decoder: bool = False) -> Refused:
    """A new one."""
    return Refused(secrets.randbits(62), room, m.clipped(why), by_decoder)


def to_line(refusals: list[Refused], secret: bytes) -> str:
    return sealed_line(msgspec.msgpack.encode(refusals), secret, _PURPOSE)


def from_line(line: str, secret: bytes) -> list[Refused]:
    """Raises UsageError for what nobody with the secret has made."""
    try:
        return msgspec.msgpack.decode(opened_line(line, secret, _PURPOSE), type=list[Refused])
    except msgspec.MsgspecError as error:
        raise UsageError(f"malformed refusals: {error}") from None


class Halves:
    """What the ranks of one prefill server have to know. Threads: one."""

    def __init__(self) -> None:
        self._latest: deque[tuple[Refused, float]] = deque(maxlen=_REFUSALS_MAX)  # and when
        self._came: Latest[int, None] = Latest(_ROOMS_MAX)
        self.sees_all = False  # the front tells of every room that comes

    def come(self, room: int) -> None:
        """The front has got a request of this room."""
        self._came[room] = None

    def add(self, refused: Refused, now_s: float) -> None:
        self._latest.append((refused, now_s))

    def look_for(self, overdue: Overdue, now_s: float, told_for_s: float) -> None:
        """Rooms that never came are refused, once for all ranks that ask while it is told."""
        if not self.sees_all:
            return
        told = {refused.room for refused in self.recent(now_s, told_for_s)}
        for room in overdue.rooms:
            if room not in self._came and room not in told:
                self.add(refusal(room, LOST.format(after_s=overdue.after_s)), now_s)

    def recent(self, now_s: float, told_for_s: float) -> list[Refused]:
        """Those of the last told_for_s: who hears them may have missed them when they were last told."""
        return [refused for refused, since_s in self._latest if now_s - since_s < told_for_s]

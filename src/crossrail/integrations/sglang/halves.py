"""Halves of requests whose other half does not come: what the fronts of both servers know, for the prefiller's ranks.

A router sends each request to a prefill and a decode server. SGLang may refuse a half before a rank hears of it, and a
half may get lost on its way; then the other one would wait in vain. The bootstrap server, in the process of the prefill
server's front, gathers what ranks must know, and tells it with the answers to their registrations:

    refused by the prefill server      front.py there
    refused by the decode server       front.py there, by PUT /refused
    never came to the prefill server   ranks say which rooms a decoder waits for; the front says which of them it had
    never came to a decode server,     ranks say which rooms no decoder has asked for; fronts of decode servers say
    or is lost with it                 which they have, again and again, by PUT /held
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
_HELD_PURPOSE = b"crossrail sglang held rooms"
_REFUSALS_MAX = 1024
_ROOMS_MAX = 1 << 16
OVERDUE_MAX = 256  # rooms of each kind that a rank asks about at a time
HELD_MAX = 4096  # rooms in a line
LOST = (
    "the prefill server has not got its half of the request, which its decode server has had for over "
    "{after_s:g} s (other_half_s): has the router sent it there?"
)
UNASKED = (
    "no decode server has the other half of the request, which the prefill server has had for over {after_s:g} s "
    "(other_half_s): has the router sent it to one, and does that one still run?"
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
    """Rooms that decoders have waited for longer than after_s, and that SGLang has not shown to this rank.

    unasked: those that SGLang has shown to it for as long, and that no decoder has asked for.
    """

    rooms: Annotated[list[Number], Meta(max_length=OVERDUE_MAX)]
    after_s: m.Seconds
    unasked: Annotated[list[Number], Meta(max_length=OVERDUE_MAX)] = []

    def to_line(self, secret: bytes) -> str:
        return sealed_line(msgspec.msgpack.encode(self), secret, _OVERDUE_PURPOSE)

    @classmethod
    def from_line(cls, line: str, secret: bytes) -> Overdue:
        """Raises UsageError for what nobody with the secret has made."""
        try:
            return msgspec.msgpack.decode(opened_line(line, secret, _OVERDUE_PURPOSE), type=cls)
        except msgspec.MsgspecError as error:
            raise UsageError(f"malformed rooms: {error}") from None


class Held(Struct, frozen=True):
    """Rooms of the requests that a decode server's front has now."""

    rooms: Annotated[list[Number], Meta(max_length=HELD_MAX)]

    def to_line(self, secret: bytes) -> str:
        return sealed_line(msgspec.msgpack.encode(self), secret, _HELD_PURPOSE)

    @classmethod
    def from_line(cls, line: str, secret: bytes) -> Held:
        """Raises UsageError for what nobody with the secret has made."""
        try:
            return msgspec.msgpack.decode(opened_line(line, secret, _HELD_PURPOSE), type=cls)
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
        self._held: Latest[int, float] = Latest(_ROOMS_MAX)  # by decode servers, and when that was last said
        self._held_since_s: float | None = None  # when it was first said of any
        self.sees_all = False  # the front tells of every room that comes

    def come(self, room: int) -> None:
        """The front has got a request of this room."""
        self._came[room] = None

    def hold(self, held: Held, now_s: float) -> None:
        """A decode server's front has these."""
        if self._held_since_s is None:
            self._held_since_s = now_s
        for room in held.rooms:
            self._held[room] = now_s
            self._held.move_to_end(room)

    def add(self, refused: Refused, now_s: float) -> None:
        self._latest.append((refused, now_s))

    def look_for(self, overdue: Overdue, now_s: float, told_for_s: float) -> None:
        """Rooms whose other half is lost are refused, once for all ranks that ask while it is told."""
        told = {refused.room for refused in self.recent(now_s, told_for_s)}
        for room in overdue.rooms if self.sees_all else ():
            if room not in self._came and room not in told:
                self.add(refusal(room, LOST.format(after_s=overdue.after_s)), now_s)
        for room in overdue.unasked:
            if room not in told and self._is_unheld(room, now_s, max(overdue.after_s, told_for_s)):
                self.add(refusal(room, UNASKED.format(after_s=overdue.after_s), by_decoder=True), now_s)

    def _is_unheld(self, room: int, now_s: float, for_s: float) -> bool:
        """Whether no decode server has said for so long that it has it. Never before one has said that it has any: it
        may be an older one, which does not, or this server may just have been restarted.
        """
        return self._held_since_s is not None and now_s - self._held.get(room, self._held_since_s) > for_s

    def recent(self, now_s: float, told_for_s: float) -> list[Refused]:
        """Those of the last told_for_s: who hears them may have missed them when they were last told."""
        return [refused for refused, since_s in self._latest if now_s - since_s < told_for_s]

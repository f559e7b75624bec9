"""The messages between `push` and `serve`: small JSON objects, checked field by field before anything uses them.

Life of a push: Offer -> Accept (or Refuse); then the pusher writes segment k of the file into slot k % slots of the
region named by Accept, counting pages on that slot's immediate; the server stores the segment and answers Stored, which
frees the slot. After the last segment the pusher sends End with its checksum; the server compares, gives the file its
name and answers Done, or Failed. Abort from the pusher ends it at any time.

Messages may overtake each other and the data: nothing here depends on their order. The server knows how many pages a
segment has from the length in the offer.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

from crossrail.errors import CrossrailError

MESSAGE_BYTES_MAX = 8 * 1024
PATH_BYTES_MAX = 1024
FILE_BYTES_MAX = 1 << 50
SLOTS_MAX = 64
SLOT_BYTES_MAX = 1 << 30
_TEXT_BYTES_MAX = 4096
_IMM_MAX = (1 << 28) - 1


class ProtocolError(CrossrailError):
    """Bytes from the other side that are no message of this protocol."""


@dataclass(frozen=True)
class Message:
    """Of one push. push: the pusher's number for it, repeated in every message about it."""

    kind: ClassVar[str]
    push: int

    def check(self) -> None:
        """Raises ProtocolError when a field is out of bounds. Types have been checked before."""
        _check_range("push", self.push, 0, (1 << 63) - 1)


@dataclass(frozen=True)
class Offer(Message):
    """Pusher: may I store `nbytes` as `dst`? dst: relative to the served directory. mode: permission bits."""

    kind: ClassVar[str] = "offer"
    dst: str
    nbytes: int
    mode: int
    force: bool

    def check(self) -> None:
        """Bounds; the path itself is the inbox's to judge."""
        super().check()
        _check_text("dst", self.dst, PATH_BYTES_MAX)
        _check_range("nbytes", self.nbytes, 0, FILE_BYTES_MAX)
        _check_range("mode", self.mode, 0, 0o7777)


@dataclass(frozen=True)
class Accept(Message):
    """Server: write here. region: descriptor in hex, empty for an empty file. imms: one per slot."""

    kind: ClassVar[str] = "accept"
    region: str
    page_bytes: int
    slot_bytes: int
    imms: list[int]

    def check(self) -> None:
        """Bounds, and that the numbers go together."""
        super().check()
        _check_text("region", self.region, _TEXT_BYTES_MAX)
        _check_range("slot_bytes", self.slot_bytes, 1, SLOT_BYTES_MAX)
        _check_range("page_bytes", self.page_bytes, 1, self.slot_bytes)
        if self.slot_bytes % self.page_bytes != 0:
            raise ProtocolError(f"slot_bytes {self.slot_bytes} is no multiple of page_bytes {self.page_bytes}")
        _check_range("number of imms", len(self.imms), 0, SLOTS_MAX)
        for imm in self.imms:
            _check_range("imm", imm, 0, _IMM_MAX)


@dataclass(frozen=True)
class Refuse(Message):
    """Server: no, and why."""

    kind: ClassVar[str] = "refuse"
    reason: str


@dataclass(frozen=True)
class Stored(Message):
    """Server: segment `segment` was stored; its slot is free."""

    kind: ClassVar[str] = "stored"
    segment: int

    def check(self) -> None:
        """Bounds."""
        super().check()
        _check_range("segment", self.segment, 0, FILE_BYTES_MAX)


@dataclass(frozen=True)
class End(Message):
    """Pusher: that was all, and this is its SHA-256 in hex."""

    kind: ClassVar[str] = "end"
    sha256: str


@dataclass(frozen=True)
class Done(Message):
    """Server: the file has its name. sha256: of what was stored."""

    kind: ClassVar[str] = "done"
    path: str
    sha256: str


@dataclass(frozen=True)
class Failed(Message):
    """Server: it went wrong, and nothing was stored."""

    kind: ClassVar[str] = "failed"
    reason: str


@dataclass(frozen=True)
class Abort(Message):
    """Pusher: forget it. No write of this push is under way any more."""

    kind: ClassVar[str] = "abort"


_KINDS: dict[str, type[Message]] = {
    kind.kind: kind for kind in (Offer, Accept, Refuse, Stored, End, Done, Failed, Abort)
}
# What `from __future__ import annotations` leaves of the field types.
_TYPES: dict[str, type] = {"int": int, "str": str, "bool": bool, "list[int]": list}


def encode(message: Message) -> bytes:
    """The message as bytes. Texts that are free to be long are cut."""
    content = {"kind": message.kind, **asdict(message)}
    if "reason" in content:
        content["reason"] = content["reason"][: _TEXT_BYTES_MAX // 4]
    return json.dumps(content, ensure_ascii=True).encode()


def decode(data: bytes) -> Message:
    """The message. ProtocolError for anything else than exactly its fields, of their types, within bounds."""
    if len(data) > MESSAGE_BYTES_MAX:
        raise ProtocolError(f"message of {len(data)} bytes is longer than {MESSAGE_BYTES_MAX}")
    try:
        content: Any = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"message is not JSON: {error}") from None
    if not isinstance(content, dict) or not isinstance(content.get("kind"), str):
        raise ProtocolError("message is not an object with a kind")
    kind = _KINDS.get(content.pop("kind"))
    if kind is None:
        raise ProtocolError("message is of no known kind")
    return _build(kind, content)


def _build(kind: type[Message], content: dict[str, Any]) -> Message:
    expected = {field.name: _TYPES[str(field.type)] for field in fields(kind)}
    if content.keys() != expected.keys():
        raise ProtocolError(f"{kind.kind} must have exactly the fields {', '.join(expected)}")
    for name, value in content.items():
        # type(), not isinstance: a bool is an int to isinstance.
        if type(value) is not expected[name]:
            raise ProtocolError(f"{name} of {kind.kind} must be of type {expected[name].__name__}")
        if isinstance(value, list) and not all(type(item) is int for item in value):
            raise ProtocolError(f"{name} of {kind.kind} must hold integers")
        if isinstance(value, str):
            _check_text(name, value, _TEXT_BYTES_MAX)
    message = kind(**content)
    message.check()
    return message


def _check_range(name: str, value: int, at_least: int, at_most: int) -> None:
    if not at_least <= value <= at_most:
        raise ProtocolError(f"{name} is {value} and must be {at_least} to {at_most}")


def _check_text(name: str, value: str, bytes_max: int) -> None:
    """Bounded, and encodable: JSON lets lone surrogates in."""
    try:
        length = len(value.encode())
    except UnicodeEncodeError:
        raise ProtocolError(f"{name} is not valid Unicode") from None
    if length > bytes_max:
        raise ProtocolError(f"{name} has {length} bytes and may have {bytes_max}")


@dataclass(frozen=True)
class Layout:
    """How a file is cut: segments of the slots' length, each in pages, the last page of the last one maybe shorter."""

    nbytes: int
    slot_bytes: int
    page_bytes: int

    @property
    def segments(self) -> int:
        """How many there are; 0 for an empty file."""
        return -(-self.nbytes // self.slot_bytes)

    def segment_bytes(self, segment: int) -> int:
        """Length of one."""
        return min(self.slot_bytes, self.nbytes - segment * self.slot_bytes)

    def segment_pages(self, segment: int) -> int:
        """Pages of one: what its immediate counts."""
        return -(-self.segment_bytes(segment) // self.page_bytes)

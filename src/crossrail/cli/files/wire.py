"""The messages between `push` and `serve`: small JSON objects, of which nothing is used before all of it is
checked.

Life of a push: Offer -> Accept (or Refuse); then the pusher writes segment k of the file into slot k % slots of the
region named by Accept, counting pages on that slot's immediate; the server stores the segment and answers Stored, which
frees the slot. After the last segment the pusher sends End with its checksum; the server compares, gives the file its
name and answers Done, or Failed. Abort from the pusher ends it at any time.

Messages may overtake each other and the data: nothing here depends on their order. The server knows how many pages a
segment has from the length in the offer.

Each message carries the version of this protocol and the release of crossrail. Of another version's message nothing
else is looked at but whose push it is about, so that a serve can refuse it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from crossrail import __version__
from crossrail.errors import CrossrailError

VERSION = 1
MESSAGE_BYTES_MAX = 8 * 1024
PATH_BYTES_MAX = 1024
FILE_BYTES_MAX = 1 << 50
SLOTS_MAX = 64
SLOT_BYTES_MAX = 1 << 30
_REASON_MAX = 1024

_Text = Annotated[str, Meta(max_length=4096)]
_Hex = Annotated[str, Meta(max_length=4096, pattern="^([0-9a-f][0-9a-f])*$")]
_Sha256 = Annotated[str, Meta(max_length=64)]
_SlotBytes = Annotated[int, Meta(ge=1, le=SLOT_BYTES_MAX)]


class ProtocolError(CrossrailError):
    """Bytes from the other side that are no message of this protocol."""


class OtherVersion(ProtocolError):
    """A message of another version. push: which one it is about; None: it does not say."""

    def __init__(self, version: int, release: str, push: int | None) -> None:
        super().__init__(
            f"the other side is crossrail {release or '(of an unknown release)'}, which speaks version {version} of "
            f"pushes, and this one crossrail {__version__}, which speaks version {VERSION}: use one release on both"
        )
        self.push = push


_Push = Annotated[int, Meta(ge=0, lt=1 << 62)]
_Release = Annotated[str, Meta(max_length=64)]


class _Stamp(msgspec.Struct):
    """The fields that messages of all versions have."""

    version: int = 0
    release: _Release = ""
    push: _Push | None = None


class _Stamped(msgspec.Struct, tag_field="kind", forbid_unknown_fields=True, kw_only=True):
    version: int = VERSION
    release: _Release = __version__


class _Message(_Stamped):
    """A message about one push. push: the pusher's number for it, repeated in every message about it."""

    push: _Push


class Offer(_Message, tag="offer"):
    """Pusher: may I store `nbytes` as `dst`? dst: relative to the served directory. mode: permission bits.

    The path itself is the inbox's to judge.
    """

    dst: Annotated[str, Meta(max_length=PATH_BYTES_MAX)]
    nbytes: Annotated[int, Meta(ge=0, le=FILE_BYTES_MAX)]
    mode: Annotated[int, Meta(ge=0, le=0o7777)]
    force: bool


class Accept(_Message, tag="accept"):
    """Server: write here. region: descriptor in hex, empty for an empty file. imms: one per slot."""

    region: _Hex
    page_bytes: _SlotBytes
    slot_bytes: _SlotBytes
    imms: Annotated[list[Annotated[int, Meta(ge=0, lt=1 << 28)]], Meta(max_length=SLOTS_MAX)]

    def __post_init__(self) -> None:
        if self.slot_bytes % self.page_bytes != 0:
            raise ValueError(f"slot_bytes {self.slot_bytes} is not a multiple of page_bytes {self.page_bytes}")


class Refuse(_Message, tag="refuse"):
    """Server: no, and why."""

    reason: _Text


class Stored(_Message, tag="stored"):
    """Server: segment `segment` was stored; its slot is free."""

    segment: Annotated[int, Meta(ge=0, le=FILE_BYTES_MAX)]


class End(_Message, tag="end"):
    """Pusher: that was all, and this is its SHA-256 in hex."""

    sha256: _Sha256


class Done(_Message, tag="done"):
    """Server: the file has its name. sha256: of what was stored."""

    path: _Text
    sha256: _Sha256


class Failed(_Message, tag="failed"):
    """Server: it went wrong, and nothing was stored."""

    reason: _Text


class Abort(_Message, tag="abort"):
    """Pusher: forget it. No write of this push is under way any more."""


Message = Offer | Accept | Refuse | Stored | End | Done | Failed | Abort

_stamps: msgspec.json.Decoder[_Stamp] = msgspec.json.Decoder(_Stamp)
_decoder: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)


def encode(message: Message) -> bytes:
    """The message as bytes. A reason, which is free to be long and to hold any name, is cut and made Unicode."""
    if isinstance(message, (Refuse, Failed)):
        reason = message.reason[:_REASON_MAX].encode(errors="replace").decode()
        message = msgspec.structs.replace(message, reason=reason)
    return msgspec.json.encode(message)


def decode(data: bytes) -> Message:
    """The message. ProtocolError for anything else than exactly its fields, of their types, within bounds; OtherVersion
    for one of another version, whatever its fields.
    """
    if len(data) > MESSAGE_BYTES_MAX:
        raise ProtocolError(f"message of {len(data)} bytes is longer than {MESSAGE_BYTES_MAX}")
    try:
        stamp = _stamps.decode(data)
        if stamp.version != VERSION:
            raise OtherVersion(stamp.version, stamp.release, stamp.push)
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"not a valid message of a push: {error}") from None


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

"""Where a rank's registered memory is, as a line of text: checkpoint-engine calls it the address, `p2p_store_addr`.

It travels in checkpoint-engine's metas, in memory, as JSON and in files, to whoever reads the weights. So it contains
everything that a reader needs: nobody at the owner answers questions. It is "<ip>:<line>", as checkpoint-engine's own
is "<ip>:<port>": the part before the colon tells hosts apart. The line is sealed with the secret that all share.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta, Struct

from crossrail.errors import UsageError
from crossrail.integrations.instance import opened_line, sealed_line
from crossrail.regions import RegionDescriptor

VERSION = 1
REGIONS_MAX = 65536
_LINE_MAX = 1 << 26
_PURPOSE = b"crossrail checkpoint-engine place"


class _Memory(Struct, frozen=True, array_like=True):
    base: Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]
    descriptor: Annotated[bytes, Meta(max_length=4096)]


class _Place(Struct, frozen=True):
    version: int
    memory: Annotated[list[_Memory], Meta(max_length=REGIONS_MAX)]


class Range(NamedTuple):
    """One registered range of the owner's memory: where it begins there, and what peers read it by."""

    base: int
    descriptor: RegionDescriptor


def to_text(ip: str, ranges: list[Range], secret: bytes) -> str:
    """UsageError when there are too many ranges."""
    if len(ranges) > REGIONS_MAX:
        raise UsageError(f"{len(ranges)} buffers are registered, at most {REGIONS_MAX} can be described to readers")
    memory = [_Memory(base, bytes(descriptor)) for base, descriptor in ranges]
    return f"{ip}:{sealed_line(msgspec.msgpack.encode(_Place(VERSION, memory)), secret, _PURPOSE)}"


def from_text(text: str, secret: bytes) -> list[Range]:
    """The inverse. UsageError for anything that nobody with the secret has made, and for another version."""
    _, colon, line = text.partition(":")
    if not colon or len(line) > _LINE_MAX:
        raise UsageError(f"{text!r:.80} is not where a rank of crossrail's parameter server has its memory")
    body = opened_line(line, secret, _PURPOSE)
    try:
        place = msgspec.msgpack.decode(body, type=_Place)
    except msgspec.MsgspecError as error:
        raise UsageError(f"malformed description of a rank's memory: {error}") from None
    if place.version != VERSION:
        raise UsageError(
            f"a rank's memory is described in version {place.version}, ours is {VERSION}: update the older"
        )
    return [Range(each.base, RegionDescriptor.from_bytes(each.descriptor)) for each in place.memory]


def find(ranges: list[Range], address: int, nbytes: int) -> tuple[RegionDescriptor, int]:
    """The descriptor of the range that holds these bytes of the owner, and the offset there. UsageError: none does."""
    for base, descriptor in ranges:
        if base <= address and address + nbytes <= base + descriptor.nbytes:
            return descriptor, address - base
    raise UsageError(f"{nbytes} bytes at {address:#x} are in none of the owner's {len(ranges)} registered buffers")

"""Forged addresses and descriptors: their wire form taken apart and sealed again, as a faulty peer might.

Layout (native/transport/descriptor.cc): magic u32, version u16, transport u8, incarnation 16 bytes, name and host each
with a length byte, pid u32, rails u8; for a descriptor then region id u64, length u64, access u8; at the end a 32-bit
FNV-1a of all before it. Little-endian.
"""

import struct

CHECKSUM_BYTES = 4
VERSION_AT = 4
TRANSPORT_AT = 6
NAME_AT = 23
# Counted from the end, the checksum included.
REGION_ID_AT = -21
LENGTH_AT = -13
ACCESS_AT = -5


def checksum(data: bytes) -> int:
    value = 2166136261
    for byte in data:
        value = ((value ^ byte) * 16777619) & 0xFFFFFFFF
    return value


def sealed(body: bytes) -> bytes:
    """`body` (all but the checksum) with the checksum it needs to pass."""
    return body + struct.pack("<I", checksum(body))


def resealed(data: bytes) -> bytes:
    """The same with a right checksum after someone changed it."""
    return sealed(data[:-CHECKSUM_BYTES])


def make_address(name: bytes = b"made up", rails: int = 1) -> bytes:
    return sealed(b"XRAA" + _address_body(name, rails))


def make_descriptor(name: bytes = b"made up", rails: int = 1, nbytes: int = 4096) -> bytes:
    return sealed(b"XRRD" + _address_body(name, rails) + struct.pack("<QQB", 5, nbytes, 3))


def _address_body(name: bytes, rails: int) -> bytes:
    host = b"a host"
    incarnation = bytes(range(16))
    texts = bytes([len(name)]) + name + bytes([len(host)]) + host
    return struct.pack("<HB", 1, 1) + incarnation + texts + struct.pack("<IB", 4711, rails)


def with_bytes(data: bytes, at: int, new: bytes) -> bytes:
    """`data` with `new` at offset `at` (negative: from the end), resealed."""
    start = at % len(data)
    return resealed(data[:start] + new + data[start + len(new) :])


def with_length(descriptor: bytes, nbytes: int) -> bytes:
    return with_bytes(descriptor, LENGTH_AT, struct.pack("<Q", nbytes))


def with_access(descriptor: bytes, access: int) -> bytes:
    return with_bytes(descriptor, ACCESS_AT, bytes([access]))


def with_region_id(descriptor: bytes, region_id: int) -> bytes:
    return with_bytes(descriptor, REGION_ID_AT, struct.pack("<Q", region_id))


def with_version(data: bytes, version: int) -> bytes:
    return with_bytes(data, VERSION_AT, struct.pack("<H", version))


def with_transport(data: bytes, transport: int) -> bytes:
    return with_bytes(data, TRANSPORT_AT, bytes([transport]))

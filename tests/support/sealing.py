"""Forged addresses and descriptors: their wire form taken apart and sealed again, as a faulty peer might.

Layout (native/transport/descriptor.cc): magic u32, version u16, transports u32 (mask), incarnation 16 bytes, name and
host each with a length byte, network namespace u64, pid u32, rails u8, number of endpoints u8, endpoints (family u8, ip
of 4 or 16 bytes, port u16, prefix u8, speed u32); then for verbs, and for ofi, if in the mask: fabric with a length
byte, number of rails u8, rails (endpoint with a length byte, speed u32). For a descriptor then the same two again: base
u64, a key u64 for each rail; and region id u64, length u64, access u8, kind of memory u8. At the end a 32-bit FNV-1a of
all before it. Little-endian.
"""

import struct
from collections.abc import Mapping, Sequence

VERSION = 4
CHECKSUM_BYTES = 4
VERSION_AT = 4
TRANSPORTS_AT = 6
NAME_AT = 26
SHM, NULL, TCP, VERBS, OFI = 1 << 1, 1 << 2, 1 << 3, 1 << 4, 1 << 5
# Counted from the end, the checksum included.
REGION_ID_AT = -22
LENGTH_AT = -14
ACCESS_AT = -6
MEMORY_AT = -5


def checksum(data: bytes) -> int:
    value = 2166136261
    for byte in data:
        value = ((value ^ byte) * 16777619) & 0xFFFFFFFF
    return value


def sealed(body: bytes) -> bytes:
    """`body` (all but the checksum) with the checksum it needs to pass."""
    return body + struct.pack("<I", checksum(body))


def resealed(data: bytes) -> bytes:
    """The same data with a correct checksum after a modification."""
    return sealed(data[:-CHECKSUM_BYTES])


def make_endpoint(ip: bytes = bytes([10, 0, 0, 1]), port: int = 4711, prefix_bits: int = 24, family: int = 0) -> bytes:
    family = family or {4: 4, 16: 6}[len(ip)]
    return bytes([family]) + ip + struct.pack("<HBI", port, prefix_bits, 100_000)


ENDPOINTS = (make_endpoint(), make_endpoint(bytes(15) + b"\1", 80, 128))


def make_rdma(rails: Sequence[bytes] = (b"gid and qpn",), fabric: bytes = b"", count: int | None = None) -> bytes:
    """The section of verbs or of ofi in an address: `rails` are the bytes of their endpoints."""
    ends = b"".join(bytes([len(rail)]) + rail + struct.pack("<I", 100_000) for rail in rails)
    return bytes([len(fabric)]) + fabric + bytes([len(rails) if count is None else count]) + ends


def make_keys(keys: Sequence[int] = (0x1234,), base: int = 0x7F00_0000_0000) -> bytes:
    """The section of verbs or of ofi in a descriptor."""
    return struct.pack(f"<Q{len(keys)}Q", base, *keys)


# An address all of whose transports except null are RDMA, and the matching keys.
RDMA = {VERBS: make_rdma((b"gid and qpn", b"of port 2")), OFI: make_rdma((bytes(32),), b"efa")}
RDMA_KEYS = {VERBS: make_keys((1, 2)), OFI: make_keys((2**64 - 1,), 0)}
Sections = Mapping[int, bytes]


def make_address(
    name: bytes = b"made up",
    rails: int = 1,
    transports: int = SHM,
    endpoints: Sequence[bytes] = (),
    rdma: Sections = {},  # noqa: B006 - only read
) -> bytes:
    return sealed(b"XRAA" + _address_body(name, rails, transports, endpoints, rdma))


def make_descriptor(
    name: bytes = b"made up",
    rails: int = 1,
    nbytes: int = 4096,
    transports: int = SHM,
    endpoints: Sequence[bytes] = (),
    rdma: Sections = {},  # noqa: B006 - only read
    keys: Sections = {},  # noqa: B006 - only read
) -> bytes:
    body = _address_body(name, rails, transports, endpoints, rdma)
    return sealed(b"XRRD" + body + _in_order(keys) + struct.pack("<QQBB", 5, nbytes, 3, 0))


def _address_body(name: bytes, rails: int, transports: int, endpoints: Sequence[bytes], rdma: Sections) -> bytes:
    host = b"a host"
    incarnation = bytes(range(16))
    texts = bytes([len(name)]) + name + bytes([len(host)]) + host
    numbers = struct.pack("<QIBB", 4026531840, 4711, rails, len(endpoints))
    head = struct.pack("<HI", VERSION, transports) + incarnation
    return head + texts + numbers + b"".join(endpoints) + _in_order(rdma)


def _in_order(sections: Sections) -> bytes:
    return b"".join(sections[kind] for kind in sorted(sections))


def with_bytes(data: bytes, at: int, new: bytes) -> bytes:
    """`data` with `new` at offset `at` (negative: from the end), resealed."""
    start = at % len(data)
    return resealed(data[:start] + new + data[start + len(new) :])


def with_length(descriptor: bytes, nbytes: int) -> bytes:
    return with_bytes(descriptor, LENGTH_AT, struct.pack("<Q", nbytes))


def region_id_of(descriptor: bytes) -> int:
    return int.from_bytes(descriptor[REGION_ID_AT:LENGTH_AT], "little")


def with_owner(descriptor: bytes, address: bytes) -> bytes:
    """The same region, with an owner that is reachable by tcp and shm only."""
    return resealed(descriptor[:4] + address[4:-4] + descriptor[REGION_ID_AT:])


def with_memory(descriptor: bytes, kind: int) -> bytes:
    return with_bytes(descriptor, MEMORY_AT, bytes([kind]))


def with_access(descriptor: bytes, access: int) -> bytes:
    return with_bytes(descriptor, ACCESS_AT, bytes([access]))


def with_region_id(descriptor: bytes, region_id: int) -> bytes:
    return with_bytes(descriptor, REGION_ID_AT, struct.pack("<Q", region_id))


def with_version(data: bytes, version: int) -> bytes:
    return with_bytes(data, VERSION_AT, struct.pack("<H", version))


def with_transports(data: bytes, transports: int) -> bytes:
    return with_bytes(data, TRANSPORTS_AT, struct.pack("<I", transports))

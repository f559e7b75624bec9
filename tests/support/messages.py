"""A Node's commands and answers: length-prefixed MessagePack. Bytes, of memory above all, travel unencoded."""

from typing import Any

import msgspec

HEADER_BYTES = 4


def encoded(message: Any) -> bytes:
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(HEADER_BYTES, "little") + body


def length_of(header: bytes) -> int:
    return int.from_bytes(header, "little")


def decoded(body: bytes) -> Any:
    return msgspec.msgpack.decode(body)

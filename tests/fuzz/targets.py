"""What a decoder of foreign bytes must do, in a form that a broken decoder fails (test_canary)."""

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

import crossrail as xr
from tests.support import sealing

Decoder = Callable[[bytes], Any]


def check_decoder(decode: Decoder, encode: Callable[[Any], bytes], data: bytes) -> bool:
    """Decodes to a value whose bytes are `data` again, or raises UsageError; True when it decoded.

    Anything else - another exception, a value that is not what the bytes say - fails.
    """
    try:
        value = decode(data)
    except xr.UsageError as error:
        assert str(error), "a UsageError without words"
        return False
    again = encode(value)
    assert again == data, f"{data.hex()} was taken for {again.hex()}"
    assert repr(value)
    return True


def mutations(valid: bytes) -> st.SearchStrategy[bytes]:
    """Bytes near `valid`: changed, cut, extended, spliced; half of them with a right checksum."""
    changed = st.lists(st.tuples(st.integers(0, len(valid) - 1), st.integers(0, 255)), max_size=6).map(
        lambda edits: edited(valid, edits)
    )
    cut = st.integers(0, len(valid)).map(lambda length: valid[:length])
    extended = st.binary(max_size=600).map(lambda tail: valid + tail)
    spliced = st.tuples(st.integers(0, len(valid)), st.binary(max_size=30), st.integers(0, len(valid))).map(
        lambda parts: valid[: parts[0]] + parts[1] + valid[parts[2] :]
    )
    raw = changed | cut | extended | spliced | st.binary(max_size=600)
    return raw | raw.filter(lambda data: len(data) >= sealing.CHECKSUM_BYTES).map(sealing.resealed)


def edited(data: bytes, edits: list[tuple[int, int]]) -> bytes:
    result = bytearray(data)
    for at, value in edits:
        result[at] = value
    return bytes(result)

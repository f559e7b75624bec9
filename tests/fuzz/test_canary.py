"""The fuzzers find planted bugs: decoders that are wrong in the ways that decoders are."""

import struct
from collections.abc import Callable

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import crossrail as xr
from tests.fuzz.targets import Decoder, check_decoder, mutations
from tests.support import sealing

VALID = sealing.sealed(b"XRAA" + struct.pack("<H", sealing.VERSION) + b"\x05name!" + struct.pack("<I", 7))


def parse(data: bytes, *, checks_length: bool, checks_sum: bool, checks_end: bool) -> tuple[bytes, int]:
    """A toy of the real format: magic, version, text with its length, number, checksum."""
    body, tail = data[:-4], data[-4:]
    if checks_sum and struct.pack("<I", sealing.checksum(body)) != tail:
        raise xr.UsageError("checksum differs")
    if body[:6] != VALID[:6]:
        raise xr.UsageError("no magic")
    if checks_length and (len(body) < 7 or len(body) < 7 + body[6] + 4):
        raise xr.UsageError("too short")
    text_bytes = body[6]
    (number,) = struct.unpack_from("<I", body, 7 + text_bytes)
    if checks_end and len(body) != 7 + text_bytes + 4:
        raise xr.UsageError("more after the end")
    return body[7 : 7 + text_bytes], number


def build(value: tuple[bytes, int]) -> bytes:
    text, number = value
    return sealing.sealed(VALID[:6] + bytes([len(text)]) + text + struct.pack("<I", number))


def fuzz(decode: Decoder) -> None:
    @settings(max_examples=3000, database=None, phases=[Phase.generate])
    @given(data=mutations(VALID))
    def run(data: bytes) -> None:
        check_decoder(decode, build, data)

    run()


def decoder(**checks: bool) -> Decoder:
    return lambda data: parse(data, **({"checks_length": True, "checks_sum": True, "checks_end": True} | checks))


def test_a_right_decoder_passes() -> None:
    fuzz(decoder())


@pytest.mark.parametrize("missing", ["checks_length", "checks_sum", "checks_end"])
def test_a_decoder_that_forgets_a_check_is_found(missing: str) -> None:
    with pytest.raises(Exception, match=r".*") as failure:
        fuzz(decoder(**{missing: False}))

    assert not isinstance(failure.value, xr.UsageError)


@pytest.mark.parametrize("wrong", [lambda _: None, lambda _: (b"always", 1)])
def test_a_decoder_that_makes_things_up_is_found(wrong: Callable[[bytes], object]) -> None:
    with pytest.raises((AssertionError, TypeError)):
        fuzz(wrong)


@given(data=st.binary(max_size=40))
def test_sealing_makes_the_checksum_that_the_engine_checks(data: bytes) -> None:
    with pytest.raises(xr.UsageError) as failure:
        xr.Address.from_bytes(sealing.sealed(b"XRAA" + struct.pack("<H", sealing.VERSION) + data))

    assert "checksum" not in str(failure.value)

"""Fuzzes the decoders of address and descriptor bytes. `./dev fuzz` runs them longer."""

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import crossrail as xr
from tests.fuzz.targets import check_decoder, mutations
from tests.support import sealing

SECONDS = int(os.environ.get("CROSSRAIL_FUZZ_SECONDS", "5"))
EXAMPLES = 300 * SECONDS

pytestmark = pytest.mark.timeout(60 + 5 * SECONDS)

KINDS = sealing.SHM | sealing.TCP | sealing.VERBS | sealing.OFI
REACH = {"rails": 5, "transports": KINDS, "endpoints": sealing.ENDPOINTS, "rdma": sealing.RDMA}
ADDRESS = sealing.make_address(**REACH)
DESCRIPTOR = sealing.make_descriptor(**REACH, keys=sealing.RDMA_KEYS)


@settings(max_examples=EXAMPLES)
@given(data=mutations(ADDRESS))
def test_address_bytes_decode_or_are_refused(data: bytes) -> None:
    check_decoder(xr.Address.from_bytes, xr.Address.to_bytes, data)


@settings(max_examples=EXAMPLES)
@given(data=mutations(DESCRIPTOR))
def test_descriptor_bytes_decode_or_are_refused(data: bytes) -> None:
    check_decoder(xr.RegionDescriptor.from_bytes, xr.RegionDescriptor.to_bytes, data)


@settings(max_examples=EXAMPLES // 3)
@given(text=st.text(max_size=300) | mutations(ADDRESS).map(bytes.hex))
def test_address_text_decodes_or_is_refused(text: str) -> None:
    check_decoder(
        lambda data: xr.Address.from_text(data.decode("utf-8", "surrogatepass")),
        lambda address: str(address).encode(),
        text.lower().encode("utf-8", "surrogatepass"),
    )


def test_the_fuzzer_starts_from_what_engines_make(engine: xr.Engine) -> None:
    for data in (engine.address.to_bytes(), ADDRESS):
        assert check_decoder(xr.Address.from_bytes, xr.Address.to_bytes, data)
    for data in (engine.alloc(10).descriptor.to_bytes(), DESCRIPTOR):
        assert check_decoder(xr.RegionDescriptor.from_bytes, xr.RegionDescriptor.to_bytes, data)

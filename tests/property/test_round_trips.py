"""Names and messages of any shape come back as they went; index arrays of every dtype mean the same."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import crossrail as xr
from tests.support import sealing
from tests.support.limits import WAIT_S
from tests.support.patterns import assert_same_bytes, pattern

NAMES = st.text(min_size=1, max_size=64).filter(
    lambda name: 1 <= len(name.encode(errors="replace")) <= 64 and "\0" not in name and name.isprintable()
)


@given(name=NAMES, rails=st.integers(1, 16))
def test_addresses_survive_bytes_and_text(name: str, rails: int) -> None:
    with xr.Engine(name, rails=rails) as engine:
        address = xr.Address.from_bytes(engine.address.to_bytes())

        assert (address, address.name, address.rails) == (engine.address, name, rails)
        assert xr.Address.from_text(str(address)) == address


@given(
    length=st.integers(1, 2**56),
    region_id=st.integers(1, 2**64 - 1),
    access=st.sampled_from([(0, "local"), (1, "read"), (3, "write")]),
)
def test_descriptors_survive_bytes(length: int, region_id: int, access: tuple[int, str]) -> None:
    data = sealing.make_descriptor(nbytes=length)
    data = sealing.with_access(sealing.with_region_id(data, region_id), access[0])

    descriptor = xr.RegionDescriptor.from_bytes(data)

    assert (descriptor.nbytes, descriptor.access) == (length, access[1])
    assert descriptor.to_bytes() == data
    assert xr.RegionDescriptor.from_bytes(bytes(descriptor)) == descriptor


@given(messages=st.lists(st.binary(max_size=2000), max_size=20), rails=st.integers(1, 16))
def test_any_messages_come_back_whole(messages: list[bytes], rails: int) -> None:
    with xr.Engine("here", rails=rails) as engine, engine.submit_recvs(4, 2000) as pool:
        for message in messages:
            engine.submit_send(engine.address, message)

        got = [pool.recv(WAIT_S).data for _ in messages]

    assert sorted(got) == sorted(messages)


@pytest.mark.parametrize("src_dtype", ["int32", "uint32", "int64", "uint64"])
@pytest.mark.parametrize("dst_dtype", ["int32", "uint32", "int64", "uint64"])
@given(data=st.data())
def test_index_arrays_of_every_dtype_mean_the_same(src_dtype: str, dst_dtype: str, data: st.DataObject) -> None:
    page_bytes = data.draw(st.integers(1, 300))
    dst_pages = data.draw(st.lists(st.integers(0, 99), min_size=1, max_size=100, unique=True))
    src_pages = data.draw(st.permutations(range(100)))[: len(dst_pages)]
    with xr.Engine("here", rails=3, polling="manual") as engine:
        src, dst = engine.alloc(100 * page_bytes), engine.alloc(100 * page_bytes)
        src.array()[:] = pattern(1, src.nbytes)

        engine.submit_paged_writes(
            src, np.array(src_pages, src_dtype), dst.descriptor, np.array(dst_pages, dst_dtype), page_bytes, imm=1
        ).wait(WAIT_S)
        engine.imm_counter(1).wait(len(dst_pages), WAIT_S)

        expected = np.zeros((100, page_bytes), np.uint8)
        expected[dst_pages] = src.array().reshape(100, page_bytes)[src_pages]
        assert_same_bytes(dst.array(), expected.ravel())


@given(length=st.integers(0, 5000), rails=st.integers(1, 16), peer_rails=st.integers(1, 16), offset=st.integers(0, 100))
def test_one_write_counts_one_whatever_the_rails(length: int, rails: int, peer_rails: int, offset: int) -> None:
    with xr.Engine("here", rails=rails) as here, xr.Engine("there", rails=peer_rails) as there:
        src, dst = here.register(pattern(1, 5000)), there.register(np.zeros(5100, np.uint8))

        here.submit_write(src, dst.descriptor, length, dst_offset=offset, imm=1)
        there.imm_counter(1).wait(1, WAIT_S)

        assert there.imm_counter(1).poll() == 0
        assert_same_bytes(dst.array()[offset:][:length], src.array()[:length])
        assert not dst.array()[:offset].any()
        assert not dst.array()[offset + length :].any()

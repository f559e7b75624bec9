"""verify=True: nothing is counted that the target's engine did not find as it was sent."""

import ctypes

import numpy as np
import pytest

import crossrail as xr
from tests.contract.conftest import Pair, bytes_of
from tests.contract.setups import SOME_MEMORY, setups
from tests.support.limits import NEVER_S, WAIT_S, never
from tests.support.patterns import CANARY, assert_same_bytes

PAGE_BYTES = 1000
PAGES = 2500  # three questions
ATTEMPTS = 100  # to change a source while it travels


@setups([(1, 1), (4, 3)], SOME_MEMORY)
@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 5000, 3_000_001])
def test_verified_write_lands_and_counts_once(pair: Pair, nbytes: int) -> None:
    src, dst = pair.source(max(nbytes, 1)), pair.target(max(nbytes, 1) + 10)

    pair.here.submit_write(src, dst.descriptor, nbytes, dst_offset=7, imm=1, verify=True).wait(WAIT_S)

    pair.there.expect_count(1, 1)
    assert_same_bytes(dst.content(7, nbytes), bytes_of(src)[:nbytes])


@setups([(1, 1), (4, 3)], SOME_MEMORY)
def test_verified_pages_land_and_count_each(pair: Pair) -> None:
    src, dst = pair.source(PAGES * PAGE_BYTES), pair.target(PAGES * PAGE_BYTES)
    rng = np.random.default_rng(5)
    here, there = rng.permutation(PAGES), rng.permutation(PAGES)

    pair.here.submit_paged_writes(src, here, dst.descriptor, there, PAGE_BYTES, imm=2, verify=True).wait(WAIT_S)

    pair.there.expect_count(2, PAGES)
    landed = dst.content().reshape(PAGES, PAGE_BYTES)[there]
    assert_same_bytes(landed.reshape(-1), bytes_of(src).reshape(PAGES, PAGE_BYTES)[here].reshape(-1))


@setups([(1, 1), (4, 3)], SOME_MEMORY)
def test_verified_scatter_lands_and_counts_at_each_target(pair: Pair) -> None:
    src, dsts = pair.source(300_000), [pair.target(100_000) for _ in range(3)]

    scatter(pair, src, [dst.descriptor for dst in dsts]).wait(WAIT_S)

    pair.there.expect_count(5, 3)
    for i, dst in enumerate(dsts):
        assert_same_bytes(dst.content(), bytes_of(src)[i * 100_000 : (i + 1) * 100_000])


@setups([(1, 1), (4, 3)])
def test_verified_scatter_counts_where_it_is_right_though_a_target_refuses(pair: Pair) -> None:
    src, dsts = pair.source(300_000), [pair.target(100_000) for _ in range(3)]
    dsts[1].revoke()

    with pytest.raises(xr.RemoteRegionRevoked):
        scatter(pair, src, [dst.descriptor for dst in dsts]).wait(WAIT_S)

    pair.there.expect_count(5, 2)
    assert_same_bytes(dsts[2].content(), bytes_of(src)[200_000:])


def scatter(pair: Pair, src: xr.Region, dsts: list[xr.RegionDescriptor]) -> xr.Transfer:
    starts = [i * 100_000 for i in range(len(dsts))]
    return pair.here.submit_scatter(src, dsts, lengths=100_000, src_offsets=starts, dst_offsets=0, imm=5, verify=True)


@setups([(1, 1), (4, 3)], SOME_MEMORY)
@pytest.mark.parametrize("nbytes", [0, 1, 5000, 3_000_001])
def test_verified_read_is_done_when_it_was_found_right(pair: Pair, nbytes: int) -> None:
    dst, src = pair.memory(max(nbytes, 1)), pair.target(max(nbytes, 1) + 10, fill=4)

    pair.here.submit_read(dst, src.descriptor, nbytes, src_offset=3, verify=True).wait(WAIT_S)

    assert_same_bytes(bytes_of(dst)[:nbytes], src.content(3, nbytes))


@setups([(1, 1), (4, 3)])
def test_verified_read_of_a_region_that_is_open_to_reads_alone(pair: Pair) -> None:
    dst, src = pair.memory(5000), pair.target(5000, fill=4, access="read")

    pair.here.submit_read(dst, src.descriptor, verify=True).wait(WAIT_S)

    assert_same_bytes(bytes_of(dst), src.content())


@setups([(1, 1), (4, 3)])
def test_verified_writes_without_immediate_and_without_pages(pair: Pair) -> None:
    src, dst = pair.source(5000), pair.target(5000)
    none = np.empty(0, np.int64)

    pair.here.submit_write(src, dst.descriptor, verify=True).wait(WAIT_S)
    pair.here.submit_paged_writes(src, none, dst.descriptor, none, 100, imm=1, verify=True).wait(WAIT_S)

    assert_same_bytes(dst.content(), bytes_of(src))
    assert pair.there.count(1) == 0


@setups([(1, 1), (4, 3)], SOME_MEMORY)
def test_memory_that_is_not_what_was_sent_fails_the_write_and_counts_nothing(pair: Pair) -> None:
    """The checksum is taken at submit: a source that changes before it travels is what a broken network looks like."""
    pair.there.call("keep_events")
    src, dst = pair.source(300_000), pair.target(300_000)
    slow = pair.here.submit_write(src, dst.descriptor, imm=4)  # keeps the link busy, and connects it
    failures = attempts = 0
    while failures < 2 and attempts < ATTEMPTS:
        attempts += 1
        transfer = submit_and_change(pair, src, dst.descriptor)
        try:
            transfer.wait(WAIT_S)
        except xr.ChecksumMismatch as error:
            failures += 1
            assert (error.peer, error.region) == (pair.there.address.name, dst.descriptor.region)
            assert (error.offset, error.nbytes, error.imm) == (0, 300_000, 3)
            assert error.sum_sent != error.sum_found
            assert f"{error.sum_found:016x}" in str(error)
    slow.wait(WAIT_S)

    assert failures >= 2, f"in {attempts} attempts the source changed in time {failures} times"
    if attempts > failures:
        pair.there.expect_count(3, attempts - failures)
    never(lambda: pair.there.count(3) > 0, "a write that was found wrong counted", NEVER_S)
    kinds = pair.there.call("event_kinds")
    assert kinds.count("checksum-mismatch") == failures


def submit_and_change(pair: Pair, src: xr.Region, dst: xr.RegionDescriptor) -> xr.Transfer:
    """A verified write whose source is changed at its end, which travels last, as soon as it is submitted."""
    last = ctypes.c_uint8.from_address(src.base + src.nbytes - 1)
    transfer = pair.here.submit_write(src, dst, imm=3, verify=True)
    last.value ^= 0xFF
    return transfer


@setups([(1, 1), (4, 3)], SOME_MEMORY)
def test_verified_write_to_a_closed_region_fails_and_counts_nothing(pair: Pair) -> None:
    src, dst = pair.source(20_000), pair.target(20_000)
    pair.here.submit_write(src, dst.descriptor, imm=1, verify=True).wait(WAIT_S)
    pair.there.expect_count(1, 1)
    dst.close()

    with pytest.raises(xr.RemoteRegionClosed):
        pair.here.submit_write(src, dst.descriptor, imm=1, verify=True).wait(WAIT_S)

    assert pair.there.count(1) == 0


@setups([(1, 1), (4, 3)], SOME_MEMORY)
def test_region_closes_while_it_is_verified(pair: Pair) -> None:
    mine, remote = pair.memory(8_000_000), pair.target(8_000_000, fill=3)
    stream = pair.there.stream("verified_write", remote, [mine.descriptor], imm=9, window=4)
    array = mine.array()

    mine.close(WAIT_S)
    array[:] = CANARY
    outcome = pair.there.caller.call("failed_stream", stream=stream)

    assert set(outcome["failures"]) == {"RemoteRegionClosed"}
    assert (array == CANARY).all()
    assert pair.here.imm_counter(9).poll() == outcome["done"]


@setups([(1, 1)])
def test_cancelled_verified_write_counts_nothing(pair: Pair) -> None:
    src, dst = pair.source(400_000), pair.target(400_000)
    pair.here.connect(pair.there.address, WAIT_S)
    transfers = [pair.here.submit_write(src, dst.descriptor, imm=1, verify=True) for _ in range(30)]

    for transfer in transfers:
        transfer.cancel()
    src.close(WAIT_S)

    done = sum(transfer.status == "done" for transfer in transfers)
    assert {transfer.status for transfer in transfers} <= {"done", "cancelled"}
    if done:
        pair.there.expect_count(1, done)
    never(lambda: pair.there.count(1) > 0, "a cancelled write counted", NEVER_S)

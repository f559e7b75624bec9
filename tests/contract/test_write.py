"""submit_write: one contiguous range, counted once however many rails carried it."""

import hashlib
import time

import numpy as np
import pytest

import crossrail as xr
from tests.contract.conftest import Pair, bytes_of
from tests.contract.setups import ALL_MEMORY, ALL_RAILS, EQUAL_RAILS, SOME_MEMORY, SOME_RAILS, setups
from tests.support.limits import WAIT_S, eventually
from tests.support.patterns import CANARY, assert_same_bytes, pattern

LENGTHS = (1, 2, 15, 16, 17, 63, 4095, 4097, 65537, 300_007)
GUARD = 64


@setups(ALL_RAILS, SOME_MEMORY)
def test_write_moves_every_byte_and_counts_one(pair: Pair) -> None:
    for imm, nbytes in enumerate(LENGTHS):
        src = pair.source(nbytes)
        dst = pair.target(nbytes + 2 * GUARD)

        pair.here.submit_write(src, dst.descriptor, dst_offset=GUARD, imm=imm).wait(WAIT_S)

        pair.there.expect_count(imm, 1)
        expected = np.full(nbytes + 2 * GUARD, CANARY, np.uint8)
        expected[GUARD:-GUARD] = bytes_of(src)
        assert_same_bytes(dst.content(), expected, f"{nbytes} bytes between guards")


@setups(SOME_RAILS, ALL_MEMORY)
def test_write_works_between_every_kind_of_memory(pair: Pair) -> None:
    src = pair.source(1_000_003)
    dst = pair.target(1_000_003)

    pair.here.submit_write(src, dst.descriptor, imm=1).wait(WAIT_S)

    pair.there.expect_count(1, 1)
    assert_same_bytes(dst.content(), bytes_of(src))


@setups(EQUAL_RAILS)
def test_one_byte_arrives_once_over_any_number_of_rails(pair: Pair) -> None:
    src = pair.source(1)
    dst = pair.target(3)

    pair.here.submit_write(src, dst.descriptor, dst_offset=1, imm=9).wait(WAIT_S)

    pair.there.expect_count(9, 1)
    assert dst.content().tolist() == [CANARY, int(src.array()[0]), CANARY]


@setups(SOME_RAILS, SOME_MEMORY)
def test_zero_length_write_carries_only_the_immediate(pair: Pair) -> None:
    src = pair.source(8)
    dst = pair.target(8)

    for src_offset, dst_offset in ((0, 0), (8, 8), (3, 8)):
        pair.here.submit_write(src, dst.descriptor, 0, src_offset=src_offset, dst_offset=dst_offset, imm=3).wait(WAIT_S)

    pair.there.expect_count(3, 3)
    assert (dst.content() == CANARY).all()


@setups(SOME_RAILS)
def test_zero_length_write_without_immediate_completes(pair: Pair) -> None:
    dst = pair.target(8)

    transfer = pair.here.submit_write(pair.source(8), dst.descriptor, 0)

    transfer.wait(WAIT_S)
    assert (dst.content() == CANARY).all()


@setups(SOME_RAILS)
def test_write_without_immediate_counts_nothing(pair: Pair) -> None:
    src, dst = pair.source(100_000), pair.target(100_000)

    pair.here.submit_write(src, dst.descriptor).wait(WAIT_S)
    pair.here.submit_write(src, dst.descriptor, imm=0).wait(WAIT_S)

    pair.there.expect_count(0, 1)


@setups(SOME_RAILS, SOME_MEMORY)
def test_write_between_offsets_touches_nothing_else(pair: Pair) -> None:
    src = pair.source(70_000)
    dst = pair.target(80_000)

    pair.here.submit_write(src, dst.descriptor, 65_537, src_offset=4_001, dst_offset=13, imm=1).wait(WAIT_S)

    pair.there.expect_count(1, 1)
    expected = np.full(80_000, CANARY, np.uint8)
    expected[13 : 13 + 65_537] = src.array()[4_001 : 4_001 + 65_537]
    assert_same_bytes(dst.content(), expected)


@setups(SOME_RAILS)
def test_length_left_out_means_the_rest_of_the_source(pair: Pair) -> None:
    src = pair.source(1000)
    dst = pair.target(1000)

    transfer = pair.here.submit_write(src, dst.descriptor, src_offset=400, dst_offset=100, imm=1)
    transfer.wait(WAIT_S)

    pair.there.expect_count(1, 1)
    assert transfer.nbytes == 600
    expected = np.full(1000, CANARY, np.uint8)
    expected[100:700] = src.array()[400:]
    assert_same_bytes(dst.content(), expected)


@setups([(1, 1), (4, 4)], ALL_MEMORY)
def test_write_of_many_megabytes_is_whole(pair: Pair) -> None:
    nbytes = 24 * 1024 * 1024 + 5
    src = pair.source(nbytes)
    dst = pair.target(nbytes)

    pair.here.submit_write(src, dst.descriptor, imm=1).wait(WAIT_S)

    pair.there.expect_count(1, 1)
    assert dst.digest() == hashlib.sha256(src.array()).hexdigest()


@setups(SOME_RAILS, SOME_MEMORY)
def test_hundreds_of_writes_in_flight_all_arrive(pair: Pair) -> None:
    count, nbytes = 600, 1009
    src = pair.source(count * nbytes)
    dst = pair.target(count * nbytes)
    order = pair.seed.rng().permutation(count)

    transfers = [
        pair.here.submit_write(
            src, dst.descriptor, nbytes, src_offset=int(i) * nbytes, dst_offset=int(i) * nbytes, imm=5
        )
        for i in order
    ]
    for transfer in transfers:
        transfer.wait(WAIT_S)

    pair.there.expect_count(5, count)
    assert_same_bytes(dst.content(), bytes_of(src))


@setups(SOME_RAILS, SOME_MEMORY)
def test_source_may_be_reused_once_the_write_is_done(pair: Pair) -> None:
    nbytes, rounds = 200_001, 20
    src = pair.memory(nbytes)
    targets = [pair.target(nbytes) for _ in range(rounds)]

    for i, dst in enumerate(targets):
        src.array()[:] = pattern(i, nbytes)
        pair.here.submit_write(src, dst.descriptor, imm=1).wait(WAIT_S)
        src.array()[:] = 0

    pair.there.expect_count(1, rounds)
    for i, dst in enumerate(targets):
        assert_same_bytes(dst.content(), pattern(i, nbytes), f"write {i}")


@setups([(4, 4), (4, 1), (1, 4), (16, 3)])
def test_write_pinned_to_a_rail_arrives_from_each(pair: Pair) -> None:
    src = pair.source(50_000)

    for rail in range(pair.setup.rails_here):
        dst = pair.target(50_000)
        pair.here.submit_write(src, dst.descriptor, imm=rail, rail=rail).wait(WAIT_S)

        pair.there.expect_count(rail, 1)
        assert_same_bytes(dst.content(), bytes_of(src), f"rail {rail}")


@setups(SOME_RAILS, SOME_MEMORY)
def test_cancelled_write_counts_nothing(pair: Pair) -> None:
    src, dst = pair.source(3_000_003), pair.target(3_000_003)
    pair.here.connect(pair.there.address, WAIT_S)
    rng, done = pair.seed.rng(), 0

    for _ in range(40):
        transfer = pair.here.submit_write(src, dst.descriptor, imm=1)
        time.sleep(float(rng.uniform(0, 0.001)))
        transfer.cancel()
        try:
            transfer.wait(WAIT_S)
            done += 1
        except xr.TransferCancelled:
            assert transfer.status == "cancelled"
    pair.here.submit_write(src, dst.descriptor, imm=1).wait(WAIT_S)

    pair.there.wait_count(1, done + 1)
    # Not even a part of a count, which together with others would make a whole one that never happened.
    assert pair.there.call("stats")["imm_units_received"] == 48 * (done + 1)


@setups(SOME_RAILS, SOME_MEMORY)
def test_both_directions_at_once(pair: Pair) -> None:
    out, back = pair.source(400_000), pair.memory(400_000)
    sent, received = pair.target(400_000, fill=77), pair.target(400_000)

    transfers = [pair.here.submit_write(out, received.descriptor, imm=1) for _ in range(10)]
    pair.there.operate("write", sent, [back.descriptor], imm=2)
    for transfer in transfers:
        transfer.wait(WAIT_S)

    pair.there.expect_count(1, 10)
    pair.here.imm_counter(2).wait(1, WAIT_S)
    assert_same_bytes(received.content(), bytes_of(out))
    assert_same_bytes(bytes_of(back), pattern(77, 400_000))


@setups(SOME_RAILS, SOME_MEMORY)
def test_writes_of_several_engines_add_up_in_one_counter(pair: Pair) -> None:
    mine = pair.memory(3 * 1000)
    others = [pair.another(f"writer-{i}", rails=i + 1) for i in range(3)]

    for i, engine in enumerate(others):
        memory = engine.memory(3 * 1000, pair.setup.memory_there, fill=5)
        engine.operate("write", memory, [mine.descriptor], imm=8)
        eventually(lambda i=i: pair.here.imm_counter(8).poll() == i + 1, f"the count of writer {i}")

    assert pair.here.imm_counter(8).try_consume(3)
    assert_same_bytes(bytes_of(mine), pattern(5, 3000))


@setups(SOME_RAILS)
def test_write_of_a_region_to_itself_at_another_place(pair: Pair) -> None:
    region = pair.source(100_000)
    expected = bytes_of(region)
    expected[50_000:] = expected[:50_000]

    pair.here.submit_write(region, region.descriptor, 50_000, dst_offset=50_000, imm=4).wait(WAIT_S)

    pair.here.imm_counter(4).wait(1, WAIT_S)
    assert_same_bytes(bytes_of(region), expected)


@setups(SOME_RAILS, SOME_MEMORY)
def test_ping_pong_sees_each_others_bytes(pair: Pair) -> None:
    rounds = 50
    ping, pong = pair.memory(64), pair.memory(64)
    there_in = pair.target(64)
    there_out = pair.target(64, fill=3)
    pair.there.call(
        "echo",
        number=there_out.number,
        descriptor=pong.descriptor.to_bytes().hex(),
        imm_in=1,
        imm_out=2,
        rounds=rounds,
    )

    for _ in range(rounds):
        pair.here.submit_write(ping, there_in.descriptor, imm=1)
        pair.here.imm_counter(2).wait(1, WAIT_S)

    assert_same_bytes(bytes_of(pong), pattern(3, 64))


@pytest.mark.parametrize("dtype", ["float32", "int64", "float16"])
def test_elements_of_any_type_survive(pair: Pair, dtype: str) -> None:
    values = (pair.seed.rng().random(5000) * 1000).astype(dtype)
    src = pair.here.register(values)
    dst = pair.target(values.nbytes)

    pair.here.submit_write(src, dst.descriptor, imm=1).wait(WAIT_S)

    pair.there.expect_count(1, 1)
    assert np.array_equal(dst.content().view(dtype), values)


def test_arrival_can_be_polled_without_waiting(pair: Pair) -> None:
    src, dst = pair.source(10), pair.target(10)

    pair.here.submit_write(src, dst.descriptor, imm=12)

    eventually(lambda: pair.there.count(12) == 1, "the count seen by polling")

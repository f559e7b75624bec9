"""submit_read: one contiguous range, pulled."""

import numpy as np

from tests.contract.conftest import Pair, bytes_of
from tests.contract.setups import ALL_MEMORY, ALL_RAILS, EQUAL_RAILS, SOME_MEMORY, SOME_RAILS, setups
from tests.support.limits import WAIT_S
from tests.support.patterns import CANARY, assert_same_bytes, pattern


@setups(ALL_RAILS, ALL_MEMORY)
def test_read_brings_every_byte(pair: Pair) -> None:
    for seed, nbytes in enumerate((1, 17, 4097, 300_007)):
        remote = pair.target(nbytes, fill=seed)
        mine = pair.memory(nbytes)

        pair.here.submit_read(mine, remote.descriptor).wait(WAIT_S)

        assert_same_bytes(bytes_of(mine), pattern(seed, nbytes), f"{nbytes} bytes")


@setups(EQUAL_RAILS)
def test_read_of_one_byte_over_any_number_of_rails(pair: Pair) -> None:
    remote = pair.target(1, fill=5)
    mine = pair.memory(3)

    pair.here.submit_read(mine, remote.descriptor, 1, dst_offset=1).wait(WAIT_S)

    assert mine.array().tolist() == [CANARY, int(pattern(5, 1)[0]), CANARY]


@setups(SOME_RAILS, SOME_MEMORY)
def test_read_between_offsets_touches_nothing_else(pair: Pair) -> None:
    remote = pair.target(90_000, fill=5)
    mine = pair.memory(80_000)

    pair.here.submit_read(mine, remote.descriptor, 65_537, dst_offset=7, src_offset=4_001).wait(WAIT_S)

    expected = np.full(80_000, CANARY, np.uint8)
    expected[7 : 7 + 65_537] = pattern(5, 90_000)[4_001 : 4_001 + 65_537]
    assert_same_bytes(bytes_of(mine), expected)


@setups(SOME_RAILS)
def test_zero_length_read_completes(pair: Pair) -> None:
    remote = pair.target(8, fill=5)
    mine = pair.memory(8)

    pair.here.submit_read(mine, remote.descriptor, 0).wait(WAIT_S)

    assert (mine.array() == CANARY).all()


@setups(SOME_RAILS, SOME_MEMORY)
def test_read_leaves_its_source_as_it_is(pair: Pair) -> None:
    remote = pair.target(100_001, fill=6)

    pair.here.submit_read(pair.memory(100_001), remote.descriptor).wait(WAIT_S)

    assert_same_bytes(remote.content(), pattern(6, 100_001))


@setups(SOME_RAILS, SOME_MEMORY)
def test_readable_memory_can_be_read(pair: Pair) -> None:
    remote = pair.there.memory(5000, "private", access="read", fill=6)
    mine = pair.memory(5000)

    pair.here.submit_read(mine, remote.descriptor).wait(WAIT_S)

    assert_same_bytes(bytes_of(mine), pattern(6, 5000))


@setups(SOME_RAILS, SOME_MEMORY)
def test_many_reads_in_flight_do_not_mix(pair: Pair) -> None:
    count, nbytes = 200, 3001
    remote = pair.target(count * nbytes, fill=8)
    mine = pair.memory(count * nbytes)

    transfers = [
        pair.here.submit_read(mine, remote.descriptor, nbytes, dst_offset=int(i) * nbytes, src_offset=int(i) * nbytes)
        for i in pair.seed.rng().permutation(count)
    ]
    for transfer in transfers:
        transfer.wait(WAIT_S)

    assert_same_bytes(bytes_of(mine), pattern(8, count * nbytes))


@setups([(4, 4), (4, 1), (1, 4)])
def test_read_pinned_to_a_rail(pair: Pair) -> None:
    remote = pair.target(50_000, fill=9)

    for rail in range(pair.setup.rails_here):
        mine = pair.memory(50_000)
        pair.here.submit_read(mine, remote.descriptor, rail=rail).wait(WAIT_S)

        assert_same_bytes(bytes_of(mine), pattern(9, 50_000), f"rail {rail}")


@setups([(1, 1), (4, 4)], ALL_MEMORY)
def test_read_of_many_megabytes_is_whole(pair: Pair) -> None:
    nbytes = 16 * 1024 * 1024 + 7
    remote = pair.target(nbytes, fill=1)
    mine = pair.memory(nbytes)

    pair.here.submit_read(mine, remote.descriptor).wait(WAIT_S)

    assert_same_bytes(bytes_of(mine), pattern(1, nbytes))


@setups(SOME_RAILS, SOME_MEMORY)
def test_reads_by_the_other_side_come_from_here(pair: Pair) -> None:
    mine = pair.source(200_003, fill=12)
    remote = pair.target(200_003)

    pair.there.operate("read", remote, [mine.descriptor])

    assert_same_bytes(remote.content(), pattern(12, 200_003))

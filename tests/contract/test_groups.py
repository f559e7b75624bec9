"""submit_scatter and submit_barrier: a slice, or just a count, to each member of a group."""

import numpy as np
import pytest

import crossrail as xr
from tests.contract.conftest import Pair, bytes_of
from tests.contract.setups import SOME_MEMORY, SOME_RAILS, setups
from tests.support.limits import WAIT_S, eventually
from tests.support.node import RemoteEngine
from tests.support.patterns import CANARY, assert_same_bytes, not_aligned

PEERS = 5


def members(pair: Pair, count: int = PEERS) -> list[RemoteEngine]:
    """Engines of the other side with 1, 2, ... rails; the first is the pair's own."""
    return [pair.there] + [pair.another(f"member-{i}", rails=1 + i % 4) for i in range(1, count)]


def group_of(pair: Pair, engines: list[RemoteEngine]) -> xr.PeerGroup:
    return pair.here.add_peer_group([engine.address for engine in engines])


@setups(SOME_RAILS, SOME_MEMORY)
@pytest.mark.parametrize("with_group", [True, False])
def test_scatter_gives_each_its_slice_and_one_count(pair: Pair, with_group: bool) -> None:
    engines = members(pair)
    rng = pair.seed.rng()
    lengths = rng.integers(1, 50_000, PEERS)
    src = pair.source(int(lengths.sum()))
    src_offsets = np.cumsum(lengths) - lengths
    dst_offsets = rng.integers(0, 1000, PEERS)
    targets = [engine.memory(51_000, pair.setup.memory_there) for engine in engines]

    pair.here.submit_scatter(
        src,
        [target.descriptor for target in targets],
        lengths=lengths,
        src_offsets=src_offsets,
        dst_offsets=dst_offsets,
        group=group_of(pair, engines) if with_group else None,
        imm=6,
    ).wait(WAIT_S)

    for i, (engine, target) in enumerate(zip(engines, targets, strict=True)):
        engine.expect_count(6, 1)
        expected = np.full(51_000, CANARY, np.uint8)
        expected[dst_offsets[i] :][: lengths[i]] = src.array()[src_offsets[i] :][: lengths[i]]
        assert_same_bytes(target.content(), expected, f"target {i}")


@setups(SOME_RAILS, SOME_MEMORY)
def test_targets_of_one_region_count_on_their_own_numbers_also_behind_what_fills_the_path(pair: Pair) -> None:
    src = pair.source(8 << 20)
    target = pair.target(8 << 20)
    ahead = pair.here.submit_write(src, target.descriptor, 8 << 20)
    numbers = [20 + i for i in range(PEERS)]

    pair.here.submit_scatter(
        src, [target.descriptor] * PEERS, lengths=64, src_offsets=0, dst_offsets=np.arange(PEERS) * 64, imm=numbers
    ).wait(WAIT_S)

    ahead.wait(WAIT_S)
    for imm in numbers:
        pair.there.expect_count(imm, 1)


@setups(SOME_RAILS, SOME_MEMORY)
@pytest.mark.parametrize("verify", [False, True])
def test_scatter_counts_each_target_on_its_own_number(pair: Pair, verify: bool) -> None:
    engines = members(pair)
    src = pair.source(PEERS * 30_000)
    targets = [engine.memory(30_000, pair.setup.memory_there) for engine in engines]
    numbers = [20 + i for i in range(PEERS)]

    pair.here.submit_scatter(
        src,
        [target.descriptor for target in targets],
        lengths=30_000,
        src_offsets=[30_000 * i for i in range(PEERS)],
        dst_offsets=0,
        imm=numbers,
        verify=verify,
    ).wait(WAIT_S)

    for i, (engine, target) in enumerate(zip(engines, targets, strict=True)):
        engine.expect_count(numbers[i], 1)
        assert all(engine.count(other) == 0 for other in numbers)
        assert_same_bytes(target.content(), src.array()[30_000 * i :][:30_000], f"target {i}")


def test_scatter_counts_several_numbers_at_one_peer(pair: Pair) -> None:
    src, dst = pair.source(30), pair.target(30)

    pair.here.submit_scatter(
        src,
        [dst.descriptor] * 3,
        lengths=[10, 0, 20],
        src_offsets=[0, 0, 10],
        dst_offsets=[0, 0, 10],
        imm=np.array([7, 8, 7]),
    ).wait(WAIT_S)

    pair.there.expect_count(7, 2)
    pair.there.expect_count(8, 1)
    assert_same_bytes(dst.content(), bytes_of(src))


def test_scatter_takes_one_number_for_all(pair: Pair) -> None:
    engines = members(pair, 3)
    src = pair.source(5000)
    targets = [engine.memory(5000, pair.setup.memory_there) for engine in engines]

    pair.here.submit_scatter(
        src, [target.descriptor for target in targets], lengths=4000, src_offsets=1000, dst_offsets=7, imm=1
    ).wait(WAIT_S)

    for engine, target in zip(engines, targets, strict=True):
        engine.expect_count(1, 1)
        assert_same_bytes(target.content(7, 4000), bytes_of(src)[1000:])


@pytest.mark.parametrize(
    "make",
    [
        list,
        tuple,
        lambda x: np.array(x, np.int64),
        lambda x: np.array(x, np.uint64),
        lambda x: not_aligned(np.array(x, np.int64)),
    ],
)
def test_scatter_takes_sequences_and_arrays(pair: Pair, make: object) -> None:
    src = pair.source(30)
    dst = pair.target(60)

    pair.here.submit_scatter(
        src,
        [dst.descriptor] * 3,
        lengths=make([10, 10, 10]),
        src_offsets=make([0, 10, 20]),
        dst_offsets=make([40, 20, 0]),
        imm=1,
    ).wait(WAIT_S)

    pair.there.expect_count(1, 3)
    blocks = dst.content().reshape(6, 10)
    assert_same_bytes(np.concatenate([blocks[4], blocks[2], blocks[0]]), bytes_of(src))


def test_scatter_of_empty_slices_still_counts(pair: Pair) -> None:
    engines = members(pair, 3)
    src = pair.source(100)
    targets = [engine.memory(100, pair.setup.memory_there) for engine in engines]

    pair.here.submit_scatter(
        src,
        [target.descriptor for target in targets],
        lengths=[0, 50, 0],
        src_offsets=0,
        dst_offsets=0,
        imm=1,
    ).wait(WAIT_S)

    for engine, target, moved in zip(engines, targets, [0, 50, 0], strict=True):
        engine.expect_count(1, 1)
        assert (target.content(moved) == CANARY).all()


def test_scatter_without_immediate_moves_and_counts_nothing(pair: Pair) -> None:
    src, dst = pair.source(1000), pair.target(1000)

    pair.here.submit_scatter(src, [dst.descriptor], lengths=1000, src_offsets=0, dst_offsets=0).wait(WAIT_S)
    pair.here.submit_write(src, dst.descriptor, 0, imm=0).wait(WAIT_S)

    pair.there.expect_count(0, 1)
    eventually(lambda: np.array_equal(dst.content(), bytes_of(src)), "the bytes, which nothing counts")


@setups([(1, 1), (4, 4)], SOME_MEMORY)
def test_scatter_into_one_peer_many_times(pair: Pair) -> None:
    src = pair.source(56 * 128)
    dst = pair.target(56 * 128)
    order = pair.seed.rng().permutation(56)

    pair.here.submit_scatter(
        src,
        [dst.descriptor] * 56,
        lengths=128,
        src_offsets=order * 128,
        dst_offsets=order * 128,
        imm=1,
    ).wait(WAIT_S)

    pair.there.expect_count(1, 56)
    assert_same_bytes(dst.content(), bytes_of(src))


@setups(SOME_RAILS)
def test_barrier_counts_one_at_each_member(pair: Pair) -> None:
    engines = members(pair)
    group = group_of(pair, engines)

    for _ in range(3):
        pair.here.submit_barrier(group, 11).wait(WAIT_S)

    for engine in engines:
        engine.expect_count(11, 3)


def test_barrier_to_a_group_with_itself(pair: Pair) -> None:
    group = pair.here.add_peer_group([pair.here.address, pair.there.address])

    pair.here.submit_barrier(group, 2).wait(WAIT_S)

    pair.here.imm_counter(2).wait(1, WAIT_S)
    pair.there.expect_count(2, 1)


def test_barrier_of_all_to_all(pair: Pair) -> None:
    mine = pair.source(8)
    remote = pair.target(8)
    group = pair.here.add_peer_group([pair.there.address])

    for _ in range(10):
        pair.here.submit_barrier(group, 1)
        pair.there.operate("barrier", remote, [mine.descriptor], imm=1)
        pair.here.imm_counter(1).wait(1, WAIT_S)
        pair.there.wait_count(1)

    assert pair.here.imm_counter(1).poll() == 0
    assert pair.there.count(1) == 0

"""What a count means: the same on any number of rails, kept when early, consumed by a wait."""

import asyncio

import numpy as np
import pytest

from tests.contract.conftest import Pair
from tests.contract.setups import ALL_RAILS, SOME_RAILS, setups
from tests.support.limits import NEVER_S, WAIT_S
from tests.support.node import CommandError

IMM_MAX = 2**28 - 1


@setups(ALL_RAILS)
def test_a_mix_of_operations_adds_up_exactly(pair: Pair) -> None:
    src, dst = pair.source(100_000), pair.target(100_000)
    group = pair.here.add_peer_group([pair.there.address])
    pages = np.arange(33)

    for nbytes in (0, 1, 7, 100, 4096, 99_999):
        pair.here.submit_write(src, dst.descriptor, nbytes, imm=1)
    pair.here.submit_paged_writes(src, pages, dst.descriptor, pages[::-1].copy(), 3000, imm=1)
    pair.here.submit_scatter(src, [dst.descriptor] * 3, lengths=9, src_offsets=0, dst_offsets=0, imm=1)
    pair.here.submit_barrier(group, 1)

    pair.there.expect_count(1, 6 + 33 + 3 + 1)


@setups(SOME_RAILS)
def test_early_arrivals_are_kept_until_someone_asks(pair: Pair) -> None:
    src, dst = pair.source(70_000), pair.target(70_000)
    transfers = [pair.here.submit_write(src, dst.descriptor, imm=imm) for imm in range(100) for _ in range(2)]

    for transfer in transfers:
        transfer.wait(WAIT_S)

    for imm in range(100):
        pair.there.expect_count(imm, 2)


@pytest.mark.parametrize("imm", [0, 1, 12345678, IMM_MAX - 1, IMM_MAX])
def test_every_immediate_of_28_bits_works(pair: Pair, imm: int) -> None:
    src, dst = pair.source(100_000), pair.target(100_000)

    pair.here.submit_write(src, dst.descriptor, imm=imm)
    pair.here.submit_paged_writes(src, np.arange(4), dst.descriptor, np.arange(4), 100, imm=imm)

    pair.there.expect_count(imm, 5)


def test_a_wait_consumes_what_it_waited_for(pair: Pair) -> None:
    src, dst = pair.source(8), pair.target(8)
    for _ in range(10):
        pair.here.submit_write(src, dst.descriptor, imm=1)
    pair.there.wait_for_count_of(1, 10)

    pair.there.wait_count(1, 3)
    assert pair.there.count(1) == 7
    pair.there.wait_count(1, 7)
    assert pair.there.count(1) == 0


def test_a_wait_for_more_says_how_many_arrived(pair: Pair) -> None:
    src, dst = pair.source(8), pair.target(8)
    for _ in range(7):
        pair.here.submit_write(src, dst.descriptor, imm=1).wait(WAIT_S)
    pair.there.wait_for_count_of(1, 7)

    with pytest.raises(CommandError, match="7 of 10 arrived") as failure:
        pair.there.wait_count(1, 10, timeout_s=NEVER_S)

    assert failure.value.kind == "WaitTimeout"
    pair.there.expect_count(1, 7)  # a wait in vain consumes nothing


@setups([(1, 1), (4, 4)])
def test_counts_of_different_immediates_do_not_mix(pair: Pair) -> None:
    src, dst = pair.source(5000), pair.target(5000)
    times = {imm: 1 + imm % 3 for imm in range(50)}
    order = pair.seed.rng().permutation([imm for imm, count in times.items() for _ in range(count)])

    for imm in order:
        pair.here.submit_write(src, dst.descriptor, imm=int(imm))

    for imm, count in times.items():
        pair.there.expect_count(imm, count)


def test_a_count_can_be_awaited(pair: Pair) -> None:
    pair.run(_await_a_count(pair))


async def _await_a_count(pair: Pair) -> None:
    mine, remote = pair.memory(100), pair.target(100, fill=1)
    waiting = asyncio.create_task(pair.here.imm_counter(4).wait_async(3, WAIT_S))
    await asyncio.sleep(0)

    for _ in range(3):
        await asyncio.to_thread(pair.there.operate, "write", remote, [mine.descriptor], imm=4)

    await waiting
    assert pair.here.imm_counter(4).poll() == 0

"""submit_paged_writes: page i from src_pages[i] to dst_pages[i], one count per page."""

import numpy as np
import numpy.typing as npt
import pytest

from tests.contract.conftest import Pair, bytes_of
from tests.contract.setups import ALL_MEMORY, ALL_RAILS, SOME_MEMORY, SOME_RAILS, setups
from tests.support.limits import WAIT_S, eventually
from tests.support.patterns import CANARY, ByteArray, assert_same_bytes, not_aligned

Pages = npt.NDArray[np.int64]


def placed(src: ByteArray, src_pages: Pages, dst_pages: Pages, page_bytes: int, nbytes: int) -> ByteArray:
    """What a canary-filled target of `nbytes` holds after the write."""
    expected = np.full(nbytes, CANARY, np.uint8)
    for from_page, to_page in zip(src_pages, dst_pages, strict=True):
        expected[to_page * page_bytes :][:page_bytes] = src[from_page * page_bytes :][:page_bytes]
    return expected


def check(pair: Pair, src_pages: Pages, dst_pages: Pages, page_bytes: int, page_count: int) -> None:
    """Writes the pages between regions of `page_count` pages, then looks at bytes and count."""
    src = pair.source(page_count * page_bytes)
    dst = pair.target(page_count * page_bytes)

    pair.here.submit_paged_writes(src, src_pages, dst.descriptor, dst_pages, page_bytes, imm=2).wait(WAIT_S)

    pair.there.expect_count(2, len(src_pages))
    expected = placed(bytes_of(src), src_pages, dst_pages, page_bytes, dst.nbytes)
    assert_same_bytes(dst.content(), expected, f"pages of {page_bytes}")


@setups(ALL_RAILS, SOME_MEMORY)
def test_shuffled_pages_land_and_count_one_each(pair: Pair) -> None:
    rng = pair.seed.rng()
    for page_count, page_bytes in ((64, 4096), (333, 1000)):
        check(pair, rng.permutation(page_count), rng.permutation(page_count), page_bytes, page_count)


@setups(SOME_RAILS, ALL_MEMORY)
def test_shuffled_pages_between_every_kind_of_memory(pair: Pair) -> None:
    rng = pair.seed.rng()
    check(pair, rng.permutation(100), rng.permutation(100), 8192, 100)


@setups([(1, 1), (4, 3)], SOME_MEMORY)
@pytest.mark.parametrize("page_bytes", [1, 3, 63, 64, 65, 4096, 65_536, 100_003])
def test_pages_of_any_size(pair: Pair, page_bytes: int) -> None:
    rng = pair.seed.rng()
    check(pair, rng.permutation(20), rng.permutation(20), page_bytes, 20)


@setups(SOME_RAILS, SOME_MEMORY)
@pytest.mark.parametrize("page_bytes", [262_145, 1 << 20, 2_500_003])
def test_pages_that_are_cut_land_and_count_one_each(pair: Pair, page_bytes: int) -> None:
    rng = pair.seed.rng()
    check(pair, rng.permutation(5), rng.permutation(5), page_bytes, 5)


@setups(ALL_RAILS)
def test_a_run_of_adjacent_pages_counts_its_pages(pair: Pair) -> None:
    for run in (1, 2, 3, 4, 5, 7, 12, 13, 16, 31, 47, 48, 257, 1000):
        check(pair, np.arange(run), np.arange(run) + 3, 512, run + 3)


@setups(SOME_RAILS, ALL_MEMORY)
def test_run_longer_than_a_chunk_followed_by_a_short_piece(pair: Pair) -> None:
    for page_bytes in (4097, 2048 + 3, 65_537):  # 32 of the first are a little more than 128 KiB
        check(pair, np.arange(33), np.arange(33), page_bytes, 33)


@setups(SOME_RAILS)
def test_runs_of_mixed_lengths_count_their_pages(pair: Pair) -> None:
    rng = pair.seed.rng()
    starts = np.sort(rng.choice(2000, 120, replace=False))
    pages = np.concatenate([np.arange(a, b) for a, b in zip(starts[::2], starts[1::2], strict=True)])

    check(pair, pages, pages, 256, 2000)


@setups(SOME_RAILS, SOME_MEMORY)
def test_pages_in_reverse_order(pair: Pair) -> None:
    check(pair, np.arange(100), np.arange(100)[::-1].copy(), 777, 100)


@pytest.mark.parametrize("dtype", [np.int32, np.uint64])
def test_indices_that_are_not_aligned(pair: Pair, dtype: type) -> None:
    check(pair, not_aligned(np.arange(100).astype(dtype)), not_aligned(np.arange(100)[::-1].astype(dtype)), 777, 100)


@setups(SOME_RAILS, SOME_MEMORY)
def test_one_source_page_to_many_targets(pair: Pair) -> None:
    check(pair, np.zeros(50, np.int64), np.arange(50), 4096, 50)


@setups(SOME_RAILS, SOME_MEMORY)
def test_overlapping_target_pages_are_allowed_and_all_count(pair: Pair) -> None:
    src = pair.source(64 * 4096)
    dst = pair.target(3 * 4096)

    pair.here.submit_paged_writes(src, np.arange(64), dst.descriptor, np.ones(64, np.int64), 4096, imm=1).wait(WAIT_S)

    pair.there.expect_count(1, 64)
    content = dst.content().reshape(3, 4096)
    assert (content[[0, 2]] == CANARY).all()
    # Which page wins is undefined, but every byte of the target page is from its place in some source page.
    assert (content[1] == bytes_of(src).reshape(64, 4096)).any(axis=0).all()


@setups(SOME_RAILS, SOME_MEMORY)
def test_strides_wider_than_pages_leave_the_gaps(pair: Pair) -> None:
    pages, page_bytes, src_stride, dst_stride, src_offset, dst_offset = 30, 1000, 1500, 4096, 11, 77
    src = pair.source(src_offset + pages * src_stride)
    dst = pair.target(dst_offset + pages * dst_stride)
    rng = pair.seed.rng()
    src_pages, dst_pages = rng.permutation(pages), rng.permutation(pages)

    pair.here.submit_paged_writes(
        src,
        src_pages,
        dst.descriptor,
        dst_pages,
        page_bytes,
        src_stride=src_stride,
        dst_stride=dst_stride,
        src_offset=src_offset,
        dst_offset=dst_offset,
        imm=1,
    ).wait(WAIT_S)

    pair.there.expect_count(1, pages)
    expected = np.full(dst.nbytes, CANARY, np.uint8)
    for a, b in zip(src_pages, dst_pages, strict=True):
        expected[dst_offset + b * dst_stride :][:page_bytes] = src.array()[src_offset + a * src_stride :][:page_bytes]
    assert_same_bytes(dst.content(), expected)


@setups(SOME_RAILS, SOME_MEMORY)
def test_strides_narrower_than_pages_read_overlapping_windows(pair: Pair) -> None:
    src = pair.source(100 + 49 * 10)
    dst = pair.target(50 * 100)

    pair.here.submit_paged_writes(src, np.arange(50), dst.descriptor, np.arange(50), 100, src_stride=10, imm=1).wait(
        WAIT_S
    )

    pair.there.expect_count(1, 50)
    windows = np.stack([bytes_of(src)[10 * i : 10 * i + 100] for i in range(50)])
    assert_same_bytes(dst.content(), windows.ravel())


@setups(SOME_RAILS)
def test_stride_zero_repeats_one_page(pair: Pair) -> None:
    src = pair.source(100)
    dst = pair.target(500)

    pair.here.submit_paged_writes(src, np.arange(5), dst.descriptor, np.arange(5), 100, src_stride=0, imm=1).wait(
        WAIT_S
    )

    pair.there.expect_count(1, 5)
    assert_same_bytes(dst.content(), np.tile(bytes_of(src), 5))


@setups([(1, 1), (4, 4)], SOME_MEMORY)
def test_last_page_may_end_with_the_region(pair: Pair) -> None:
    src, dst = pair.source(10 * 999), pair.target(10 * 999)

    pair.here.submit_paged_writes(src, np.array([9]), dst.descriptor, np.array([9]), 999, imm=1).wait(WAIT_S)

    pair.there.expect_count(1, 1)
    assert_same_bytes(dst.content(9 * 999), bytes_of(src)[9 * 999 :])


@setups([(4, 4), (4, 1)])
def test_pages_pinned_to_a_rail(pair: Pair) -> None:
    src = pair.source(64 * 512)

    for rail in range(4):
        dst = pair.target(64 * 512)
        pages = pair.seed.rng(rail).permutation(64)
        pair.here.submit_paged_writes(src, pages, dst.descriptor, pages, 512, imm=rail, rail=rail).wait(WAIT_S)

        pair.there.expect_count(rail, 64)
        assert_same_bytes(dst.content(), bytes_of(src), f"rail {rail}")


@setups([(1, 1), (16, 5)], SOME_MEMORY)
def test_thousands_of_pages(pair: Pair) -> None:
    rng = pair.seed.rng()
    check(pair, rng.permutation(20_000), rng.permutation(20_000), 128, 20_000)


@setups([(1, 1), (4, 4)])
def test_index_arrays_may_change_right_after_submit(pair: Pair) -> None:
    src, dst = pair.source(500 * 2000), pair.target(500 * 2000)
    src_pages, dst_pages = np.arange(500), np.arange(500)[::-1].copy()
    expected = placed(bytes_of(src), src_pages, dst_pages, 2000, dst.nbytes)

    transfer = pair.here.submit_paged_writes(src, src_pages, dst.descriptor, dst_pages, 2000, imm=1)
    src_pages[:] = 0
    dst_pages[:] = 0
    transfer.wait(WAIT_S)

    pair.there.expect_count(1, 500)
    assert_same_bytes(dst.content(), expected)


@setups([(1, 1), (4, 4)])
def test_pages_without_immediate_move_and_count_nothing(pair: Pair) -> None:
    src, dst = pair.source(10 * 100), pair.target(10 * 100)

    pair.here.submit_paged_writes(src, np.arange(10), dst.descriptor, np.arange(10), 100).wait(WAIT_S)
    pair.here.submit_write(src, dst.descriptor, 0, imm=0).wait(WAIT_S)

    pair.there.expect_count(0, 1)
    eventually(lambda: np.array_equal(dst.content(), bytes_of(src)), "the bytes, which nothing counts")

"""Poisoned memory: a late write is found where it was, nothing else is."""

from __future__ import annotations

import numpy as np
import pytest

import crossrail as xr
from tests.support.limits import WAIT_S
from tests.support.seeds import Seed

NBYTES = 100_003


@pytest.mark.parametrize("kind", ["alloc", "register"])
def test_write_of_a_peer_is_found_with_its_place_and_bytes(engine: xr.Engine, other: xr.Engine, kind: str) -> None:
    target = other.alloc(NBYTES) if kind == "alloc" else other.register(np.zeros(NBYTES, np.uint8))
    poisoned = target.poison(1000, 50_000)
    assert repr(poisoned).startswith(f"<Poisoned memory of <Region of {NBYTES} bytes at ")
    poisoned.check()
    written = ~target.array()[20_001:20_025]  # no byte of it is what lies there by chance
    src = engine.register(written)
    engine.submit_write(src, target.descriptor, dst_offset=20_001, imm=1).wait(WAIT_S)
    other.imm_counter(1).wait(1, WAIT_S)
    with pytest.raises(xr.LateWrite) as caught:
        poisoned.check()
    error = caught.value
    assert (error.offset, error.nbytes, error.found, error.pages) == (20_001, 24, written[:16].tobytes(), 1)
    assert f"Region of {NBYTES} bytes" in str(error) and "offset 20001" in str(error)
    assert written[:4].tobytes().hex(" ") in str(error)


def test_writes_beside_poisoned_memory_are_none(engine: xr.Engine, other: xr.Engine) -> None:
    target = other.alloc(NBYTES)
    target.array()[:] = 7
    poisoned = target.poison(1001, 2000)
    src = engine.alloc(4096)
    engine.submit_write(src, target.descriptor, 1001, imm=1).wait(WAIT_S)
    engine.submit_write(src, target.descriptor, 4096, dst_offset=3001, imm=1).wait(WAIT_S)
    other.imm_counter(1).wait(2, WAIT_S)
    poisoned.check()
    assert (target.array()[:1001] == 0).all() and (target.array()[3001 + 4096 :] == 7).all()


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int64, np.uint64])
def test_pages_are_poisoned_and_no_others(engine: xr.Engine, seed: Seed, dtype: type) -> None:
    region = engine.alloc(64 * 1000 + 13)
    region.array()[:] = 3
    pages = seed.rng().permutation(64)[:20].astype(dtype)
    poisoned = region.poison_pages(pages, 500, stride=1000, offset=13)
    poisoned.check()
    rows = region.array()[13:].reshape(64, 1000)
    kept = np.setdiff1d(np.arange(64), pages)
    assert (rows[:, 500:] == 3).all() and (rows[kept] == 3).all()
    assert (rows[pages.astype(int), :500] != 3).mean() > 0.9

    rows[kept] = 9
    rows[:, 500:] = 9
    poisoned.check()
    for page in (pages[4], pages[11]):
        rows[int(page), 100:103] ^= 255
    with pytest.raises(xr.LateWrite) as caught:
        poisoned.check()
    assert (caught.value.offset, caught.value.nbytes, caught.value.pages) == (13 + 1000 * int(pages[4]) + 100, 3, 2)
    assert "1 more page" in str(caught.value)


def test_zeros_copies_and_older_poison_are_found(engine: xr.Engine) -> None:
    region = engine.alloc(8192)
    region.poison()
    before = region.array().copy()
    poisoned = region.poison()
    poisoned.check()
    after = region.array().copy()
    for intruder in (np.zeros(64, np.uint8), before[:64], after[64:128]):
        region.array()[:64] = intruder
        with pytest.raises(xr.LateWrite):
            poisoned.check()
        region.array()[:64] = after[:64]
        poisoned.check()


def test_closed_region_keeps_its_poison(engine: xr.Engine, other: xr.Engine) -> None:
    """What close() promises, looked at: its poison outlives it, and nothing of a peer lands there."""
    target = other.alloc(NBYTES)
    src = engine.alloc(NBYTES)
    engine.submit_write(src, target.descriptor, imm=1).wait(WAIT_S)
    poisoned = target.poison()
    target.close()
    with pytest.raises(xr.RemoteRegionClosed):
        engine.submit_write(src, target.descriptor, imm=1).wait(WAIT_S)
    poisoned.check()
    other.close()
    poisoned.check()


def test_block_checks_at_its_end_unless_it_raises(engine: xr.Engine) -> None:
    region = engine.alloc(100)
    with region.poison():
        pass

    def write(then: BaseException | None = None) -> None:
        with region.poison(10, 20):
            region.array()[15] ^= 255
            if then is not None:
                raise then

    with pytest.raises(xr.LateWrite) as caught:
        write()
    assert caught.value.offset == 15
    with pytest.raises(ZeroDivisionError):
        write(ZeroDivisionError())


@pytest.mark.parametrize(
    ("offset", "nbytes"), [(0, 101), (101, 0), (100, 1), (-1, 10), (0, -1), (2**63, 1), (0, 2**64), (200, None)]
)
def test_range_outside_the_region_is_refused(engine: xr.Engine, offset: int, nbytes: int | None) -> None:
    region = engine.alloc(100)
    with pytest.raises(xr.UsageError):
        region.poison(offset, nbytes)
    assert not region.array().any()


def test_pages_outside_the_region_are_refused(engine: xr.Engine) -> None:
    region = engine.alloc(1000)
    with pytest.raises(xr.UsageError, match=r"pages\[2\] = 10"):
        region.poison_pages(np.array([0, 9, 10]), 100)
    with pytest.raises(xr.UsageError, match=r"pages\[0\] = -1"):
        region.poison_pages(np.array([-1]), 100)
    with pytest.raises(xr.UsageError, match="pages must be a one-dimensional"):
        region.poison_pages([0, 1], 100)
    assert not region.array().any()
    region.poison_pages(np.array([], np.int64), 100).check()


def test_memory_that_is_not_ours_to_write_is_refused(engine: xr.Engine) -> None:
    with pytest.raises(xr.UsageError, match="read-only"):
        engine.register(b"constant").poison()
    closed = engine.alloc(10)
    closed.close()
    with pytest.raises(xr.UsageError):
        closed.poison()

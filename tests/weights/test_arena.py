"""Pieces of an arena never overlap, and when all are given back it is whole again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import crossrail as xr
from crossrail.weights.step.arena import ALIGN_BYTES, Arena, aligned

UNITS = 16


@given(st.lists(st.tuples(st.booleans(), st.integers(0, UNITS * ALIGN_BYTES)), max_size=60))
def test_random_takes_and_gives(steps: list[tuple[bool, int]]) -> None:
    arena = Arena(UNITS * ALIGN_BYTES)
    held: list[tuple[int, int]] = []
    peak = 0
    for takes, nbytes in steps:
        if takes or not held:
            offset = arena.take(nbytes)
            if offset is None:
                gaps, end = [], 0
                for start, length in sorted(held):
                    gaps.append(start - end)
                    end = start + aligned(length)
                assert max([*gaps, arena.nbytes - end]) < nbytes
                continue
            if nbytes:
                held.append((offset, nbytes))
        else:
            arena.give(*held.pop(nbytes % len(held)))
        ends = [0] + [offset + aligned(length) for offset, length in sorted(held)]
        assert all(offset >= end for (offset, _), end in zip(sorted(held), ends, strict=False))
        assert ends[-1] <= arena.nbytes
        assert arena.used_bytes == sum(aligned(length) for _, length in held)
        peak = max(peak, arena.used_bytes)
        assert arena.peak_bytes == peak
    for piece in held:
        arena.give(*piece)
    assert arena.take(arena.nbytes) == 0


def test_more_than_it_has_is_refused() -> None:
    with pytest.raises(xr.UsageError, match="more than the 256"):
        Arena(256).take(257)


def test_what_was_not_taken_is_not_given_back() -> None:
    arena = Arena(1024)
    assert arena.take(300) == 0
    for offset, nbytes in ((256, 300), (0, 700)):
        with pytest.raises(xr.UsageError, match="was taken"):
            arena.give(offset, nbytes)
    assert arena.used_bytes == 512


def test_length_must_be_a_multiple() -> None:
    with pytest.raises(xr.UsageError, match="multiple of 256"):
        Arena(1000)

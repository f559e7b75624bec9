"""Choosing senders, against the rule taken literally: one slice after the other, to the least loaded."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from crossrail.weights.balance import choose, classes_of, fill

LOADS = st.lists(st.integers(0, 50), min_size=1, max_size=6)


@given(LOADS, st.integers(0, 20), st.integers(0, 40))
def test_filling_up_is_giving_out_one_by_one(load: list[int], size: int, count: int) -> None:
    wanted, level = [0] * len(load), list(load)
    for _ in range(count):
        # Slices without bytes weigh nothing: then the number of slices decides.
        least = min(range(len(load)), key=lambda i: (level[i], i) if size else (wanted[i], i))
        wanted[least] += 1
        level[least] += size

    shares = fill(np.array(load), size, count)

    assert shares.tolist() == wanted


@given(st.lists(st.lists(st.integers(0, 5), unique=True, max_size=4).map(sorted), max_size=12))
def test_equal_lists_get_equal_numbers(lists: list[list[int]]) -> None:
    first = np.cumsum([0, *map(len, lists)])
    members = np.array([member for one in lists for member in one], np.int64)

    number, kinds = classes_of(first, members)

    assert [kinds[n].tolist() for n in number] == lists
    assert len(kinds) == len({tuple(one) for one in lists})


@given(st.data())
def test_senders_end_as_even_as_slices_are_long(data: st.DataObject) -> None:
    senders = data.draw(st.integers(1, 6))
    nbytes = np.array(data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=40)))

    turn = np.zeros_like(nbytes)
    chosen = choose(turn, [np.arange(senders)], nbytes, turn, senders)

    load = np.bincount(chosen, weights=nbytes, minlength=senders)
    assert load.max() - load.min() <= nbytes.max()


def test_slices_without_a_choice_are_counted_before_those_with_one() -> None:
    kind, candidates = np.array([1, 0]), [np.array([0]), np.array([0, 1])]

    assert choose(kind, candidates, np.array([10, 10]), np.array([0, 1]), 2).tolist() == [1, 0]

"""Choosing senders, against the rule taken literally: one slice after the other, to the least loaded."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from crossrail.weights.planning.balance import choose, classes_of, fill

SENDERS = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 9)), min_size=1, max_size=6)


@given(SENDERS, st.integers(0, 20), st.integers(0, 40))
def test_filling_up_is_giving_out_one_by_one(senders: list[tuple[int, int]], size: int, count: int) -> None:
    wanted, level = [0] * len(senders), [load for load, _ in senders]
    cost = [cost for _, cost in senders]
    for _ in range(count):
        # Slices without bytes weigh nothing: then the number of slices decides.
        first = min(range(len(senders)), key=lambda i: ((level[i] + size) * cost[i] if size else wanted[i], i))
        wanted[first] += 1
        level[first] += size

    shares = fill(np.array([load for load, _ in senders]), np.array(cost), size, count)

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
    chosen = choose(turn, [np.arange(senders)], nbytes, turn, np.ones(senders, np.int64))

    load = np.bincount(chosen, weights=nbytes, minlength=senders)
    assert load.max() - load.min() <= nbytes.max()


def test_slices_without_a_choice_are_counted_before_those_with_one() -> None:
    kind, candidates = np.array([1, 0]), [np.array([0]), np.array([0, 1])]

    assert choose(kind, candidates, np.array([10, 10]), np.array([0, 1]), np.ones(2, np.int64)).tolist() == [1, 0]


def test_slow_sender_gets_as_much_less_and_bytes_that_it_has_besides_count() -> None:
    kind, nbytes = np.zeros(30, np.int64), np.full(30, 10)
    cost = np.array([2, 1])

    slow = choose(kind, [np.arange(2)], nbytes, kind, cost)
    busy = choose(kind, [np.arange(2)], nbytes, kind, cost, np.array([0, 150]))

    assert np.bincount(slow, minlength=2).tolist() == [10, 20]
    assert np.bincount(busy, minlength=2).tolist() == [15, 15]

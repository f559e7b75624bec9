"""Chooses each slice's sender: of its holders, the one with the fewest bytes so far relative to its speed."""

from __future__ import annotations

import numpy as np

from crossrail.weights.planning.boxes import Ints, columns_of, distinct


def classes_of(first: Ints, members: Ints) -> tuple[Ints, list[Ints]]:
    """Lists that are equal get the same number. List i is members[first[i] : first[i + 1]].

    Returns the number of each list, and the lists by number.
    """
    # Column by column: two lists are equal when they are as long, and equal at each place. So the work is one sort for
    # each place, not one look for each list.
    counts = np.diff(first)
    number = distinct([counts])[1]
    for place in range(int(counts.max(initial=0))):
        longer = place < counts
        at = np.zeros(len(counts), np.int64)
        at[longer] = members[first[:-1][longer] + place]
        at[~longer] = -1
        number = distinct([number, at])[1]
    chosen = np.zeros(int(number.max(initial=-1)) + 1, np.int64)
    chosen[number] = np.arange(len(number))
    return number, [members[first[i] : first[i + 1]] for i in chosen]


def choose(
    kind: Ints, candidates: list[Ints], nbytes: Ints, turn: Ints, cost: Ints, already: Ints | None = None
) -> Ints:
    """The sender of each slice.

    kind: of each slice, an index into candidates, which lists senders, ascending. nbytes: its size. cost: of a byte at
    each sender (speeds.costs_of): the one that would finish first is chosen. already: bytes that each sender has to
    send besides.

    Slices without a choice come first, then those of the lowest turn, large ones first. Of slices with equal turn, size
    and kind each sender gets neighbours, so that it prepares few cells. Ties go to the lower number: the same input
    gives the same plan.
    """
    load = np.zeros(len(cost), np.int64) if already is None else already.copy()
    sender = np.zeros(len(kind), np.int64)
    only = np.array([len(members) == 1 for members in candidates], bool)
    fixed = only[kind]
    firsts = np.array([members[0] for members in candidates], np.int64)
    sender[fixed] = firsts[kind[fixed]]
    np.add.at(load, sender[fixed], nbytes[fixed])
    free = np.flatnonzero(~fixed)
    if not len(free):
        return sender
    runs, run_of = distinct(columns_of(turn[free], -nbytes[free], kind[free]))
    order = np.argsort(run_of, kind="stable")
    ends = np.cumsum(np.bincount(run_of))
    for run, end, count in zip(runs, ends, np.bincount(run_of), strict=True):
        slices = free[order[end - count : end]]
        size = int(nbytes[free[run]])
        members = candidates[kind[free[run]]]
        shares = fill(load[members], cost[members], size, int(count))
        sender[slices] = np.repeat(members, shares)
        load[members] += shares * size
    return sender


def fill(load: Ints, cost: Ints, size: int, count: int) -> Ints:
    """How many of `count` slices of equal size each gets if each slice goes to whoever would finish first; ties to the
    first.

    load: bytes. cost: of a byte. Dealing them out one by one fills up the lowest first, like water. So all end below a
    common level, which is found by bisection; the rest goes to those that then finish first.
    """
    if size == 0:
        shares = np.full(len(load), count // len(load))
        shares[: count % len(load)] += 1
        return shares

    def below(level: int) -> Ints:
        """How many slices each can take and end below the level: (load + shares * size) * cost < level."""
        room = -(-level // cost) - 1 - load
        taken: Ints = np.maximum(room, 0) // size
        return taken

    low = 0  # nobody ends below it
    high = int(((load + size * (count + 1)) * cost).min()) + 1  # one of them alone would take more than all
    while high - low > 1:
        level = (low + high) // 2
        if int(below(level).sum()) <= count:
            low = level
        else:
            high = level
    shares = below(low)
    left = count - int(shares.sum())
    # One level higher more than `left` would take one, all of which end on this level: first come first served.
    next_up = np.argsort((load + (shares + 1) * size) * cost, kind="stable")[:left]
    shares[next_up] += 1
    return shares

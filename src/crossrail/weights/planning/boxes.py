"""Arithmetic on many boxes at once. A box is a row of starts and a row of stops, shape (n, dims), int64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Ints: TypeAlias = npt.NDArray[np.int64]

_PAIRS_MAX = 1 << 21  # compared at a time, which bounds the memory
_FEW = 16  # pairs for each box: to find out which are worth a look costs about as much as to look at so many


class Boxes(NamedTuple):
    """Boxes that belong to something: those with the same key are compared."""

    key: Ints
    start: Ints
    stop: Ints

    @property
    def volume(self) -> Ints:
        """Elements of each."""
        return volume(self.start, self.stop)


class Overlaps(NamedTuple):
    """Pairs of a box of one and a box of another set that share something, ascending; start, stop: what they share."""

    left: Ints
    right: Ints
    start: Ints
    stop: Ints


def volume(start: Ints, stop: Ints) -> Ints:
    """Elements of each box; 0 where it is empty."""
    product: Ints = np.maximum(stop - start, 0).prod(axis=-1)
    return product


def overlaps(left: Boxes, right: Boxes) -> Overlaps:
    """All pairs of the same key that share an element. The keys of right are ascending."""
    found = list(_overlaps(left, right))
    if not found:
        none = np.zeros((0, left.start.shape[1]), np.int64)
        return Overlaps(none[:, 0], none[:, 0], none, none)
    pairs = Overlaps(*(np.concatenate(parts) for parts in zip(*found, strict=True)))
    before, after = (pairs.left[:-1], pairs.right[:-1]), (pairs.left[1:], pairs.right[1:])
    if ((before[0] < after[0]) | ((before[0] == after[0]) & (before[1] < after[1]))).all():
        return pairs
    order = np.lexsort((pairs.right, pairs.left))
    return Overlaps(*(column[order] for column in pairs))


def _overlaps(left: Boxes, right: Boxes) -> Iterator[Overlaps]:
    place, first, counts = _candidates(left, right)
    ends = np.cumsum(counts)
    begin = 0
    while begin < len(counts):
        done = ends[begin - 1] if begin else 0
        stop = max(begin + 1, int(np.searchsorted(ends, done + _PAIRS_MAX, "right")))
        some = counts[begin:stop]
        a = np.repeat(np.arange(begin, stop), some)
        b = place[np.repeat(first[begin:stop], some) + ranges(some)]
        low = np.maximum(left.start[a], right.start[b])
        high = np.minimum(left.stop[a], right.stop[b])
        shared = (low < high).all(axis=1)
        yield Overlaps(a[shared], b[shared], low[shared], high[shared])
        begin = stop


def _candidates(left: Boxes, right: Boxes) -> tuple[Ints, Ints, Ints]:
    """Boxes of right that a box of left may meet: place[first[i] : first[i] + counts[i]], a superset of those that it
    meets.

    If there are few, all of its key. Of many, those that it meets along one dimension, the one along which most of them
    begin at different places: a parameter sharded over a thousand processes has a thousand boxes, and each meets only
    one or two boxes of another sharding.
    """
    first = np.searchsorted(right.key, left.key, "left")
    counts = np.searchsorted(right.key, left.key, "right") - first
    if int(counts.sum()) <= _FEW * (len(left.key) + len(right.key)):
        return np.arange(len(right.key)), first, counts
    keys, of = np.unique(right.key, return_inverse=True)
    starts = [np.bincount(unique_pairs(of, start)[0], minlength=len(keys)) for start in right.start.T]
    dims = np.argmax(starts, axis=0)
    there = np.minimum(np.searchsorted(keys, left.key), len(keys) - 1)
    low, high = (np.take_along_axis(side, dims[there][:, np.newaxis], 1)[:, 0] for side in (left.start, left.stop))
    begin, end = (np.take_along_axis(side, dims[of][:, np.newaxis], 1)[:, 0] for side in (right.start, right.stop))
    place = np.lexsort((begin, of))
    # Which of them have ended: an earlier one may be longer, so use the running maximum of the ends.
    furthest = _furthest(of[place], end[place])
    known = keys[there] == left.key
    ended = _before(of[place], furthest, there, low, ties=True)
    begun = _before(of[place], begin[place], there, high, ties=False)
    return place, ended, np.where(known, np.maximum(begun - ended, 0), 0)


def _furthest(key: Ints, value: Ints) -> Ints:
    """For each row the largest value of its key so far. key: ascending."""
    _, rank = distinct([key, value])  # ranks ascend by key, then value: so each key has a maximum of its own
    by_rank = np.empty_like(value)
    by_rank[rank] = value
    furthest: Ints = by_rank[np.maximum.accumulate(rank)]
    return furthest


def _before(key: Ints, value: Ints, wanted_key: Ints, wanted: Ints, *, ties: bool) -> Ints:
    """How many rows come before each wanted one, by key and value; ties: including equal ones. Rows ascend."""
    is_wanted = np.concatenate([np.zeros(len(key), np.int64), np.ones(len(wanted), np.int64)])
    turn = is_wanted if ties else -is_wanted
    order = np.lexsort((turn, np.concatenate([value, wanted]), np.concatenate([key, wanted_key])))
    rows = np.cumsum(1 - is_wanted[order])
    count = np.empty(len(order), np.int64)
    count[order] = rows
    return count[len(key) :]


def ranges(counts: Ints) -> Ints:
    """0, 1, ..., counts[0] - 1, 0, 1, ..., counts[1] - 1, ..."""
    total = int(counts.sum())
    return np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)


def grid(keys: Ints, shape: Ints, cuts: Sequence[tuple[Ints, Ints]]) -> Boxes:
    """The cells of grids, in C order: for each key (ascending) a box of this shape, cut along each dimension.

    cuts: for each dimension (key, where), sorted by both; every key has a cut at 0.
    """
    firsts = [np.searchsorted(of, keys, "left") for of, _ in cuts]
    counts = [np.searchsorted(of, keys, "right") - first for (of, _), first in zip(cuts, firsts, strict=True)]
    cells = np.prod(counts, axis=0)
    owner = np.repeat(np.arange(len(keys)), cells)
    rest = ranges(cells)
    start = np.zeros((len(owner), len(cuts)), np.int64)
    stop = shape[owner]
    for dim in reversed(range(len(cuts))):
        count = counts[dim][owner]
        index = firsts[dim][owner] + rest % count
        where = cuts[dim][1]
        start[:, dim] = where[index]
        inner = rest % count < count - 1
        stop[inner, dim] = where[index[inner] + 1]
        rest = rest // count
    return Boxes(keys[owner], start, stop)


class Fault(NamedTuple):
    """A box of this key that is claimed by none, or by several."""

    key: int
    start: Ints
    stop: Ints
    claims: int

    def where(self, dims: int) -> str:
        """As an index expression, in so many dimensions."""
        pairs = zip(self.start[:dims], self.stop[:dims], strict=True)
        return "[" + ", ".join(f"{a}:{b}" for a, b in pairs) + "]"


def find_fault(tiles: Boxes, start: Ints, stop: Ints) -> Fault | None:
    """None when the tiles of each key k (0, 1, ...), all inside, fill the box start[k] .. stop[k], each part once."""
    cells, claims = faults(tiles, start, stop)
    for key in cells.key[:1].tolist():
        return Fault(key, cells.start[0], cells.stop[0], int(claims[0]))
    return None


def faults(tiles: Boxes, start: Ints, stop: Ints) -> tuple[Boxes, Ints]:
    """Where the tiles of each key do not fill its box in the sense of find_fault(): boxes, and how many tiles claim
    each.

    Cut along all edges of its tiles, the box splits into cells that are entirely inside or outside each tile.
    """
    alone = np.bincount(tiles.key, minlength=len(start)) == 1
    whole = np.zeros(len(start), bool)
    same = (tiles.start == start[tiles.key]).all(1) & (tiles.stop == stop[tiles.key]).all(1)
    whole[tiles.key[same]] = True
    looked_at = ~(alone & whole)  # most have one tile, and need no look
    keys = np.flatnonzero(looked_at)
    chosen = np.flatnonzero(looked_at[tiles.key])
    chosen = chosen[np.argsort(tiles.key[chosen], kind="stable")]
    of = tiles.key[chosen]
    inside = Boxes(of, tiles.start[chosen] - start[of], tiles.stop[chosen] - start[of])
    cells = cut_along_edges(inside, keys, stop - start)
    claims = np.bincount(overlaps(cells, inside).left, minlength=len(cells.key))
    bad = np.flatnonzero(claims != 1)
    key = cells.key[bad]
    return Boxes(key, cells.start[bad] + start[key], cells.stop[bad] + start[key]), claims[bad]


def cut_along_edges(tiles: Boxes, keys: Ints, shape: Ints) -> Boxes:
    """Boxes of the shape[k] of each of these keys k, ascending, cut along all edges of the key's tiles."""
    cuts = []
    for dim in range(shape.shape[1]):
        edges = np.concatenate([tiles.start[:, dim], tiles.stop[:, dim], np.zeros(len(keys), np.int64)])
        owner = np.concatenate([tiles.key, tiles.key, keys])
        inside = edges < shape[owner, dim]
        cuts.append(unique_pairs(owner[inside], edges[inside]))
    return grid(keys, shape[keys], cuts)


def unique_pairs(key: Ints, value: Ints) -> tuple[Ints, Ints]:
    """Distinct ones, ascending."""
    chosen, _ = distinct([key, value])
    return key[chosen], value[chosen]


def is_run(start: Ints, stop: Ints, whole_start: Ints, whole_stop: Ints) -> npt.NDArray[np.bool_]:
    """Whether the elements of a box lie side by side when the box around it is laid out in C order."""
    extent = stop - start
    full = extent == whole_stop - whole_start
    run = np.ones(len(extent), bool)
    inner_full = np.ones(len(extent), bool)  # all dimensions behind this one are full
    for dim in reversed(range(extent.shape[1])):
        run &= inner_full | (extent[:, dim] == 1)
        inner_full &= full[:, dim]
    return run


def flat_offset(point: Ints, start: Ints, stop: Ints) -> Ints:
    """How many elements of a box in C order come before the one at this point."""
    offset = np.zeros(len(point), np.int64)
    for dim in range(point.shape[1]):
        offset = offset * (stop[:, dim] - start[:, dim]) + point[:, dim] - start[:, dim]
    return offset


def distinct(columns: Sequence[Ints]) -> tuple[Ints, Ints]:
    """For rows given as columns: one row of each distinct kind, sorted; and each row's kind."""
    order = np.lexsort(columns[::-1])
    new = np.zeros(len(order), bool)
    new[:1] = True
    for column in columns:
        values = column[order]
        new[1:] |= values[1:] != values[:-1]
    kind = np.empty(len(order), np.int64)
    kind[order] = np.cumsum(new) - 1
    return order[new], kind


def columns_of(*arrays: Ints) -> list[Ints]:
    """Columns of arrays of one or two dimensions."""
    found: list[Ints] = []
    for array in arrays:
        found.extend([array] if array.ndim == 1 else list(array.T))
    return found

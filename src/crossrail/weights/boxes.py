"""Arithmetic of many boxes at once. A box is a row of start and one of stop, shape (n, dims), int64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Ints: TypeAlias = npt.NDArray[np.int64]

_PAIRS_MAX = 1 << 21  # looked at in one go, which bounds the memory


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
    return Overlaps(*(np.concatenate(parts) for parts in zip(*found, strict=True)))


def _overlaps(left: Boxes, right: Boxes) -> Iterator[Overlaps]:
    first = np.searchsorted(right.key, left.key, "left")
    counts = np.searchsorted(right.key, left.key, "right") - first
    ends = np.cumsum(counts)
    begin = 0
    while begin < len(counts):
        done = ends[begin - 1] if begin else 0
        stop = max(begin + 1, int(np.searchsorted(ends, done + _PAIRS_MAX, "right")))
        some = counts[begin:stop]
        a = np.repeat(np.arange(begin, stop), some)
        b = np.repeat(first[begin:stop], some) + ranges(some)
        low = np.maximum(left.start[a], right.start[b])
        high = np.minimum(left.stop[a], right.stop[b])
        shared = (low < high).all(axis=1)
        yield Overlaps(a[shared], b[shared], low[shared], high[shared])
        begin = stop


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
        """As one would index it; of so many dimensions."""
        pairs = zip(self.start[:dims], self.stop[:dims], strict=True)
        return "[" + ", ".join(f"{a}:{b}" for a, b in pairs) + "]"


def find_fault(tiles: Boxes, start: Ints, stop: Ints) -> Fault | None:
    """None when the tiles of each key k (0, 1, ...), all inside, fill the box start[k] .. stop[k], each element once.

    Cut along all edges of its tiles, the box falls into cells that are wholly in a tile or wholly outside.
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
    low, high = tiles.start[chosen] - start[of], tiles.stop[chosen] - start[of]
    cuts = []
    for dim in range(start.shape[1]):
        edges = np.concatenate([low[:, dim], high[:, dim], np.zeros(len(keys), np.int64)])
        owner = np.concatenate([of, of, keys])
        inside = edges < (stop - start)[owner, dim]
        cuts.append(unique_pairs(owner[inside], edges[inside]))
    cells = grid(keys, (stop - start)[keys], cuts)
    claims = np.bincount(overlaps(cells, Boxes(of, low, high)).left, minlength=len(cells.key))
    for cell in np.flatnonzero(claims != 1)[:1]:
        key = int(cells.key[cell])
        return Fault(key, cells.start[cell] + start[key], cells.stop[cell] + start[key], int(claims[cell]))
    return None


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
    """Of rows given by columns: one row of each distinct kind, kinds ascending by the columns; each row's kind."""
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

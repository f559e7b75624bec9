"""Which boxes of a parameter lie where at the trainers, and into which cells it is cut to be prepared."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from crossrail.errors import UsageError
from crossrail.weights.boxes import Boxes, Ints, columns_of, distinct, grid, overlaps, ranges
from crossrail.weights.dtypes import ITEM_BYTES
from crossrail.weights.tables import Forms, Tables


class Sources(NamedTuple):
    """Distinct boxes, by parameter and mesh, and who holds each.

    boxes.key: the parameter; mesh: of each box. holders: rows of the source side, those of box i from first[i] to
    first[i + 1], by rank.
    """

    boxes: Boxes
    mesh: Ints
    holders: Ints
    first: Ints


def sources_of(tables: Tables) -> Sources:
    """Raises UsageError where the boxes of a mesh overlap, or leave something of the parameter out."""
    rows, rank = tables.source
    param, mesh = rows["name"].astype(np.int64), rows["mesh"].astype(np.int64)
    chosen, kind = distinct(columns_of(param, mesh, rows["start"], rows["stop"]))
    holders = np.lexsort((rank, kind))
    first = np.searchsorted(kind[holders], np.arange(len(chosen) + 1))
    boxes = Boxes(param[chosen], rows["start"][chosen], rows["stop"][chosen])
    sources = Sources(boxes, mesh[chosen], holders, first)
    _check_twice(tables, kind[holders], rank[holders])
    _check_whole(tables, sources, rows["shape"][chosen])
    return sources


def _check_twice(tables: Tables, kind: Ints, rank: Ints) -> None:
    twice = np.flatnonzero((kind[1:] == kind[:-1]) & (rank[1:] == rank[:-1]))
    if len(twice):
        name = tables.source.rows["name"][_order(tables)[twice[0]]]
        raise UsageError(f"{tables.names[name]!r}: trainer {rank[twice[0]]} lists the same box twice")


def _order(tables: Tables) -> Ints:
    rows, rank = tables.source
    _, kind = distinct(columns_of(rows["name"], rows["mesh"], rows["start"], rows["stop"]))
    return np.lexsort((rank, kind))


def _check_whole(tables: Tables, sources: Sources, shape: Ints) -> None:
    """Every element of every parameter lies in one box of each of its meshes."""
    boxes = sources.boxes
    # Parameters whose one box is all of them need no look, and are most.
    alone = (boxes.start == 0).all(1) & (boxes.stop == shape).all(1)
    if alone.all():
        return
    key = boxes.key * len(tables.meshes) + sources.mesh
    keys, at = np.unique(key, return_index=True)
    cuts = []
    for dim in range(shape.shape[1]):
        edges = np.concatenate([boxes.start[:, dim], boxes.stop[:, dim], np.zeros(len(keys), np.int64)])
        of = np.concatenate([key, key, keys])
        inside = edges < np.concatenate([shape[:, dim], shape[:, dim], shape[at, dim]])
        cuts.append(_unique_pairs(of[inside], edges[inside]))
    cells = grid(keys, shape[at], cuts)
    pairs = overlaps(cells, Boxes(key, boxes.start, boxes.stop))
    claims = np.bincount(pairs.left, minlength=len(cells.key))
    for cell in np.flatnonzero(claims != 1)[:1]:
        name, mesh = divmod(int(cells.key[cell]), len(tables.meshes))
        dims = int(tables.source.rows["dims"][tables.source.rows["name"] == name][0])
        where = [f"{a}:{b}" for a, b in zip(cells.start[cell, :dims], cells.stop[cell, :dims], strict=True)]
        what = "claimed by boxes that overlap" if claims[cell] else "held by no trainer"
        raise UsageError(f"{tables.names[name]!r}: [{', '.join(where)}] is {what}, in mesh {tables.meshes[mesh]!r}")


def _unique_pairs(key: Ints, value: Ints) -> tuple[Ints, Ints]:
    chosen, _ = distinct([key, value])
    return key[chosen], value[chosen]


def cells_of(forms: Forms, sources: Sources, *, whole: bool, write_bytes_min: int) -> Boxes:
    """Each form cut into cells, which trainers prepare; key: the form.

    They follow the boxes that trainers hold, rounded to whole blocks, so that most need nothing that is elsewhere. They
    are joined until one has write_bytes_min bytes, as far as there are. whole: one cell for each form.
    """
    count = len(forms.param)
    block = np.maximum(forms.block, 1)
    boxes = sources.boxes
    first = np.searchsorted(boxes.key, forms.param, "left")
    boxes_of = np.searchsorted(boxes.key, forms.param, "right") - first
    owner = np.repeat(np.arange(count), boxes_of)
    box = np.repeat(first, boxes_of) + ranges(boxes_of)
    nbytes = forms.shape.prod(axis=1) * ITEM_BYTES[forms.dtype]
    cells_max = np.maximum(nbytes // max(write_bytes_min, 1), 1)
    cuts = []
    for dim in range(forms.shape.shape[1]):
        size = block[owner, dim]
        where = (boxes.start[box, dim] + size // 2) // size * size
        inside = (where < forms.shape[owner, dim]) & (not whole)
        of = np.concatenate([owner[inside], np.arange(count)])
        key, value = _unique_pairs(of, np.concatenate([where[inside], np.zeros(count, np.int64)]))
        cuts.append(_thinned(key, value, cells_max))
        cells_max = np.maximum(cells_max // np.bincount(cuts[-1][0], minlength=count), 1)
    return grid(np.arange(count), forms.shape, cuts)


def _thinned(key: Ints, value: Ints, count_max: Ints) -> tuple[Ints, Ints]:
    """Every n-th cut of each key, so that at most count_max[key] are left; the first always."""
    counts = np.bincount(key, minlength=len(count_max))
    step = -(-counts // count_max)
    kept = ranges(counts) % step[key] == 0
    return key[kept], value[kept]

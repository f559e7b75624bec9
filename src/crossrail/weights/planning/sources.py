"""Where the boxes of a parameter are at the trainers, and the cells into which it is cut to be prepared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from crossrail.errors import UsageError
from crossrail.weights.dtypes import ITEM_BYTES
from crossrail.weights.errors import Unheld
from crossrail.weights.planning.boxes import (
    Boxes,
    Fault,
    Ints,
    columns_of,
    cut_along_edges,
    distinct,
    faults,
    grid,
    overlaps,
    ranges,
    unique_pairs,
)
from crossrail.weights.planning.tables import Forms, Tables

_PARTIAL = (
    ". A mesh has all of a parameter, or a part that no other has. Next: see that all of its processes have joined, "
    "and describe what they hold; where some are gone for good, PlanOptions(partial=True)"
)


class Sources(NamedTuple):
    """Distinct boxes, by parameter and mesh, and their holders.

    boxes.key: the parameter. mesh: of each box. hull: of each box, what its mesh holds of the parameter, a row of
    hulls. holders: rows of the source side; those of box i are first[i] to first[i + 1], by rank. hulls.key: the
    parameter. Hulls are distinct and disjoint; several meshes may have the same.
    """

    boxes: Boxes
    mesh: Ints
    hull: Ints
    holders: Ints
    first: Ints
    hulls: Boxes


class _Found(NamedTuple):
    """As in Sources. boxes: by parameter, then mesh."""

    boxes: Boxes
    mesh: Ints
    holders: Ints
    first: Ints


class _Held(NamedTuple):
    """What each mesh holds of a parameter, with boxes grouped into hulls, by parameter, then mesh.

    group: of each box of a Sources. hulls.key: the parameter.
    """

    group: Ints
    hulls: Boxes
    mesh: Ints


def sources_of(tables: Tables, partial: bool = False) -> Sources:
    """Raises UsageError if the boxes of a mesh overlap; unless partial, also if hulls overlap, or a mesh has holes in
    what no other mesh has whole; Unheld if a part of a parameter is held nowhere.

    The remains of a mesh that has lost trainers are not used if another mesh has all of that. partial: for a parameter
    that no mesh has whole any more, whatever any of them has is used.
    """
    rows, rank = tables.source
    param, mesh = rows["name"].astype(np.int64), rows["mesh"].astype(np.int64)
    chosen, kind = distinct(columns_of(param, mesh, rows["start"], rows["stop"]))
    holders = np.lexsort((rank, kind))
    first = np.searchsorted(kind[holders], np.arange(len(chosen) + 1))
    twice = (kind[holders][1:] == kind[holders][:-1]) & (rank[holders][1:] == rank[holders][:-1])
    for row in holders[1:][twice][:1]:
        raise UsageError(f"{tables.names[param[row]]!r}: trainer {rank[row]} lists the same box twice")
    if not len(mesh):
        raise UsageError("the trainers hold no parameter")

    boxes = Boxes(param[chosen], rows["start"][chosen], rows["stop"][chosen])
    params, at = np.unique(boxes.key, return_index=True)
    shapes = rows["shape"][chosen[at]]
    found = _Found(boxes, mesh[chosen], holders, first)
    held = _held(found)
    needed, torn = _needed(tables, found, held, partial)
    if not needed.all():
        found = _taken(found, np.flatnonzero(needed[held.group]))
        held = _held(found)
    hulls, hull_of = _distinct(held.hulls)
    bad, claims = _faults(hulls, params, shapes)
    if partial:
        torn = np.unique(np.concatenate([torn, bad.key[claims > 1]]))
        if len(torn):
            found, around = _cut(found, held, torn, shapes[np.searchsorted(params, torn)])
            hulls, hull_of = _distinct(around)
            bad, claims = _faults(hulls, params, shapes)
    for key in bad.key[:1].tolist():
        meshes = np.unique(found.mesh[found.boxes.key == key]).tolist() if key in torn else []
        among = _PARTIAL if claims[0] else _in_mesh(tables, meshes)
        raise _error(tables, Fault(key, bad.start[0], bad.stop[0], int(claims[0])), among)
    return Sources(found.boxes, found.mesh, hull_of if len(torn) else hull_of[held.group], *found[2:], hulls)


def _held(found: _Found) -> _Held:
    """boxes: by parameter, then mesh."""
    boxes, mesh = found.boxes, found.mesh
    starts, group = distinct([boxes.key, mesh])
    start, stop = np.minimum.reduceat(boxes.start, starts), np.maximum.reduceat(boxes.stop, starts)
    return _Held(group, Boxes(boxes.key[starts], start, stop), mesh[starts])


def _taken(found: _Found, at: Ints) -> _Found:
    """Selects these boxes, in this order; repetitions allowed."""
    boxes, counts = found.boxes, np.diff(found.first)[at]
    return _Found(
        Boxes(boxes.key[at], boxes.start[at], boxes.stop[at]),
        found.mesh[at],
        found.holders[np.repeat(found.first[at], counts) + ranges(counts)],
        np.concatenate([[0], np.cumsum(counts)]),
    )


def _distinct(hulls: Boxes) -> tuple[Boxes, Ints]:
    """Removes duplicates; returns the distinct hulls, and which of them each one is."""
    at, of = distinct(columns_of(*hulls))
    return Boxes(hulls.key[at], hulls.start[at], hulls.stop[at]), of


def _faults(hulls: Boxes, params: Ints, shapes: Ints) -> tuple[Boxes, Ints]:
    """Where the (distinct) hulls do not fill their parameters, as faults() reports it. shapes: of params, ascending."""
    inside = Boxes(np.searchsorted(params, hulls.key), hulls.start, hulls.stop)
    bad, claims = faults(inside, np.zeros_like(shapes), shapes)
    return Boxes(params[bad.key], bad.start, bad.stop), claims


def _cut(found: _Found, held: _Held, torn: Ints, shapes: Ints) -> tuple[_Found, Boxes]:
    """Cuts the boxes of these parameters along all of their edges, each piece a hull of its own, so that overlapping
    hulls become equal. Also returns the hulls of all boxes. shapes: of torn, ascending.
    """
    is_torn = np.isin(found.boxes.key, torn)
    some, rest = np.flatnonzero(is_torn), np.flatnonzero(~is_torn)
    key = np.searchsorted(torn, found.boxes.key[some])
    tiles = Boxes(key, found.boxes.start[some], found.boxes.stop[some])
    pairs = overlaps(tiles, cut_along_edges(tiles, np.arange(len(torn)), shapes))
    at = np.concatenate([rest, some[pairs.left]])
    start = np.concatenate([held.hulls.start[held.group[rest]], pairs.start])
    stop = np.concatenate([held.hulls.stop[held.group[rest]], pairs.stop])
    own = np.concatenate([np.zeros(len(rest), bool), np.ones(len(pairs.left), bool)])
    order = np.lexsort((*start.T[::-1], found.mesh[at], found.boxes.key[at]))
    at, start, stop, own = at[order], start[order], stop[order], own[order, np.newaxis]
    pieces = _taken(found, at)
    cut = Boxes(pieces.boxes.key, np.where(own, start, pieces.boxes.start), np.where(own, stop, pieces.boxes.stop))
    return pieces._replace(boxes=cut), Boxes(cut.key, start, stop)


def _needed(tables: Tables, found: _Found, held: _Held, partial: bool) -> tuple[npt.NDArray[np.bool_], Ints]:
    """For each group, whether no other mesh has all of it whole, and more than it; and the parameters of needed groups
    that have holes: none, unless partial.
    """
    hulls, boxes = held.hulls, found.boxes
    holes, claims = faults(Boxes(held.group, boxes.start, boxes.stop), hulls.start, hulls.stop)

    def error(at: int) -> UsageError:
        group = holes.key[at]
        fault = Fault(int(hulls.key[group]), holes.start[at], holes.stop[at], int(claims[at]))
        others = np.count_nonzero(hulls.key == hulls.key[group]) > 1
        hint = _PARTIAL if others and not fault.claims else ""
        return _error(tables, fault, _in_mesh(tables, [held.mesh[group]]) + hint)

    for at in np.flatnonzero(claims > 1)[:1].tolist():
        raise error(at)
    has_holes = np.zeros(len(held.mesh), bool)
    has_holes[holes.key] = True
    whole = np.flatnonzero(~has_holes)
    whole = whole[distinct(columns_of(hulls.key[whole], hulls.start[whole], hulls.stop[whole]))[0]]
    others = Boxes(hulls.key[whole], hulls.start[whole], hulls.stop[whole])
    pairs = overlaps(hulls, others)
    inside = ((pairs.start == hulls.start[pairs.left]) & (pairs.stop == hulls.stop[pairs.left])).all(axis=1)
    more = has_holes[pairs.left] | (others.volume[pairs.right] > hulls.volume[pairs.left])
    needed = np.ones(len(held.mesh), bool)
    needed[pairs.left[inside & more]] = False
    if not partial:
        for at in np.flatnonzero(needed[holes.key])[:1].tolist():
            raise error(at)
    return needed, np.unique(hulls.key[needed & has_holes])


def _in_mesh(tables: Tables, meshes: Sequence[int]) -> str:
    """Names the mesh, if there is one."""
    return f", in mesh {tables.meshes[meshes[0]]!r}" if len(meshes) == 1 else ""


def _error(tables: Tables, fault: Fault, among: str) -> UsageError:
    dims = int(tables.source.rows["dims"][tables.source.rows["name"] == fault.key][0])
    what = "claimed by trainers whose boxes overlap" if fault.claims else "held by no trainer"
    kind = UsageError if fault.claims else Unheld
    return kind(f"{tables.names[fault.key]!r}: {fault.where(dims)} is {what}{among}")


def cells_of(forms: Forms, sources: Sources, whole: bool, write_bytes_min: int, task_bytes_max: int) -> Boxes:
    """Cuts each form into cells, which trainers prepare; key: the form.

    Cells follow the boxes that trainers hold, rounded to whole blocks, so that most need nothing from elsewhere. They
    are joined until they have write_bytes_min bytes, as far as possible, and cut along their first dimension down to
    task_bytes_max at the trainers, as far as possible. whole: each cell is everything that a mesh holds.
    """
    count = len(forms.param)
    block = np.maximum(forms.block, 1)
    pieces = sources.hulls if whole else sources.boxes
    first = np.searchsorted(pieces.key, forms.param, "left")
    pieces_of = np.searchsorted(pieces.key, forms.param, "right") - first
    owner = np.repeat(np.arange(count), pieces_of)
    piece = np.repeat(first, pieces_of) + ranges(pieces_of)
    nbytes = forms.shape.prod(axis=1) * ITEM_BYTES[forms.dtype]
    cells_max = np.maximum(nbytes // write_bytes_min, 1)
    cuts = []
    for dim in range(forms.shape.shape[1]):
        size = block[owner, dim]
        where = (pieces.start[piece, dim] + size // 2) // size * size
        inside = where < forms.shape[owner, dim]
        of = np.concatenate([owner[inside], np.arange(count)])
        key, value = unique_pairs(of, np.concatenate([where[inside], np.zeros(count, np.int64)]))
        if not whole:
            key, value = _thinned(key, value, cells_max)
            cells_max = np.maximum(cells_max // np.bincount(key, minlength=count), 1)
        cuts.append((key, value))
    if not whole:
        # A row of a cell is as long as the longest piece that the other dimensions leave.
        row_bytes = ITEM_BYTES[forms.source_dtype].astype(np.int64)
        for dim in range(1, len(cuts)):
            row_bytes = row_bytes * _longest(*cuts[dim], forms.shape[:, dim])
        rows = np.maximum(task_bytes_max // row_bytes // block[:, 0], 1) * block[:, 0]
        cuts[0] = _refined(*cuts[0], forms.shape[:, 0], rows)
    return grid(np.arange(count), forms.shape, cuts)


def _longest(key: Ints, value: Ints, end: Ints) -> Ints:
    """For each key, the longest distance from one cut to the next, or to the end."""
    longest = np.zeros(len(end), np.int64)
    np.maximum.at(longest, key, _following(key, value, end) - value)
    return longest


def _following(key: Ints, value: Ints, end: Ints) -> Ints:
    """For each cut, where the next one of its key is, or the end. Cuts ascend by key and value."""
    following = end[key].copy()
    same = key[1:] == key[:-1]
    following[:-1][same] = value[1:][same]
    return following


def _refined(key: Ints, value: Ints, end: Ints, step: Ints) -> tuple[Ints, Ints]:
    """Adds cuts, so that they are at most step[key] apart."""
    extent = _following(key, value, end) - value
    counts = np.maximum(-(-extent // step[key]), 1)
    key, value = np.repeat(key, counts), np.repeat(value, counts) + ranges(counts) * np.repeat(step[key], counts)
    return key, value


def _thinned(key: Ints, value: Ints, count_max: Ints) -> tuple[Ints, Ints]:
    """Every n-th cut of each key, so that at most count_max[key] are left; the first always."""
    counts = np.bincount(key, minlength=len(count_max))
    step = -(-counts // count_max)
    kept = ranges(counts) % step[key] == 0
    return key[kept], value[kept]

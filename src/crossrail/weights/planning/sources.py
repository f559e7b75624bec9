"""Which boxes of a parameter lie where at the trainers, and into which cells it is cut to be prepared."""

from __future__ import annotations

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
    distinct,
    faults,
    find_fault,
    grid,
    overlaps,
    ranges,
    unique_pairs,
)
from crossrail.weights.planning.tables import Forms, Tables


class Sources(NamedTuple):
    """Distinct boxes, by parameter and mesh, and who holds each.

    boxes.key: the parameter. mesh: of each box. hull: of each box, what its mesh holds of the parameter, a row of
    hulls. holders: rows of the source side, those of box i from first[i] to first[i + 1], by rank.
    hulls.key: the parameter. Hulls are distinct and disjoint; several meshes may have the same.
    """

    boxes: Boxes
    mesh: Ints
    hull: Ints
    holders: Ints
    first: Ints
    hulls: Boxes


class _Held(NamedTuple):
    """What each mesh holds of a parameter, those of boxes grouped: hulls, by parameter, then mesh.

    group: of each box of a Sources. hulls.key: the parameter.
    """

    group: Ints
    hulls: Boxes
    mesh: Ints


def sources_of(tables: Tables) -> Sources:
    """Raises UsageError where the boxes of a mesh overlap, or hulls do; Unheld where something of a parameter is
    nowhere, or a mesh has holes in what no other mesh has whole.

    What is left of a mesh that has lost trainers is not used where another mesh has all of that.
    """
    rows, rank = tables.source
    param, mesh = rows["name"].astype(np.int64), rows["mesh"].astype(np.int64)
    chosen, kind = distinct(columns_of(param, mesh, rows["start"], rows["stop"]))
    holders = np.lexsort((rank, kind))
    first = np.searchsorted(kind[holders], np.arange(len(chosen) + 1))
    twice = (kind[holders][1:] == kind[holders][:-1]) & (rank[holders][1:] == rank[holders][:-1])
    for row in holders[1:][twice][:1]:
        raise UsageError(f"{tables.names[param[row]]!r}: trainer {rank[row]} lists the same box twice")

    boxes, mesh = Boxes(param[chosen], rows["start"][chosen], rows["stop"][chosen]), mesh[chosen]
    if not len(mesh):
        raise UsageError("the trainers hold no parameter")
    held = _held(boxes, mesh)
    kept = _needed(tables, boxes, held)[held.group]
    if not kept.all():
        boxes, mesh = Boxes(boxes.key[kept], boxes.start[kept], boxes.stop[kept]), mesh[kept]
        counts = np.diff(first)
        holders = holders[np.repeat(kept, counts)]
        first = np.concatenate([[0], np.cumsum(counts[kept])])
        held = _held(boxes, mesh)
    hulls = held.hulls
    hull_at, hull_of = distinct(columns_of(*hulls))
    hulls = Boxes(hulls.key[hull_at], hulls.start[hull_at], hulls.stop[hull_at])
    params, param_of = np.unique(hulls.key, return_inverse=True)
    shapes = rows["shape"][chosen][np.searchsorted(param[chosen], params)]
    fault = find_fault(Boxes(param_of, hulls.start, hulls.stop), np.zeros_like(shapes), shapes)
    if fault is not None:
        raise _error(tables, fault, int(params[fault.key]), "")
    return Sources(boxes, mesh, hull_of[held.group], holders, first, hulls)


def _held(boxes: Boxes, mesh: Ints) -> _Held:
    """boxes: by parameter, then mesh."""
    starts, group = distinct([boxes.key, mesh])
    start, stop = np.minimum.reduceat(boxes.start, starts), np.maximum.reduceat(boxes.stop, starts)
    return _Held(group, Boxes(boxes.key[starts], start, stop), mesh[starts])


def _needed(tables: Tables, boxes: Boxes, held: _Held) -> npt.NDArray[np.bool_]:
    """Of each group, whether no other mesh has all of it whole, and more than it."""
    hulls = held.hulls
    holes, claims = faults(Boxes(held.group, boxes.start, boxes.stop), hulls.start, hulls.stop)

    def error(at: int) -> UsageError:
        group = holes.key[at]
        fault = Fault(int(group), holes.start[at], holes.stop[at], int(claims[at]))
        return _error(tables, fault, int(hulls.key[group]), f", in mesh {tables.meshes[held.mesh[group]]!r}")

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
    for at in np.flatnonzero(needed[holes.key])[:1].tolist():
        raise error(at)
    return needed


def _error(tables: Tables, fault: Fault, param: int, among: str) -> UsageError:
    dims = int(tables.source.rows["dims"][tables.source.rows["name"] == param][0])
    what = "claimed by trainers whose boxes overlap" if fault.claims else "held by no trainer"
    kind = UsageError if fault.claims else Unheld
    return kind(f"{tables.names[param]!r}: {fault.where(dims)} is {what}{among}")


def cells_of(forms: Forms, sources: Sources, whole: bool, write_bytes_min: int, task_bytes_max: int) -> Boxes:
    """Each form cut into cells, which trainers prepare; key: the form.

    They follow the boxes that trainers hold, rounded to whole blocks, so that most need nothing that is elsewhere. They
    are joined until one has write_bytes_min bytes, as far as there are, and cut along their first dimension until they
    have task_bytes_max at the trainers, as far as that goes. whole: they are what a mesh holds, all of it.
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
    """Of each key, the longest distance from one cut to the next, or to the end."""
    longest = np.zeros(len(end), np.int64)
    np.maximum.at(longest, key, _following(key, value, end) - value)
    return longest


def _following(key: Ints, value: Ints, end: Ints) -> Ints:
    """Of each cut, where the next one of its key is, or the end. Cuts ascend by key and value."""
    following = end[key].copy()
    same = key[1:] == key[:-1]
    following[:-1][same] = value[1:][same]
    return following


def _refined(key: Ints, value: Ints, end: Ints, step: Ints) -> tuple[Ints, Ints]:
    """With more cuts, so that they are at most step[key] apart."""
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

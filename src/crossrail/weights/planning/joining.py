"""Joins tasks whose bytes are adjacent at their trainer and at a target, such as q, k and v of a fused tensor.

Direct tasks have no buffer, so it costs nothing to send more of them at once; one write instead of three is less work
for both sides, and the inference rank counts one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from crossrail.weights.planning.boxes import Ints, distinct

_JOINED_BYTES_MAX = 64 << 20  # larger ones would gain nothing, and be late


class Rows(NamedTuple):
    """Rows of a plan in the making; writes in any order, the others in the order of their tasks."""

    tasks: Any
    parts: Any
    gathers: Any
    outputs: Any
    writes: Any


def join_direct(rows: Rows) -> Rows:
    """Each direct task has one part, gather and output when it comes, several when it goes: outputs' offsets and
    writes' sources are then from where the first of them lies.
    """
    tasks = rows.tasks
    nbytes = np.zeros(len(tasks), np.int64)
    nbytes[rows.parts["task"][rows.outputs["part"]]] = rows.outputs["nbytes"]
    names = ("trainer", "group", "mesh", "region")
    some = np.flatnonzero(tasks["direct"])
    some = some[np.lexsort((tasks["offset"][some], *(tasks[name][some] for name in reversed(names))))]
    one, other = some[:-1], some[1:]
    side_by_side = (tasks["offset"][one] + nbytes[one] == tasks["offset"][other]) & np.logical_and.reduce(
        [tasks[name][one] == tasks[name][other] for name in names]
    )
    one, other = one[side_by_side], other[side_by_side]
    goes_on = np.zeros(len(tasks), bool)
    goes_on[other[_meet(rows.writes, nbytes, one, other)]] = True
    return _numbered(rows, _leaders(some, goes_on[some], nbytes))


def _meet(writes: Any, nbytes: Ints, one: Ints, other: Ints) -> Ints:
    """Among pairs of tasks, those where a write of the other continues one of the first, on both sides."""
    left, right = np.full(len(nbytes), -1), np.full(len(nbytes), -1)
    left[one] = right[other] = np.arange(len(one))
    task = writes["task"]
    ends = writes[(left[task] >= 0) & (writes["source"] + writes["nbytes"] == nbytes[task])]
    begins = writes[(right[task] >= 0) & (writes["source"] == 0)]
    pair = np.concatenate([left[ends["task"]], right[begins["task"]]])
    columns = [
        pair,
        *(np.concatenate([ends[name], begins[name]]).astype(np.int64) for name in ("target", "region")),
        np.concatenate([ends["offset"] + ends["nbytes"], begins["offset"]]),
    ]
    # A place is written once: a row of this kind on each side, at most.
    first, kind = distinct(columns)
    return np.unique(pair[first[np.bincount(kind, minlength=len(first)) == 2]])


def _leaders(some: Ints, goes_on: Any, nbytes: Ints) -> Ints:
    """For each task the task that it is merged into, mostly itself. some: in the order of their memory."""
    leader = np.arange(len(nbytes))
    if not len(some):
        return leader
    before = np.cumsum(nbytes[some]) - nbytes[some]
    chain = np.flatnonzero(~goes_on)
    of = np.cumsum(~goes_on) - 1
    piece = (before + nbytes[some] - 1 - before[chain][of]) // _JOINED_BYTES_MAX
    begins = ~goes_on
    begins[1:] |= piece[1:] != piece[:-1]
    leader[some] = some[np.flatnonzero(begins)][np.cumsum(begins) - 1]
    return leader


def _numbered(rows: Rows, leader: Ints) -> Rows:
    """Tasks that are left take the place of the first in order, and everything else follows them."""
    tasks = rows.tasks
    kept = leader == np.arange(len(tasks))
    number = (np.cumsum(kept) - 1)[leader]
    shift = np.where(tasks["direct"], tasks["offset"] - tasks["offset"][leader], 0)

    parts, gathers, outputs, writes = (table.copy() for table in rows[1:])
    outputs["offset"] += shift[parts["task"][outputs["part"]]]
    writes["source"] += shift[writes["task"]]
    writes["task"] = number[writes["task"]]
    order = np.lexsort((shift[parts["task"]], number[parts["task"]]))
    place = np.empty(len(parts), np.int64)
    place[order] = np.arange(len(parts))
    parts["task"] = number[parts["task"]]
    for table in (gathers, outputs):
        table["part"] = place[table["part"]]
    return Rows(
        tasks[kept],
        parts[order],
        gathers[np.argsort(gathers["part"], kind="stable")],
        outputs[np.argsort(outputs["part"], kind="stable")],
        writes,
    )

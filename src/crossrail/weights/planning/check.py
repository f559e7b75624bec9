"""Proves that a plan is correct, from the inventories alone, and by other means than those that made it.

What is proved: every byte that a target holds is written exactly once, and nothing else is; each value written there is
the element that belongs there, in its dtype; and every part is gathered completely from where its elements are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np

from crossrail.errors import UsageError
from crossrail.weights.dtypes import DTYPES, FLOAT32, ITEM_BYTES, dtype_code
from crossrail.weights.errors import PlanError
from crossrail.weights.inventory.holdings import DIMS, REGION_BYTES_MAX, Inventory, c_strides
from crossrail.weights.planning.boxes import Boxes, Ints, distinct, find_fault, ranges
from crossrail.weights.planning.plan import Plan
from crossrail.weights.planning.tables import Side, Tables, join


class _Runs(NamedTuple):
    """Contiguous memory of holdings or outputs; ascending by place, and disjoint.

    place: which memory (number) and offset, in one number. first: element of the box that it begins with. row: its
    owner.
    """

    place: Ints
    nbytes: Ints
    row: Ints
    first: Ints


_SPAN = REGION_BYTES_MAX
_PLACE_MAX = np.iinfo(np.int64).max


def check_plan(plan: Plan, trainers: Sequence[Inventory], targets: Sequence[Inventory]) -> None:
    """Returns if the plan is correct for these inventories. Pure; takes about as long as planning.

    Raises UsageError if two holdings of a target overlap, and PlanError for anything else, naming the parameter.
    """
    joined = join(sorted(trainers, key=lambda one: one.rank), sorted(targets, key=lambda one: one.rank))
    for role, inventories, ranks in (("trainers", trainers, plan.trainers), ("targets", targets, plan.targets)):
        if tuple(sorted(one.rank for one in inventories)) != ranks:
            raise PlanError(f"the plan is for the {role} {_short(ranks)}, these are others")
    _check_params(joined, plan)
    _check_outputs(plan)
    _, memory = distinct(
        [
            np.concatenate([joined.target.rank, plan.writes["target"].astype(np.int64)]),
            np.concatenate([joined.target.rows["region"], plan.writes["region"]]).astype(np.int64),
        ]
    )
    if _SPAN * (int(memory.max(initial=0)) + 1) > _PLACE_MAX:
        raise PlanError(f"the inference ranks have more than {_PLACE_MAX // _SPAN} regions together")
    held, written = memory[: len(joined.target.rank)], memory[len(joined.target.rank) :]
    runs = _holding_runs(joined.target, held)
    _check_claims(joined, runs)
    order = np.argsort(written * _SPAN + plan.writes["offset"], kind="stable")
    place, nbytes = (written * _SPAN + plan.writes["offset"])[order], plan.writes["nbytes"][order]
    _check_once(joined, runs, place, nbytes)
    _check_content(joined, plan, runs, place, order)
    _check_gathers(joined, plan)


def _check_params(joined: Tables, plan: Plan) -> None:
    """The plan's parameters are those that trainers hold."""
    rows = joined.source.rows
    first = dict(zip(rows["name"][::-1].tolist(), range(len(rows))[::-1], strict=True))
    number = {name: i for i, name in enumerate(joined.names)}
    for param in plan.params:
        row = first.get(number.get(param.name, -1))
        if row is None:
            raise PlanError(f"{param.name!r} of the plan is held by no trainer")
        shape = tuple(rows["shape"][row][: rows["dims"][row]].tolist())
        if (param.dtype, param.shape) != (DTYPES[rows["dtype"][row]], shape):
            raise PlanError(
                f"{param.name!r} has the shape {param.shape} in {param.dtype} in the plan, at the trainers {shape} in "
                f"{DTYPES[rows['dtype'][row]]}"
            )


def _short(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f", ... ({len(ranks)} in all)" if len(ranks) > 8 else "")


# --- target bytes: once, and no others ---


def _holding_runs(side: Side, memory: Ints) -> _Runs:
    rows = side.rows
    extent = rows["stop"] - rows["start"]
    nbytes = ITEM_BYTES[rows["dtype"]].copy()
    outer = extent.copy()
    packed = np.ones(len(rows), bool)
    for dim in reversed(range(DIMS)):
        packed &= (extent[:, dim] == 1) | (rows["strides"][:, dim] == nbytes)
        nbytes[packed] *= extent[packed, dim]
        outer[packed, dim] = 1
    counts = outer.prod(axis=1)
    row = np.repeat(np.arange(len(rows)), counts)
    index = np.zeros((len(row), DIMS), np.int64)
    rest = ranges(counts)
    for dim in reversed(range(DIMS)):
        index[:, dim] = rest % outer[row, dim]
        rest //= outer[row, dim]
    place = memory[row] * _SPAN + rows["offset"][row] + (index * rows["strides"][row]).sum(axis=1)
    order = np.argsort(place, kind="stable")
    return _Runs(place[order], nbytes[row][order], row[order], (rows["start"][row] + index)[order])


def _check_claims(joined: Tables, runs: _Runs) -> None:
    rows, rank = joined.target
    clash = np.flatnonzero(runs.place[1:] < runs.place[:-1] + runs.nbytes[:-1])
    for run in clash[:1]:
        one, two = (joined.names[rows["name"][runs.row[i]]] for i in (run, run + 1))
        raise UsageError(
            f"{one!r} and {two!r} lie in the same memory of inference rank {rank[runs.row[run]]}. Next: add a tensor "
            "that has two names (tied weights) under one of them"
        )


def _check_once(joined: Tables, runs: _Runs, place: Ints, nbytes: Ints) -> None:
    if (nbytes < 1).any():
        raise PlanError("the plan has a write without bytes")
    twice = np.flatnonzero(place[1:] < place[:-1] + nbytes[:-1])
    if len(twice):
        _refuse(joined, runs, int(place[twice[0] + 1]), "is written twice")
    for one, other, what in (
        (_melted(runs.place, runs.nbytes), _melted(place, nbytes), "is not written"),
        (_melted(place, nbytes), _melted(runs.place, runs.nbytes), "is written, and is not of it"),
    ):
        # Each interval of the one lies in an interval of the other.
        at = np.maximum(np.searchsorted(other[0], one[0], "right") - 1, 0)
        inside = len(other[0]) > 0 and (one[0] >= other[0][at]) & (one[1] <= other[1][at])
        bad = np.flatnonzero(~np.broadcast_to(inside, one[0].shape))
        if len(bad):
            # The first byte of it that is nowhere in the other.
            first = one[0][bad[0]]
            if len(other[0]) and other[0][at[bad[0]]] <= first < other[1][at[bad[0]]]:
                first = other[1][at[bad[0]]]
            _refuse(joined, runs, int(first), what)


def _melted(place: Ints, nbytes: Ints) -> tuple[Ints, Ints]:
    """Intervals, ascending and disjoint, with adjacent ones merged: their begins and ends."""
    ends = place + nbytes
    begins = np.ones(len(place), bool)
    begins[1:] = place[1:] != ends[:-1]
    return place[begins], ends[np.append(begins[1:], True)] if len(place) else ends


def _refuse(joined: Tables, runs: _Runs, place: int, what: str) -> NoReturn:
    rows, rank = joined.target
    run = max(int(np.searchsorted(runs.place, place, "right")) - 1, 0)
    row = runs.row[run]
    name = joined.names[rows["name"][row]]
    where = f"byte {place % _SPAN} of region {rows['region'][row]} of inference rank {rank[row]}"
    raise PlanError(f"{name!r}: {where} {what}")


# --- the right elements ---


def _check_outputs(plan: Plan) -> None:
    """Outputs are boxes of their parts, apart in the buffer; and bytes that lie ready are what a buffer would hold."""
    outputs, parts = plan.outputs, plan.parts
    part = parts[outputs["part"]]
    scales = outputs["scales"]
    block = np.where(scales[:, np.newaxis], np.maximum(part["block"], 1), 1)
    _demand((part["start"] % np.maximum(part["block"], 1) == 0).all(axis=1), plan, "is cut within a block")
    start, stop = part["start"] // block, -(-part["stop"] // block)
    inside = (start <= outputs["start"]) & (outputs["start"] < outputs["stop"]) & (outputs["stop"] <= stop)
    _demand(inside.all(axis=1), plan, "has an output outside of a part")
    item = np.where(scales, ITEM_BYTES[FLOAT32], ITEM_BYTES[part["dtype"]])
    _demand(
        (outputs["stop"] - outputs["start"]).prod(axis=1) * item == outputs["nbytes"], plan, "has an output too long"
    )
    place = part["task"].astype(np.int64) * _task_span(plan) + outputs["offset"]
    order = np.argsort(place, kind="stable")
    apart = np.ones(len(outputs), bool)
    apart[order[1:]] = place[order[1:]] >= (place + outputs["nbytes"])[order[:-1]]
    task = plan.tasks[part["task"]]
    _demand(apart & (outputs["offset"] >= 0), plan, "has outputs that overlap in a buffer")
    fits = task["direct"] | (outputs["offset"] + outputs["nbytes"] <= task["buffer_bytes"])
    _demand(fits, plan, "has an output that ends behind its buffer")

    first = plan.part_gathers[:-1][outputs["part"]]
    _demand(first < plan.part_gathers[1:][outputs["part"]], plan, "has a part that is gathered by none")
    gathers = plan.gathers[first]
    extent = outputs["stop"] - outputs["start"]
    dtypes = np.array([dtype_code(param.dtype) for param in plan.params], np.int64)[part["param"]]
    ready = (
        (gathers["trainer"] == task["trainer"])
        & (gathers["region"] == task["region"])
        & (gathers["offset"] == task["offset"] + outputs["offset"])
        & (gathers["start"] == outputs["start"]).all(axis=1)
        & (gathers["stop"] == outputs["stop"]).all(axis=1)
        & ((gathers["strides"] == c_strides(extent, item)) | (extent == 1)).all(axis=1)
        & (dtypes == part["dtype"])
        & ~part["block"].any(axis=1)
    )
    _demand(~task["direct"] | ready, plan, "is sent as it lies, but does not lie as it is sent")


def _task_span(plan: Plan) -> int:
    """More than any task's buffer has, so that task and offset in it are one number."""
    ends = [int((plan.outputs["offset"] + plan.outputs["nbytes"]).max(initial=0))]
    ends.append(int((plan.writes["source"] + plan.writes["nbytes"]).max(initial=0)))
    span = max(ends) + 1
    if span * (len(plan.tasks) + 1) > _PLACE_MAX:
        raise PlanError(f"the plan has {len(plan.tasks)} tasks, and buffers of {span - 1} bytes")
    return span


def _demand(right: Any, plan: Plan, what: str) -> None:
    for output in np.flatnonzero(~right)[:1]:
        param = plan.params[plan.parts["param"][plan.outputs["part"][output]]]
        raise PlanError(f"{param.name!r} {what}")


def _check_content(joined: Tables, plan: Plan, runs: _Runs, place: Ints, order: Ints) -> None:
    """Cut where a holding or an output ends, each write is a box of a parameter, and must be the same on both sides."""
    rows = joined.target.rows
    writes = plan.writes[order]
    outputs = plan.outputs
    if ((writes["source"] < 0) | (writes["source"] > _SPAN)).any() or (outputs["offset"] > _SPAN).any():
        raise PlanError("the plan has a write from outside of its task's buffer")
    span = _task_span(plan)
    output_place = plan.parts["task"][outputs["part"]].astype(np.int64) * span + outputs["offset"]
    by_place = np.argsort(output_place, kind="stable")
    output_place = output_place[by_place]
    source = writes["task"].astype(np.int64) * span + writes["source"]

    write, at = _cut(place, writes["nbytes"], runs.place)
    write, at, nbytes = _cut_again(write, at, source, writes["nbytes"], output_place)
    run = np.searchsorted(runs.place, place[write] + at, "right") - 1
    found = np.maximum(np.searchsorted(output_place, source[write] + at, "right") - 1, 0)
    output = by_place[found]
    begins = source[write] + at - output_place[found]

    row, part = runs.row[run], outputs["part"][output]
    _expect(
        (begins >= 0) & (begins + nbytes <= outputs["nbytes"][output]), joined, row, "is taken from outside a buffer"
    )
    names = np.array([plan.params[i].name for i in range(len(plan.params))], object)
    number = {name: i for i, name in enumerate(joined.names)}
    param = np.array([number.get(name, -1) for name in names], np.int64)[plan.parts["param"][part]]
    scales = outputs["scales"][output]
    _expect(np.where(scales, rows["scale_of"][row], rows["name"][row]) == param, joined, row, "gets another parameter")
    dtype = np.where(scales, FLOAT32, plan.parts["dtype"][part])
    _expect(dtype == rows["dtype"][row], joined, row, "gets another dtype")
    same_block = (plan.parts["block"][part] == rows["block"][row]).all(axis=1)
    _expect(~scales | same_block, joined, row, "gets scales of other blocks")

    item = ITEM_BYTES[dtype]
    low, high = outputs["start"][output], outputs["stop"][output]
    left = _element(begins // item, low, high), _element((begins + nbytes) // item - 1, low, high)
    # A run of a holding begins at its first element; its box is what is packed: from there on all that is full.
    offset = place[write] + at - runs.place[run]
    low, high = runs.first[run], _packed_stop(rows, row, runs.first[run])
    right = _element(offset // item, low, high), _element((offset + nbytes) // item - 1, low, high)
    same = (left[0] == right[0]).all(axis=1) & (left[1] == right[1]).all(axis=1)
    box = (left[1] - left[0] + 1).prod(axis=1) * item == nbytes
    _expect(same & box & (begins % item == 0) & (offset % item == 0), joined, row, "gets other elements")


def _cut(place: Ints, nbytes: Ints, edges: Ints) -> tuple[Ints, Ints]:
    """Intervals cut at the edges inside them: the interval of each piece, and where in it the piece begins."""
    first = np.searchsorted(edges, place, "right")
    counts = np.searchsorted(edges, place + nbytes, "left") - first
    interval = np.repeat(np.arange(len(place)), counts + 1)
    index = ranges(counts + 1)
    edge = np.minimum(first[interval] + index - 1, len(edges) - 1)
    return interval, np.where(index == 0, 0, edges[np.maximum(edge, 0)] - place[interval])


def _cut_again(write: Ints, at: Ints, source: Ints, nbytes: Ints, edges: Ints) -> tuple[Ints, Ints, Ints]:
    """The pieces cut again at the buffer's edges; with their lengths."""
    stop = nbytes[write].copy()
    inner = write[1:] == write[:-1]
    stop[:-1][inner] = at[1:][inner]
    piece, further = _cut(source[write] + at, stop - at, edges)
    begin = at[piece] + further
    end = stop[piece].copy()
    inner = piece[1:] == piece[:-1]
    end[:-1][inner] = begin[1:][inner]
    return write[piece], begin, end - begin


def _element(index: Ints, start: Ints, stop: Ints) -> Ints:
    """The element of this index of a box in C order."""
    element = np.zeros_like(start)
    rest = index
    for dim in reversed(range(start.shape[1])):
        extent = stop[:, dim] - start[:, dim]
        element[:, dim] = start[:, dim] + rest % extent
        rest = rest // extent
    return element


def _packed_stop(rows: Any, row: Ints, first: Ints) -> Ints:
    """Where the packed box that begins at `first` ends: in each dimension at the holding's end, or one
    element further.
    """
    extent = (rows["stop"] - rows["start"])[row]
    stop: Ints = rows["stop"][row].copy()
    nbytes = ITEM_BYTES[rows["dtype"][row]].copy()
    packed = np.ones(len(row), bool)
    for dim in reversed(range(DIMS)):
        packed &= (extent[:, dim] == 1) | (rows["strides"][row, dim] == nbytes)
        nbytes = np.where(packed, nbytes * extent[:, dim], nbytes)
        stop[:, dim] = np.where(packed, stop[:, dim], first[:, dim] + 1)
    return stop


def _expect(right: Any, joined: Tables, row: Ints, what: str) -> None:
    for i in np.flatnonzero(~right)[:1]:
        rows, rank = joined.target
        raise PlanError(f"{joined.names[rows['name'][row[i]]]!r} of inference rank {rank[row[i]]} {what}")


# --- gathered whole, from where it is ---


def _check_gathers(joined: Tables, plan: Plan) -> None:
    parts, gathers = plan.parts, plan.gathers
    inside = (gathers["start"] >= parts["start"][gathers["part"]]) & (gathers["stop"] <= parts["stop"][gathers["part"]])
    if not inside.all():
        raise PlanError("the plan gathers what lies outside of a part")
    fault = find_fault(
        Boxes(gathers["part"].astype(np.int64), gathers["start"], gathers["stop"]), parts["start"], parts["stop"]
    )
    if fault is not None:
        param = plan.params[parts["param"][fault.key]]
        what = "several times" if fault.claims else "by none"
        raise PlanError(f"{param.name!r}: {fault.where(len(param.shape))} is gathered {what}")
    _check_addresses(joined, plan)


def _check_addresses(joined: Tables, plan: Plan) -> None:
    """Every gather is at the address where its trainer's inventory has that element."""
    rows, rank = joined.source
    number = {name: i for i, name in enumerate(joined.names)}
    param = np.array([number.get(one.name, -1) for one in plan.params], np.int64)
    gathers = plan.gathers
    # If one trainer has several boxes of a parameter any match will do: they are tried one after the other.
    key = rank * len(joined.names) + rows["name"]
    order = np.argsort(key, kind="stable")
    wanted = gathers["trainer"].astype(np.int64) * len(joined.names) + param[plan.parts["param"][gathers["part"]]]
    first, last = np.searchsorted(key[order], wanted, "left"), np.searchsorted(key[order], wanted, "right")
    found = np.zeros(len(gathers), bool)
    for turn in range(int((last - first).max(initial=0))):
        open_ = np.flatnonzero(~found & (first + turn < last))
        row, gather = rows[order[first[open_] + turn]], gathers[open_]
        offset = row["offset"] + ((gather["start"] - row["start"]) * row["strides"]).sum(axis=1)
        found[open_] = (
            ((gather["start"] >= row["start"]) & (gather["stop"] <= row["stop"])).all(axis=1)
            & (gather["region"] == row["region"])
            & (gather["offset"] == offset)
            & ((gather["strides"] == row["strides"]) | (gather["stop"] - gather["start"] == 1)).all(axis=1)
        )
    for i in np.flatnonzero(~found)[:1]:
        one = plan.params[plan.parts["param"][gathers["part"][i]]]
        raise PlanError(f"{one.name!r}: trainer {gathers['trainer'][i]} does not hold what is gathered from it")

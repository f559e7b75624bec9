"""From slices with senders to the rows of a plan: tasks, their parts and buffers, what they gather, and the writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from crossrail.weights.dtypes import DTYPES, ITEM_BYTES
from crossrail.weights.inventory.holdings import c_strides
from crossrail.weights.planning import balance
from crossrail.weights.planning.boxes import (
    Boxes,
    Ints,
    columns_of,
    distinct,
    flat_offset,
    is_run,
    overlaps,
    ranges,
    volume,
)
from crossrail.weights.planning.joining import Rows, join_direct
from crossrail.weights.planning.plan import GATHER, OUTPUT, PART, TASK, WRITE, Param, Plan
from crossrail.weights.planning.sources import Sources
from crossrail.weights.planning.tables import Forms, Tables

_ALIGN = 64  # of outputs in a buffer
_SCALE_BYTES = 4


class Slices(NamedTuple):
    """The part of a cell that goes to one target. want: row of the target side. start, stop: elements, for scales
    blocks.
    """

    cell: Ints
    want: Ints
    scales: npt.NDArray[np.bool_]
    start: Ints
    stop: Ints
    nbytes: Ints
    sender: Ints

    def take(self, rows: Ints) -> Slices:
        """These, in this order."""
        return Slices(*(column[rows] for column in self))  # type: ignore[arg-type]  # each column is what it was


def assemble(
    joined: Tables,
    forms: Forms,
    sources: Sources,
    cells: Boxes,
    slices: Slices,
    groups: Sequence[Sequence[str]],
    trainers: tuple[int, ...],
    targets: tuple[int, ...],
    cost: Ints,
) -> Plan:
    """One task for each cell and sender. cost: of a byte at each trainer, as in balance.choose()."""
    mesh = _mesh_of(joined, forms, cells, slices)
    group_of = np.full(len(joined.meshes), len(groups))
    for number, names in enumerate(groups):
        group_of[[i for i, name in enumerate(joined.meshes) if name in names]] = number
    used, task = distinct([slices.sender, group_of[mesh], slices.cell])
    by_task = np.argsort(task, kind="stable")
    slices, task = slices.take(by_task), task[by_task]
    used_mesh = mesh[used]

    tasks = np.zeros(len(used), TASK)
    first = np.searchsorted(task, np.arange(len(used)))
    tasks["trainer"], tasks["mesh"], tasks["group"] = slices.sender[first], used_mesh, group_of[used_mesh]
    cell = slices.cell[first]
    parts = np.zeros(len(used), PART)
    parts["task"] = np.arange(len(used))
    parts["param"], parts["dtype"] = forms.param[cells.key[cell]], forms.dtype[cells.key[cell]]
    parts["block"] = forms.block[cells.key[cell]]
    parts["start"], parts["stop"] = _hull(cells, cell, parts["block"], slices, task)

    outputs, source = _outputs(tasks, parts, slices, task)
    sent = np.bincount(np.searchsorted(trainers, slices.sender), weights=slices.nbytes, minlength=len(trainers))
    gathers = _gathers(joined, sources, tasks, parts, np.array(trainers), cost, sent.astype(np.int64))
    _tmp(tasks, parts, gathers, outputs, forms.source_dtype[cells.key[cell]])
    rows = join_direct(Rows(tasks, parts, gathers, outputs, _writes(joined, slices, task, source)))
    params, rows.parts["param"] = np.unique(rows.parts["param"], return_inverse=True)
    return Plan(
        trainers,
        targets,
        _params(joined, params),
        tuple(joined.meshes),
        *rows[:-1],
        _merged(_rotated(rows.writes, rows.tasks, targets)),
    )


def _params(joined: Tables, used: Ints) -> tuple[Param, ...]:
    rows = joined.source.rows
    at = np.zeros(len(joined.names), np.int64)
    at[rows["name"]] = np.arange(len(rows))
    found = rows[at[used]]
    return tuple(
        Param(joined.names[name], DTYPES[dtype], tuple(shape[:dims]))
        for name, dtype, shape, dims in zip(
            used, found["dtype"].tolist(), found["shape"].tolist(), found["dims"].tolist(), strict=True
        )
    )


def _mesh_of(joined: Tables, forms: Forms, cells: Boxes, slices: Slices) -> Ints:
    """The mesh in which a slice's sender holds its parameter; the first, where it is in several."""
    rows, rank = joined.source
    key = rank * len(joined.names) + rows["name"]
    keys, at = np.unique(key, return_index=True)
    wanted = slices.sender * len(joined.names) + forms.param[cells.key[slices.cell]]
    mesh: Ints = rows["mesh"][at[np.searchsorted(keys, wanted)]].astype(np.int64)
    return mesh


def _hull(cells: Boxes, cell: Ints, block: Ints, slices: Slices, task: Ints) -> tuple[Ints, Ints]:
    """The bounding box, in whole blocks, of what is requested from a task's cell."""
    scale = np.where(slices.scales[:, np.newaxis], np.maximum(block[task], 1), 1)
    first = np.searchsorted(task, np.arange(len(cell)))
    start = np.minimum.reduceat(slices.start * scale, first)
    stop = np.maximum.reduceat(slices.stop * scale, first)
    size = np.maximum(block, 1)
    start = start // size * size
    stop = np.minimum(-(-stop // size) * size, cells.stop[cell])
    return start, stop


def _outputs(tasks: Any, parts: Any, slices: Slices, task: Ints) -> tuple[Any, Ints]:
    """The layout of each task's buffer, and where in it each slice begins.

    Slices that are contiguous in their part in C order are ranges of one output, the whole part; every other box is an
    output of its own.
    """
    block = np.maximum(parts["block"], 1)
    scale = np.where(slices.scales[:, np.newaxis], block[task], 1)
    part_start, part_stop = parts["start"][task] // scale, -(-parts["stop"][task] // scale)
    run = is_run(slices.start, slices.stop, part_start, part_stop)
    start, stop = slices.start.copy(), slices.stop.copy()
    start[run], stop[run] = part_start[run], part_stop[run]
    chosen, output_of = distinct(columns_of(task, slices.scales.astype(np.int64), start, stop))

    outputs = np.zeros(len(chosen), OUTPUT)
    outputs["part"], outputs["scales"] = task[chosen], slices.scales[chosen]
    outputs["start"], outputs["stop"] = start[chosen], stop[chosen]
    item = np.where(outputs["scales"], _SCALE_BYTES, ITEM_BYTES[parts["dtype"][outputs["part"]]])
    outputs["nbytes"] = volume(outputs["start"], outputs["stop"]) * item
    padded = -(-outputs["nbytes"] // _ALIGN) * _ALIGN
    ends = np.cumsum(padded)
    begins = np.searchsorted(outputs["part"], outputs["part"])
    outputs["offset"] = ends - padded - (ends - padded)[begins]
    tasks["buffer_bytes"] = np.bincount(outputs["part"], weights=padded, minlength=len(tasks)).astype(np.int64)

    offset = flat_offset(slices.start, start, stop) * item[output_of]
    return outputs, outputs["offset"][output_of] + offset


def _gathers(joined: Tables, sources: Sources, tasks: Any, parts: Any, ranks: Ints, cost: Ints, sent: Ints) -> Any:
    """Gathers each part from as few others as possible: each hull from one mesh, the sender's own if it has it.

    Each box comes from the sender itself if it holds it, else from the holder with the fewest bytes so far. sent: bytes
    that each trainer (of ranks, ascending) writes to targets.
    """
    rows, rank = joined.source
    pairs = overlaps(Boxes(parts["param"].astype(np.int64), parts["start"], parts["stop"]), sources.boxes)
    part, box = pairs.left, pairs.right
    mesh = sources.mesh[box]
    other = mesh != tasks["mesh"][parts["task"][part]]
    by_choice = np.lexsort((mesh, other, sources.hull[box], part))
    places, place_of = distinct([part[by_choice], sources.hull[box[by_choice]]])
    taken = mesh[by_choice] == mesh[by_choice][places][place_of]
    chosen = by_choice[taken]
    part, box, start, stop = part[chosen], box[chosen], pairs.start[chosen], pairs.stop[chosen]

    # Holders of a box ascend by rank: boxes are numbered by box and rank of holder to find one among them.
    boxes = np.repeat(np.arange(len(sources.mesh)), np.diff(sources.first))
    place = boxes * len(ranks) + np.searchsorted(ranks, rank[sources.holders])
    holder = np.searchsorted(ranks, tasks["trainer"][parts["task"][part]])
    own = box * len(ranks) + holder
    fetched = np.flatnonzero(place[np.minimum(np.searchsorted(place, own), len(place) - 1)] != own)
    kinds, kind = np.unique(box[fetched], return_inverse=True)
    item = ITEM_BYTES[rows["dtype"][sources.holders[sources.first[box[fetched]]]]]
    nbytes = volume(start[fetched], stop[fetched]) * item
    counts = np.diff(sources.first)[kinds]
    members = place[np.repeat(sources.first[kinds], counts) + ranges(counts)] % len(ranks)
    alike, candidates = balance.classes_of(np.concatenate([[0], np.cumsum(counts)]), members)
    holder[fetched] = balance.choose(alike[kind], candidates, nbytes, np.zeros_like(nbytes), cost, sent)
    row = sources.holders[np.searchsorted(place, box * len(ranks) + holder)]

    gathers = np.zeros(len(part), GATHER)
    gathers["part"], gathers["trainer"], gathers["region"] = part, rank[row], rows["region"][row]
    gathers["strides"] = rows["strides"][row]
    gathers["offset"] = rows["offset"][row] + ((start - rows["start"][row]) * rows["strides"][row]).sum(axis=1)
    gathers["start"], gathers["stop"] = start, stop
    return gathers[np.argsort(part, kind="stable")]


def _tmp(tasks: Any, parts: Any, gathers: Any, outputs: Any, source_dtype: Ints) -> None:
    """The memory that each task needs at once; and whether it needs none, because its bytes can be sent from where they
    are.
    """
    task = parts["task"][gathers["part"]]
    own = gathers["trainer"] == tasks["trainer"][task]
    item = ITEM_BYTES[source_dtype]
    extent = gathers["stop"] - gathers["start"]
    plain = ((gathers["strides"] == c_strides(extent, item[gathers["part"]])) | (extent == 1)).all(axis=1)
    alone = np.bincount(gathers["part"], minlength=len(parts))[gathers["part"]] == 1
    in_place = np.zeros(len(parts), bool)
    in_place[gathers["part"]] = own & plain & alone
    one_output = np.bincount(outputs["part"], minlength=len(parts)) == 1
    same = (parts["dtype"] == source_dtype) & (parts["block"] == 0).all(axis=1)
    whole = np.zeros(len(parts), bool)
    at = outputs["part"]
    whole[at] = (outputs["start"] == parts["start"][at]).all(1) & (outputs["stop"] == parts["stop"][at]).all(1)
    direct = in_place & one_output & same & whole

    tasks["direct"] = direct
    lies = direct[gathers["part"]]
    tasks["region"][task[lies]] = gathers["region"][lies]
    tasks["offset"][task[lies]] = gathers["offset"][lies]
    gathered = np.where(in_place, 0, volume(parts["start"], parts["stop"]) * item)
    tasks["buffer_bytes"][direct] = 0
    tasks["tmp_bytes"] = np.where(direct, 0, gathered + tasks["buffer_bytes"])


def _writes(joined: Tables, slices: Slices, task: Ints, source: Ints) -> Any:
    """Each slice as runs of bytes that are together on both sides."""
    rows, rank = joined.target
    want = rows[slices.want]
    item = ITEM_BYTES[want["dtype"]]
    extent = slices.stop - slices.start
    # The slice lies packed in the buffer. From the innermost dimension outwards, its rows at the target melt while they
    # are packed there too; what does not melt is repeated.
    run = item.copy()
    repeats = np.ones_like(extent)
    melting = np.ones(len(extent), bool)
    for dim in reversed(range(extent.shape[1])):
        melting &= (extent[:, dim] == 1) | (want["strides"][:, dim] == run)
        run = np.where(melting, run * extent[:, dim], run)
        repeats[:, dim] = np.where(melting, 1, extent[:, dim])
    begin = want["offset"] + ((slices.start - want["start"]) * want["strides"]).sum(axis=1)

    counts = repeats.prod(axis=1)
    of, index = np.repeat(np.arange(len(extent)), counts), ranges(counts)
    writes = np.zeros(len(of), WRITE)
    writes["task"], writes["target"], writes["region"] = task[of], rank[slices.want[of]], want["region"][of]
    writes["source"] = source[of] + index * run[of]
    writes["nbytes"] = run[of]
    writes["offset"] = begin[of]
    for dim in reversed(range(extent.shape[1])):
        if (repeats[:, dim] > 1).any():
            writes["offset"] += index % repeats[of, dim] * want["strides"][of, dim]
            index = index // repeats[of, dim]
    return writes


def _rotated(writes: Any, tasks: Any, targets: tuple[int, ...]) -> Any:
    """Sorted by task, target and place; each trainer begins with a different target, so that they do not all meet at
    one.
    """
    ranks = np.array(targets)
    trainer = tasks["trainer"][writes["task"]].astype(np.int64)
    turn = (np.searchsorted(ranks, writes["target"]) - trainer) % len(ranks)
    return writes[np.lexsort((writes["offset"], writes["region"], turn, writes["task"]))]


def _merged(writes: Any) -> Any:
    """Merges writes of the same task that are adjacent both in the buffer and at the target."""
    before, after = writes[:-1], writes[1:]
    goes_on = np.zeros(len(writes), bool)
    goes_on[1:] = (
        (before["task"] == after["task"])
        & (before["target"] == after["target"])
        & (before["region"] == after["region"])
        & (before["source"] + before["nbytes"] == after["source"])
        & (before["offset"] + before["nbytes"] == after["offset"])
    )
    first = np.flatnonzero(~goes_on)
    merged = writes[first].copy()
    if len(first):
        merged["nbytes"] = np.add.reduceat(writes["nbytes"], first)
    return merged

"""Prepares a trainer's tasks for replay: all index arithmetic of a plan is done here, once.

Arithmetic over many rows uses numpy. Rows that become objects are read from lists, since reading a numpy row takes ten
times as long; from lists for only some tasks at a time, since Python's garbage collector visits all live lists again
and again.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from crossrail.errors import UsageError
from crossrail.weights.conversion.casts import check_cast, storage
from crossrail.weights.dtypes import DTYPES, ITEM_BYTES, QUANTISED, dtype_code
from crossrail.weights.inventory.holdings import c_strides
from crossrail.weights.planning.boxes import Ints
from crossrail.weights.planning.plan import Plan, Rows
from crossrail.weights.step.arena import aligned
from crossrail.weights.step.task import Batch, Part, Quantised, Read, ReadyTask, Shape, View

# Reads of a piece that lies otherwise at its holder: from so many on it is read as it lies, and put in order here.
_READS_MAX = 16
_TASKS_AT_ONCE = 256
_INDEX_END = 1 << 32  # engines take indices of 32 bits
_SCALES = np.dtype(np.float32)


def ready_tasks(plan: Plan, trainer: int, far: Collection[int] = ()) -> Iterator[ReadyTask]:
    """The tasks of Plan.of_trainer(trainer), in order, each made on demand. UsageError for unknown casts. Takes some 10
    us per task: run it in a thread if an event loop must stay responsive.

    far: own regions, by index, whose data is loaded into the arena before it is prepared.
    """
    params = [_Param(param.name, param.dtype, storage(param.dtype), len(param.shape)) for param in plan.params]
    source = np.array([dtype_code(param.dtype) for param in plan.params], np.int64)
    for begin in range(0, len(plan.tasks), _TASKS_AT_ONCE):
        end = min(begin + _TASKS_AT_ONCE, len(plan.tasks))
        yield from _Some(plan, params, source, trainer, far, begin, end).tasks()


class _Param(NamedTuple):
    """dtype: the trainers'; kind: how numpy keeps it."""

    name: str
    dtype: str
    kind: np.dtype[Any]
    dims: int


_Copy = tuple[int, View, View]  # from an own region to the arena


class _Piece:
    """A task's share of the arena, laid out from its beginning."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = aligned(nbytes)

    def place(self, shape: Shape, strides: Shape, kind: np.dtype[Any]) -> View:
        """A new array behind all others, without gaps in itself."""
        view = View(self.nbytes, shape, strides, kind)
        self.nbytes += aligned(view.nbytes)
        return view


class _Some:
    """Columns of some of a plan's tasks as lists, and what is made of them. source: dtypes of the parameters."""

    def __init__(
        self, plan: Plan, params: list[_Param], source: Ints, me: int, far: Collection[int], begin: int, end: int
    ) -> None:
        self._params = params
        self._me = me
        self._far = far
        self._checked: set[tuple[str, str, bool]] = set()
        first_part, last_part = plan.task_parts[begin], plan.task_parts[end]
        tasks, parts = plan.tasks[begin:end], plan.parts[first_part:last_part]
        self._task_columns(tasks, plan.task_parts[begin : end + 1] - first_part)
        source = source[parts["param"]]
        self._part_columns(parts, source)
        for add, rows, starts in (
            (self._gather_columns, plan.gathers, plan.part_gathers),
            (self._output_columns, plan.outputs, plan.part_outputs),
        ):
            first = starts[first_part : last_part + 1]
            some = rows[first[0] : first[-1]]
            add(some, parts, some["part"] - first_part, first - first[0], source)
        writes = plan.writes[plan.task_writes[begin] : plan.task_writes[end]]
        self._write_columns(writes, plan.task_writes[begin : end + 1] - plan.task_writes[begin])
        self._batches, self._first_batch = _batches(writes, begin, end)

    def tasks(self) -> Iterator[ReadyTask]:
        """The tasks, in their order."""
        return map(self._task, range(len(self._group)))

    def _task(self, index: int) -> ReadyTask:
        rows = range(self._first_part[index], self._first_part[index + 1])
        names = dict.fromkeys(self._params[self._param[at]].name for at in rows)
        is_direct = self._direct[index]
        piece = _Piece(self._buffer_bytes[index])
        reads: list[Read] = []
        loads: list[_Copy] = []
        parts = () if is_direct else tuple([self._part(at, piece, reads, loads) for at in rows])
        return ReadyTask(
            name=", ".join(names),
            group=self._group[index],
            own_region=self._region[index] if is_direct else None,
            own_offset=self._offset[index] if is_direct else 0,
            piece_bytes=0 if is_direct else piece.nbytes,
            reads=tuple(reads),
            parts=parts,
            batches=tuple(self._batches[self._first_batch[index] : self._first_batch[index + 1]]),
            write_count=self._write_count[index],
            write_bytes=self._write_bytes[index],
            loads=tuple(loads),
        )

    # ---- columns

    def _task_columns(self, tasks: Rows, first_part: Ints) -> None:
        self._group: list[int] = tasks["group"].tolist()
        self._direct: list[bool] = tasks["direct"].tolist()
        self._region: list[int] = tasks["region"].tolist()
        self._offset: list[int] = tasks["offset"].tolist()
        self._buffer_bytes: list[int] = tasks["buffer_bytes"].tolist()
        self._first_part: list[int] = first_part.tolist()

    def _write_columns(self, writes: Rows, first: Ints) -> None:
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(writes["nbytes"])])
        self._write_count: list[int] = np.diff(first).tolist()
        self._write_bytes: list[int] = np.diff(ends[first]).tolist()

    def _part_columns(self, parts: Rows, source: Ints) -> None:
        extent = parts["stop"] - parts["start"]
        counts = -(-extent // np.maximum(parts["block"], 1))
        self._param: list[int] = parts["param"].tolist()
        self._target: list[int] = parts["dtype"].tolist()
        self._start: list[list[int]] = parts["start"].tolist()
        self._extent: list[list[int]] = extent.tolist()
        self._dense: list[list[int]] = c_strides(extent, ITEM_BYTES[source]).tolist()
        self._block: list[list[int]] = parts["block"].tolist()
        self._is_quantised: list[bool] = (parts["block"].max(axis=1, initial=0) > 0).tolist()
        self._quantised_dense: list[list[int]] = c_strides(extent, ITEM_BYTES[parts["dtype"]]).tolist()
        self._counts: list[list[int]] = counts.tolist()
        self._counts_dense: list[list[int]] = c_strides(counts, _SCALES.itemsize).tolist()

    def _gather_columns(self, gathers: Rows, parts: Rows, of: Ints, first: Ints, source: Ints) -> None:
        extent = gathers["stop"] - gathers["start"]
        self._first_gather: list[int] = first.tolist()
        self._holder: list[int] = gathers["trainer"].tolist()
        self._held_region: list[int] = gathers["region"].tolist()
        self._held_offset: list[int] = gathers["offset"].tolist()
        self._held_strides: list[list[int]] = gathers["strides"].tolist()
        self._held_begin: list[list[int]] = (gathers["start"] - parts["start"][of]).tolist()
        self._held_extent: list[list[int]] = extent.tolist()
        self._held_dense: list[list[int]] = c_strides(extent, ITEM_BYTES[source[of]]).tolist()

    def _output_columns(self, outputs: Rows, parts: Rows, of: Ints, first: Ints, _source: Ints) -> None:
        scales = outputs["scales"]
        block = np.where(scales[:, np.newaxis], np.maximum(parts["block"][of], 1), 1)
        extent = outputs["stop"] - outputs["start"]
        begin = outputs["start"] - parts["start"][of] // block
        item = np.where(scales, _SCALES.itemsize, ITEM_BYTES[parts["dtype"][of]])
        self._first_output: list[int] = first.tolist()
        self._is_scales: list[bool] = scales.tolist()
        self._out_offset: list[int] = outputs["offset"].tolist()
        self._out_begin: list[list[int]] = begin.tolist()
        self._out_extent: list[list[int]] = extent.tolist()
        self._out_dense: list[list[int]] = c_strides(extent, item).tolist()

    # ---- parts

    def _part(self, at: int, piece: _Piece, reads: list[Read], loads: list[_Copy]) -> Part:
        """Adds what it reads of others to reads, what is loaded to loads, and what memory it needs to the piece."""
        param = self._params[self._param[at]]
        dims, target = param.dims, DTYPES[self._target[at]]
        self._check(param, target, self._is_quantised[at], self._block[at])
        shape = tuple(self._extent[at][:dims])
        gathers = range(self._first_gather[at], self._first_gather[at + 1])
        outputs = range(self._first_output[at], self._first_output[at + 1])
        own: int | None = None
        if len(gathers) == 1 and self._is_near(gathers[0]):
            own = self._held_region[gathers[0]]
            values = self._held(gathers[0], param)
            gathers = gathers[1:]
        elif self._is_packed(at, outputs, param):
            values = View(self._out_offset[outputs[0]], shape, tuple(self._dense[at][:dims]), param.kind)
            outputs = outputs[1:]
        else:
            values = piece.place(shape, tuple(self._dense[at][:dims]), param.kind)
        copies: list[tuple[int | None, View, View]] = []
        for gather in gathers:
            self._add_gather(param, gather, values, piece, copies, reads, loads)
        quantised = self._quantised(at, shape, target, piece) if self._is_quantised[at] else None
        made = tuple([self._output(output, dims, target, values, quantised) for output in outputs])
        return Part(param.name, param.dtype, target, values, own, tuple(copies), made, quantised)

    def _check(self, param: _Param, target: str, is_quantised: bool, block: list[int]) -> None:
        if is_quantised and any(size != 1 for size in block[: max(param.dims - 2, 0)]):
            raise UsageError(
                f"{param.name}: blocks of {tuple(block[: param.dims])} share a scale, must be 1 in all dimensions but "
                "the last two"
            )
        if (param.dtype, target, is_quantised) in self._checked:
            return
        if not is_quantised:
            check_cast(param.dtype, target, param.name)
        elif param.dtype not in QUANTISED:
            raise UsageError(f"{param.name}: {param.dtype} is not quantised, only {' and '.join(QUANTISED)} are")
        self._checked.add((param.dtype, target, is_quantised))

    def _is_near(self, gather: int) -> bool:
        """Whether its source is this trainer's memory, and is prepared in place."""
        return self._holder[gather] == self._me and self._held_region[gather] not in self._far

    def _is_packed(self, at: int, outputs: range, param: _Param) -> bool:
        """Whether its buffer is exactly what was gathered."""
        same = not self._is_quantised[at] and DTYPES[self._target[at]] == param.dtype
        return same and len(outputs) == 1 and self._out_extent[outputs[0]] == self._extent[at]

    def _held(self, gather: int, param: _Param) -> View:
        """The array as it lies in its holder's region."""
        extent, strides = self._held_extent[gather][: param.dims], self._held_strides[gather][: param.dims]
        return View(self._held_offset[gather], tuple(extent), tuple(strides), param.kind)

    def _add_gather(
        self,
        param: _Param,
        gather: int,
        values: View,
        piece: _Piece,
        copies: list[tuple[int | None, View, View]],
        reads: list[Read],
        loads: list[_Copy],
    ) -> None:
        """One holder's box of a part: where it goes in values, and how it gets there."""
        held = self._held(gather, param)
        wanted = values.box(self._held_begin[gather], held.shape)
        if self._holder[gather] == self._me:
            if self._is_near(gather):
                copies.append((self._held_region[gather], held, wanted))
            else:
                loads.append((self._held_region[gather], held, wanted))
            return
        run, sources, pieces = _runs(held.shape, held.dtype.itemsize, held.strides, wanted.strides)
        dense = tuple(self._held_dense[gather][: param.dims])
        begin = wanted.offset
        if len(sources) > _READS_MAX and held.strides == dense:
            landing = piece.place(held.shape, dense, held.dtype)
            copies.append((None, landing, wanted))
            run, sources, pieces, begin = landing.nbytes, [0], [0], landing.offset
        holder, region = self._holder[gather], self._held_region[gather]
        for source, at in zip(sources, pieces, strict=True):
            reads.append(Read(holder, region, held.offset + source, begin + at, run))

    def _quantised(self, at: int, shape: Shape, target: str, piece: _Piece) -> Quantised:
        dims = len(shape)
        values = piece.place(shape, tuple(self._quantised_dense[at][:dims]), storage(target))
        scales = piece.place(tuple(self._counts[at][:dims]), tuple(self._counts_dense[at][:dims]), _SCALES)
        return Quantised(values, scales, tuple(self._block[at][:dims]), tuple(self._start[at][:dims]))

    def _output(
        self, output: int, dims: int, target: str, values: View, quantised: Quantised | None
    ) -> tuple[View, View]:
        """Where a box of the part, or of its scales, comes from and goes to."""
        is_scales = self._is_scales[output]
        if quantised is not None:
            values = quantised.scales if is_scales else quantised.values
        extent, dense = tuple(self._out_extent[output][:dims]), tuple(self._out_dense[output][:dims])
        kind = _SCALES if is_scales else storage(target)
        return values.box(self._out_begin[output], extent), View(self._out_offset[output], extent, dense, kind)


def _runs(extent: Shape, itemsize: int, first: Shape, second: Shape) -> tuple[int, list[int], list[int]]:
    """A box with different strides in two memories, as runs of bytes that are contiguous in both.

    Returns the runs' length, and their offsets in either memory.
    """
    run, dim = itemsize, len(extent)
    while dim and (extent[dim - 1] == 1 or first[dim - 1] == second[dim - 1] == run):
        dim -= 1
        run *= extent[dim]
    if dim == 0:
        return run, [0], [0]
    outer = np.indices(extent[:dim], np.int64).reshape(dim, math.prod(extent[:dim]))
    offsets = [(np.asarray(strides[:dim], np.int64) @ outer).tolist() for strides in (first, second)]
    return run, offsets[0], offsets[1]


def _batches(writes: Rows, begin: int, end: int) -> tuple[list[Batch], list[int]]:
    """For tasks begin to end: writes that differ only in source and target offsets become one submit.

    Also the index of each task's first batch. A task's targets keep the plan's order, which differs between trainers.
    """
    if not len(writes):
        return [], [0] * (end - begin + 1)
    turn = np.cumsum(_changes(writes, "task", "target"))
    rows = writes[np.lexsort((writes["source"], writes["nbytes"], writes["region"], turn))]
    first = np.flatnonzero(_changes(rows, "task", "target", "region", "nbytes"))
    while True:
        source, source_step, source_index = _stepped(rows["source"], first)
        offset, offset_step, offset_index = _stepped(rows["offset"], first)
        most = np.maximum.reduceat(np.maximum(source_index, offset_index), first)
        if not (too_far := most >= _INDEX_END).any():
            break
        ends = np.append(first[1:], len(rows))
        first = np.union1d(first, (first + ends)[too_far] // 2)
    ends = np.append(first[1:], len(rows))
    cuts = list(zip(first.tolist(), ends.tolist(), strict=True))
    source_index, offset_index = source_index.astype(np.uint32), offset_index.astype(np.uint32)
    heads = rows[first]
    columns = (
        *(heads[name].tolist() for name in ("target", "region", "nbytes")),
        source.tolist(),
        source_step.tolist(),
        [source_index[begin:end] for begin, end in cuts],
        offset.tolist(),
        offset_step.tolist(),
        [offset_index[begin:end] for begin, end in cuts],
    )
    return list(map(Batch, *columns)), np.searchsorted(heads["task"], np.arange(begin, end + 1)).tolist()


def _changes(rows: Rows, *names: str) -> npt.NDArray[np.bool_]:
    """Which rows differ in one of these from the one before; the first does."""
    changes = np.ones(len(rows), bool)
    changes[1:] = np.logical_or.reduce([np.diff(rows[name]) != 0 for name in names])
    return changes


def _stepped(offsets: Ints, first: Ints) -> tuple[Ints, Ints, Ints]:
    """Runs of offsets, which begin at the rows `first`, as least + step * index, each with the largest step."""
    counts = np.diff(np.append(first, len(offsets)))
    least = np.minimum.reduceat(offsets, first)
    beyond = offsets - np.repeat(least, counts)
    step = np.maximum(np.gcd.reduceat(beyond, first), 1)
    return least, step, beyond // np.repeat(step, counts)

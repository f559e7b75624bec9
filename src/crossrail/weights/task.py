"""One task of a plan, made ready to be replayed: what is read, how it is converted, which writes are submitted.

All index arithmetic is done here, once. A step only fills in where in the arena the task was put.

A task's piece of the arena is its buffer, which is written to targets, and behind it, for each part that needs it, the
gathered values in the trainers' type, pieces of others that lie there otherwise than they are wanted, and what
quantisation makes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from crossrail.errors import UsageError
from crossrail.weights.arena import aligned
from crossrail.weights.convert import Caster, check_cast, storage
from crossrail.weights.dtypes import DTYPES
from crossrail.weights.float8 import BlockQuantiser
from crossrail.weights.plan import Plan

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]
Shape = tuple[int, ...]

# Reads of a piece that lies otherwise at its holder: from so many on it is read as it lies, and put in order here.
_READS_MAX = 16
_INDEX_END = 1 << 32


@dataclass(frozen=True)
class Read:
    """Bytes of another trainer's region, and where in the task's piece of the arena they go."""

    trainer: int
    region: int
    source: int
    piece: int
    nbytes: int


@dataclass(frozen=True)
class Batch:
    """Writes of one length to one region of one target: write i goes from source + source_step * source_index[i]."""

    target: int
    region: int
    nbytes: int
    source: int
    source_step: int
    source_index: npt.NDArray[np.uint32]
    offset: int
    offset_step: int
    offset_index: npt.NDArray[np.uint32]


@dataclass(frozen=True)
class View:
    """An array in memory: bytes of offset and strides."""

    offset: int
    shape: Shape
    strides: Shape
    dtype: np.dtype[Any]

    def of(self, memory: Bytes, base: int = 0) -> Array:
        """Copies nothing."""
        return np.ndarray(self.shape, self.dtype, memory.data, base + self.offset, self.strides)

    @property
    def nbytes(self) -> int:
        """Of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


Memories = Callable[[int], Bytes]  # a region of this trainer, by its index in the inventory


@dataclass
class Tools:
    """What converts, with its scratch memory: one for all tasks of a trainer. Threads: one at a time."""

    caster: Caster = field(default_factory=Caster)
    quantiser: BlockQuantiser = field(default_factory=BlockQuantiser)


@dataclass
class _Part:
    """values: the part in the trainers' type; where it is that of an own region, in place, `own` is its index."""

    name: str
    source: str
    target: str
    values: View
    own: int | None
    copies: list[tuple[int | None, View, View]] = field(default_factory=list)  # from own region or landing, to values
    outputs: list[tuple[View, tuple[slice, ...]]] = field(default_factory=list)  # of values, in the target's type
    block: Shape = ()
    quantised: View | None = None
    scales: View | None = None
    scale_outputs: list[tuple[View, tuple[slice, ...]]] = field(default_factory=list)
    in_place: bool = False  # gathered right into the buffer: nothing is left to do

    def prepare(self, memories: Memories, arena: Bytes, base: int, tools: Tools) -> None:
        for region, view, wanted in self.copies:
            piece = view.of(arena, base) if region is None else view.of(memories(region))
            np.copyto(wanted.of(arena, base), piece)
        if self.in_place:
            return
        values = self.values.of(arena, base) if self.own is None else self.values.of(memories(self.own))
        if self.quantised is not None and self.scales is not None:
            quantised, scales = self.quantised.of(arena, base), self.scales.of(arena, base)
            _quantise(values, self.source, quantised, scales, self.block, self.name, tools)
            for view, at in self.outputs:
                np.copyto(view.of(arena, base), quantised[at])
            for view, at in self.scale_outputs:
                np.copyto(view.of(arena, base), scales[at])
            return
        for view, at in self.outputs:
            tools.caster.cast(values[at], self.source, view.of(arena, base), self.target)


class ReadyTask:
    """One task, ready. Made by ready_tasks(); what it needs of the arena is piece_bytes, 0 for a direct one."""

    def __init__(self, plan: Plan, index: int, me: int) -> None:
        row = plan.tasks[index]
        self.group = int(row["group"])
        self.is_direct = bool(row["direct"])
        self.own_region = int(row["region"]) if self.is_direct else None
        self.own_offset = int(row["offset"]) if self.is_direct else 0
        self.reads: list[Read] = []
        self._parts: list[_Part] = []
        self._end = 0 if self.is_direct else aligned(int(row["buffer_bytes"]))
        part_rows = range(plan.task_parts[index], plan.task_parts[index + 1])
        self.name = ", ".join(dict.fromkeys(plan.params[plan.parts["param"][at]].name for at in part_rows))
        if not self.is_direct:
            for at in part_rows:
                self._add_part(plan, at, me)
        self.piece_bytes = self._end
        self.batches = _batches(plan.writes[plan.task_writes[index] : plan.task_writes[index + 1]])
        self.write_count = sum(len(batch.source_index) for batch in self.batches)
        self.write_bytes = sum(len(batch.source_index) * batch.nbytes for batch in self.batches)

    def prepare(self, memories: Memories, arena: Bytes, base: int, tools: Tools) -> None:
        """Makes the buffer, once the reads are done. base: where its piece of the arena begins. Any one thread.

        Raises NotFinite, naming the parameter.
        """
        for part in self._parts:
            part.prepare(memories, arena, base, tools)

    # ---- making ready

    def _place(self, shape: Shape, dtype: np.dtype[Any]) -> View:
        """A new array behind all others of the piece."""
        view = View(self._end, shape, _dense(shape, dtype.itemsize), dtype)
        self._end += aligned(view.nbytes)
        return view

    def _add_part(self, plan: Plan, at: int, me: int) -> None:
        row = plan.parts[at]
        param = plan.params[row["param"]]
        dims = len(param.shape)
        low = row["start"][:dims]
        shape = _extent(row)[:dims]
        block = tuple(row["block"][:dims].tolist()) if row["block"].any() else ()
        target = DTYPES[row["dtype"]]
        if not block:
            check_cast(param.dtype, target, param.name)
        elif param.dtype not in ("float32", "bfloat16"):
            raise UsageError(f"{param.name}: {param.dtype} is not quantised, only float32 and bfloat16 are")
        gathers = plan.gathers[plan.part_gathers[at] : plan.part_gathers[at + 1]]
        outputs = plan.outputs[plan.part_outputs[at] : plan.part_outputs[at + 1]]
        item = storage(param.dtype)
        part = _Part(param.name, param.dtype, target, View(0, shape, (), item), None, block=block)
        if len(gathers) == 1 and gathers[0]["trainer"] == me:
            gather = gathers[0]
            part.own = int(gather["region"])
            strides = tuple(gather["strides"][:dims].tolist())
            part.values = View(int(gather["offset"]), shape, strides, item)
        elif len(outputs) == 1 and not block and target == param.dtype and _extent(outputs[0])[:dims] == shape:
            part.in_place = True
            part.values = View(int(outputs[0]["offset"]), shape, _dense(shape, item.itemsize), item)
        else:
            part.values = self._place(shape, item)
        if part.own is None:
            for gather in gathers:
                self._add_gather(part, gather, low, dims, me)
        if block:
            part.quantised = self._place(shape, storage(target))
            counts = tuple(-(-n // b) for n, b in zip(shape, block, strict=True))
            part.scales = self._place(counts, np.dtype(np.float32))
        for output in outputs:
            is_scales = bool(output["scales"])
            first = low // np.array(block) if is_scales else low
            begin = output["start"][:dims] - first
            extent = _extent(output)[:dims]
            kind = np.dtype(np.float32) if is_scales else storage(target)
            view = View(int(output["offset"]), extent, _dense(extent, kind.itemsize), kind)
            box = tuple(slice(int(b), int(b) + n) for b, n in zip(begin, extent, strict=True))
            (part.scale_outputs if is_scales else part.outputs).append((view, box))
        self._parts.append(part)

    def _add_gather(self, part: _Part, gather: Any, low: Ints, dims: int, me: int) -> None:
        """One holder's box of a part: where it goes in values, and how it gets there."""
        item = part.values.dtype
        extent = _extent(gather)[:dims]
        theirs = tuple(gather["strides"][:dims].tolist())
        begin = (gather["start"][:dims] - low).tolist()
        offset = part.values.offset + sum(b * s for b, s in zip(begin, part.values.strides, strict=True))
        wanted = View(offset, extent, part.values.strides, item)
        if gather["trainer"] == me:
            part.copies.append((int(gather["region"]), View(int(gather["offset"]), extent, theirs, item), wanted))
            return
        run, sources, pieces = _runs(extent, item.itemsize, theirs, wanted.strides)
        if len(sources) > _READS_MAX and theirs == _dense(extent, item.itemsize):
            landing = self._place(extent, item)
            part.copies.append((None, landing, wanted))
            run, sources, pieces = landing.nbytes, np.zeros(1, np.int64), np.array([landing.offset - offset])
        trainer, region, source = int(gather["trainer"]), int(gather["region"]), int(gather["offset"])
        self.reads += [
            Read(trainer, region, source + s, offset + p, run)
            for s, p in zip(sources.tolist(), pieces.tolist(), strict=True)
        ]


def ready_tasks(plan: Plan, trainer: int) -> list[ReadyTask]:
    """All tasks of Plan.of_trainer(trainer), in their order. UsageError for casts that there are not."""
    return [ReadyTask(plan, index, trainer) for index in range(len(plan.tasks))]


def _extent(row: Any) -> Shape:
    return tuple((row["stop"] - row["start"]).tolist())


def _dense(shape: Shape, itemsize: int) -> Shape:
    """Strides in C order without gaps."""
    strides = [itemsize]
    for length in shape[:0:-1]:
        strides.append(strides[-1] * length)
    return tuple(reversed(strides)) if shape else ()


def _runs(extent: Shape, itemsize: int, first: Shape, second: Shape) -> tuple[int, Ints, Ints]:
    """A box that lies with different strides in two memories, as runs of bytes without gaps in both.

    Their length, and their offsets in either.
    """
    run, dim = itemsize, len(extent)
    while dim and (extent[dim - 1] == 1 or first[dim - 1] == second[dim - 1] == run):
        dim -= 1
        run *= extent[dim]
    outer = np.indices(extent[:dim], np.int64).reshape(dim, math.prod(extent[:dim]))
    offsets = [np.asarray(strides[:dim], np.int64) @ outer for strides in (first, second)]
    return run, offsets[0], offsets[1]


def _batches(writes: Any) -> list[Batch]:
    """Writes that differ in nothing but where they come from and go to are one submit."""
    order = np.lexsort((writes["source"], writes["nbytes"], writes["region"], writes["target"]))
    rows = writes[order]
    if not len(rows):
        return []
    changes = np.logical_or.reduce([np.diff(rows[name]) != 0 for name in ("target", "region", "nbytes")])
    cuts = np.flatnonzero(changes) + 1
    return [batch for some in np.split(rows, cuts) for batch in _batches_of_equals(some)]


def _batches_of_equals(rows: Any) -> Iterator[Batch]:
    source, source_step, source_index = _stepped(rows["source"])
    offset, offset_step, offset_index = _stepped(rows["offset"])
    if max(source_index.max(), offset_index.max()) >= _INDEX_END:  # engines take indices of 32 bits
        middle = len(rows) // 2
        yield from _batches_of_equals(rows[:middle])
        yield from _batches_of_equals(rows[middle:])
        return
    yield Batch(
        target=int(rows["target"][0]),
        region=int(rows["region"][0]),
        nbytes=int(rows["nbytes"][0]),
        source=source,
        source_step=source_step,
        source_index=source_index.astype(np.uint32),
        offset=offset,
        offset_step=offset_step,
        offset_index=offset_index.astype(np.uint32),
    )


def _stepped(offsets: Ints) -> tuple[int, int, Ints]:
    """Offsets as first + step * index, with the largest step."""
    first = int(offsets.min())
    step = int(np.gcd.reduce(offsets - first)) or 1
    return first, step, (offsets - first) // step


def _quantise(values: Array, source: str, out: Array, scales: Array, block: Shape, name: str, tools: Tools) -> None:
    """The last two dimensions are matrices; all before them have blocks of 1."""
    if values.ndim == 1:
        values, out, scales, block = values[np.newaxis], out[np.newaxis], scales[np.newaxis], (1, *block)
    for at in np.ndindex(*values.shape[:-2]):
        matrix = values[at]
        tools.quantiser.quantise(matrix, out[at], scales[at], name, (block[-2], block[-1]))

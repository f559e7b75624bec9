"""One task of a plan, ready to be replayed: what is read, how it is converted, which writes are submitted.

Made by ready.py, once. A step only fills in where in the arena the task was put.

A task's piece of the arena is its buffer, which is written to targets, and behind it, for each part that needs it, the
gathered or loaded values in the trainers' type, pieces of others that lie there otherwise than they are wanted, and
what quantisation makes.

There may be a hundred thousand of them, of a dozen objects each: immutable and without cycles, so Python's collector
need not look at them (gc=False).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from crossrail.weights.conversion.casts import Caster
from crossrail.weights.conversion.float8 import BlockQuantiser, index_in_whole
from crossrail.weights.errors import NotFinite

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
Shape = tuple[int, ...]


class Read(Struct, frozen=True, gc=False):
    """Bytes of another trainer's region, and where in the task's piece of the arena they go."""

    trainer: int
    region: int
    source: int
    piece: int
    nbytes: int


class Batch(Struct, frozen=True, gc=False):
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


class View(Struct, frozen=True, gc=False):
    """An array in memory: bytes of offset and strides."""

    offset: int
    shape: Shape
    strides: Shape
    dtype: np.dtype[Any]

    def of(self, memory: Bytes, base: int = 0) -> Array:
        """Copies nothing."""
        return np.ndarray(self.shape, self.dtype, memory.data, base + self.offset, self.strides)

    def box(self, begin: list[int], shape: Shape) -> View:
        """A box of it. begin: one number for each dimension; more are passed over."""
        offset = self.offset + sum(b * step for b, step in zip(begin, self.strides, strict=False))
        return View(offset, shape, self.strides, self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


Memories = Callable[[int], Bytes]  # a region of this trainer, by its index in the inventory


@dataclass
class Tools:
    """What conversions need, with scratch memory: one for all tasks of a trainer. Threads: one at a time."""

    caster: Caster = field(default_factory=Caster)
    quantiser: BlockQuantiser = field(default_factory=BlockQuantiser)


class Quantised(Struct, frozen=True, gc=False):
    """A part's quantised values and scales in the arena; blocks of so many elements.

    start: of the part, in its parameter: for error messages.
    """

    values: View
    scales: View
    block: Shape
    start: Shape


class Part(Struct, frozen=True, gc=False):
    """A box of one parameter, on its way into the buffer.

    source, target: dtypes. values: all of it as trainers have it; `own`: the own region in which that lies, None: in
    the arena, gathered or loaded. copies: what is put there, from an own region, or from where a read landed (None).
    outputs: from values, or from what is made of them by quantisation, into the buffer.
    """

    name: str
    source: str
    target: str
    values: View
    own: int | None
    copies: tuple[tuple[int | None, View, View], ...]
    outputs: tuple[tuple[View, View], ...]
    quantised: Quantised | None = None

    def prepare(self, memories: Memories, arena: Bytes, base: int, tools: Tools) -> None:
        """Implements ReadyTask.prepare for this output."""
        for region, view, wanted in self.copies:
            piece = view.of(arena, base) if region is None else view.of(memories(region))
            np.copyto(wanted.of(arena, base), piece)
        memory, begin = (arena, base) if self.own is None else (memories(self.own), 0)
        if self.quantised is None:
            for view, out in self.outputs:
                tools.caster.cast(view.of(memory, begin), self.source, out.of(arena, base), self.target)
            return
        made = self.quantised
        values, scales = made.values.of(arena, base), made.scales.of(arena, base)
        _quantise(self.values.of(memory, begin), values, scales, made.block, made.start, self.name, tools)
        for view, out in self.outputs:
            np.copyto(out.of(arena, base), view.of(arena, base))


class ReadyTask(Struct, frozen=True, gc=False):
    """A task that is ready to be replayed. Any thread.

    name: its parameters. group: of the plan. own_region, own_offset: where the bytes of a direct one lie, region None
    for one that is prepared. piece_bytes: what it needs of the arena, 0 for a direct one. loads: what is copied before
    it is prepared, from own regions that the arena's device does not prepare from, to where in the piece.
    """

    name: str
    group: int
    own_region: int | None
    own_offset: int
    piece_bytes: int
    reads: tuple[Read, ...]
    parts: tuple[Part, ...]
    batches: tuple[Batch, ...]
    write_count: int
    write_bytes: int
    loads: tuple[tuple[int, View, View], ...] = ()

    @property
    def is_direct(self) -> bool:
        """Whether its bytes are written from where they are, with nothing to prepare."""
        return self.own_region is not None

    def prepare(self, memories: Memories, arena: Bytes, base: int, tools: Tools) -> None:
        """Makes the buffer, once the reads are done. base: where its piece of the arena begins. Any one thread.

        Raises NotFinite, naming the parameter and the element of it.
        """
        for part in self.parts:
            part.prepare(memories, arena, base, tools)


def _quantise(values: Array, out: Array, scales: Array, block: Shape, start: Shape, name: str, tools: Tools) -> None:
    """The last two dimensions are matrices, a row or a number is one too; all before them have blocks of 1."""
    while values.ndim < 2:
        values, out, scales, block = values[np.newaxis], out[np.newaxis], scales[np.newaxis], (1, *block)
    for at in np.ndindex(*values.shape[:-2]):
        try:
            tools.quantiser.quantise(values[at], out[at], scales[at], name, (block[-2], block[-1]))
        except NotFinite as error:
            raise NotFinite(name, index_in_whole(start, (*at, *error.index)), error.value) from None

"""Random trainers and targets: sharded over one or two dimensions, unevenly, replicated, in several meshes; and targets
that want any boxes, in any dtype, packed or with gaps, with or without scales."""

from __future__ import annotations

from dataclasses import dataclass

import hypothesis.strategies as st
import numpy as np

from crossrail.weights import Holding, PlanOptions
from tests.weights.memory import STORAGE, Process

Box = tuple[tuple[int, int], ...]


@dataclass
class World:
    trainers: list[Process]
    targets: list[Process]
    whole: dict[str, np.ndarray]
    dtypes: dict[str, str]
    options: PlanOptions

    @property
    def inventories(self) -> tuple[list, list]:
        return [one.inventory for one in self.trainers], [one.inventory for one in self.targets]


class _Memory:
    """Places holdings one behind the other, with gaps."""

    def __init__(self, role: str, rank: int) -> None:
        self.role, self.rank, self.nbytes, self.holdings = role, rank, 0, []

    def add(self, draw: st.DrawFn, name: str, dtype: str, shape: tuple[int, ...], box: Box, **more: object) -> None:
        extent = [stop - start for start, stop in box]
        item = np.dtype(STORAGE[dtype]).itemsize
        pitch = draw(st.integers(0, 3)) if len(extent) > 1 else 0
        strides = [item] * len(extent)
        for dim in reversed(range(len(extent) - 1)):
            strides[dim] = strides[dim + 1] * (extent[dim + 1] + (pitch if dim == len(extent) - 2 else 0))
        offset = self.nbytes + 8 * draw(st.integers(0, 2))
        span = item + sum((count - 1) * stride for count, stride in zip(extent, strides, strict=True))
        self.nbytes = -(-(offset + span) // 8) * 8
        self.holdings.append(Holding(name, dtype, shape, box, 0, offset, strides=tuple(strides), **more))

    def process(self) -> Process:
        return Process(self.role, self.rank, self.holdings, self.nbytes)


@st.composite
def worlds(draw: st.DrawFn, matrix_blocks: bool = False, partial: bool = False) -> World:
    """matrix_blocks: what is quantised is matrices, rows or numbers, and blocks are of these. partial: there are
    replicas, which lack any pieces that others have.
    """
    trainers = [_Memory("trainer", rank * 3) for rank in range(draw(st.integers(1, 5)))]
    targets = [_Memory("target", rank + 7) for rank in range(draw(st.integers(1, 3)))]
    whole, dtypes = {}, {}
    for number in range(draw(st.integers(1, 3))):
        name = f"p{number}"
        shape = tuple(draw(st.lists(st.integers(1, 19), min_size=0, max_size=3)))
        dtypes[name] = draw(st.sampled_from(["bfloat16", "float32"]))
        values = draw(st.integers(0, 2**32 - 1))
        whole[name] = np.random.default_rng(values).integers(0, 200, shape).astype(STORAGE[dtypes[name]])
        (_shard_in_part if partial else _shard)(draw, trainers, name, dtypes[name], shape)
        block = tuple(draw(st.integers(1, 5)) for _ in shape)
        if matrix_blocks:
            block = (*(1 for _ in shape[:-2]), *block[-2:])
        for index, target in enumerate(targets):
            # The first target wants all parameters, so that none is held for nobody.
            if index == 0 or draw(st.booleans()):
                kinds = [dtypes[name], "float32", "float8_e4m3fn"]
                _want(draw, target, name, draw(st.sampled_from(kinds)), shape, block)
    options = PlanOptions(
        gather=draw(st.sampled_from(["needed", "full"])),
        write_bytes_min=draw(st.sampled_from([1, 64, 4096])),
        partial=partial,
    )
    return World([one.process() for one in trainers], [one.process() for one in targets], whole, dtypes, options)


def _shard(draw: st.DrawFn, trainers: list[_Memory], name: str, dtype: str, shape: tuple[int, ...]) -> None:
    everyone = list(range(len(trainers)))
    hulls = [(tuple((0, extent) for extent in shape), everyone)]
    if len(everyone) > 1 and shape and shape[0] > 1 and draw(st.booleans()):
        # Two meshes with a part each, as with expert parallelism; or with all each, as with tied parameters.
        ranks = draw(st.integers(1, len(everyone) - 1))
        at = draw(st.integers(1, shape[0] - 1))
        rest = hulls[0][0][1:]
        first, second = ((0, at), *rest), ((at, shape[0]), *rest)
        if draw(st.booleans()):
            first = second = hulls[0][0]
        hulls = [(first, everyone[:ranks]), (second, everyone[ranks:])]
    for mesh, (hull, ranks) in enumerate(hulls):
        pieces = _pieces(draw, hull, len(ranks))
        for index, rank in enumerate(ranks):
            box = pieces[index % len(pieces)]
            if all(start < stop for start, stop in box):
                trainers[rank].add(draw, name, dtype, shape, box, mesh=f"mesh{mesh}")


def _shard_in_part(draw: st.DrawFn, trainers: list[_Memory], name: str, dtype: str, shape: tuple[int, ...]) -> None:
    """In three replicas, each cut in its own way; trainers have pieces of all of them. Some pieces are gone."""
    copies = np.zeros(shape, np.int64)
    whole = tuple((0, extent) for extent in shape)
    held = [
        (mesh, box)
        for mesh in range(3)
        for box in dict.fromkeys(_pieces(draw, whole, draw(st.integers(1, 6))))
        if all(start < stop for start, stop in box)
    ]
    for _, box in held:
        copies[tuple(slice(*piece) for piece in box)] += 1
    for mesh, box in held:
        inside = copies[tuple(slice(*piece) for piece in box)]
        if (inside > 1).all() and draw(st.booleans()):
            copies[tuple(slice(*piece) for piece in box)] -= 1
            continue
        trainers[draw(st.integers(0, len(trainers) - 1))].add(draw, name, dtype, shape, box, mesh=f"mesh{mesh}")


def _pieces(draw: st.DrawFn, hull: Box, count: int) -> list[Box]:
    boxes = [hull]
    for dim in draw(st.permutations(range(len(hull))))[:2]:
        parts = draw(st.integers(1, max(count // len(boxes), 1)))
        boxes = [(*box[:dim], piece, *box[dim + 1 :]) for box in boxes for piece in _chunks(*box[dim], parts)]
    return boxes


def _chunks(start: int, stop: int, count: int) -> list[tuple[int, int]]:
    """As torch.chunk cuts: all of one size but the last; some may be empty."""
    size = -(-(stop - start) // count)
    return [(min(start + i * size, stop), min(start + (i + 1) * size, stop)) for i in range(count)]


def _want(
    draw: st.DrawFn, target: _Memory, name: str, wanted: str, shape: tuple[int, ...], block: tuple[int, ...]
) -> None:
    box = tuple(tuple(sorted(draw(st.lists(st.integers(0, n), min_size=2, max_size=2, unique=True)))) for n in shape)
    target.add(draw, name, wanted, shape, box)
    if wanted == "float8_e4m3fn":
        grid = tuple(-(-extent // size) for extent, size in zip(shape, block, strict=True))
        blocks = tuple((start // size, -(-stop // size)) for (start, stop), size in zip(box, block, strict=True))
        target.add(draw, f"{name}_scale", "float32", grid, blocks, scale_of=name, block=block)

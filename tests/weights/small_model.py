"""A small model that trainers and inference ranks cut in every way there is, and what conversion makes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

import crossrail as xr
from crossrail.weights.conversion.casts import Caster
from crossrail.weights.conversion.float8 import BlockQuantiser, blocks
from crossrail.weights.inventory.memory import WeightMemory

Array = npt.NDArray[Any]
Weights = dict[str, Array]
Box = tuple[tuple[int, int], ...]

# name: shape, and how trainers cut it: by rows, by columns, or not at all.
MODEL: dict[str, tuple[tuple[int, ...], str]] = {
    "embed": ((97, 40), "rows"),
    "q": ((64, 48), "rows"),
    "k": ((32, 48), "rows"),
    "v": ((32, 48), "columns"),
    "o": ((48, 64), "columns"),
    "norm": ((48,), "all"),
    "up": ((300, 200), "rows"),
    "down": ((200, 300), "columns"),
}
TARGETS = 3  # two tensor-parallel halves in bfloat16, one whole in fp8


def weights_of(version: int) -> Weights:
    """All of it, as bits of bfloat16."""
    rng = np.random.default_rng(version)
    return {name: bfloat16(rng.standard_normal(shape).astype(np.float32)) for name, (shape, _) in MODEL.items()}


def bfloat16(values: Array) -> Array:
    out = np.empty(values.shape, np.uint16)
    Caster().cast(values, "float32", out, "bfloat16")
    return out


def widened(bits: Array) -> npt.NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def cut(shape: Sequence[int], how: str, rank: int, count: int) -> Box:
    """The rank's box; uneven, and empty at the last where that comes of it."""
    box = [(0, n) for n in shape]
    if how != "all":
        dim = 0 if how == "rows" else 1
        size = -(-shape[dim] // count)
        box[dim] = (min(rank * size, shape[dim]), min((rank + 1) * size, shape[dim]))
    return tuple(box)


def part(values: Array, box: Box) -> Array:
    return values[tuple(slice(start, stop) for start, stop in box)]


class Trainer:
    """Rank of count trainers: its shards, all in one block. allocate: bytes as an array. mesh_of: by parameter."""

    def __init__(
        self,
        memory: WeightMemory,
        count: int,
        allocate: Callable[[int], Array],
        dtype: str,
        mesh_of: Callable[[str], str] = lambda _: "fsdp",
    ) -> None:
        self.memory, self.dtype = memory, dtype
        self.shards: dict[str, tuple[Box, Array]] = {}
        item = 2 if dtype == "bfloat16" else 4
        boxes = {name: cut(shape, how, memory.rank, count) for name, (shape, how) in MODEL.items()}
        block = allocate(sum(item * int(np.prod([b - a for a, b in box])) for box in boxes.values()) + 64)
        end = 64
        for name, box in boxes.items():
            extent = tuple(b - a for a, b in box)
            nbytes = item * int(np.prod(extent))
            shard = block[end : end + nbytes].view(np.uint16 if item == 2 else np.float32).reshape(extent)
            end += nbytes
            self.shards[name] = box, shard
            memory.add(name, shard, shape=MODEL[name][0], box=box, dtype=dtype, mesh=mesh_of(name))

    def load(self, weights: Weights) -> None:
        for name, (box, shard) in self.shards.items():
            values = part(weights[name], box)
            shard[...] = values if self.dtype == "bfloat16" else widened(values)


class Target:
    """Rank 0 or 1: halves, fused; 2: whole, matrices in fp8 with scales."""

    def __init__(self, memory: WeightMemory, allocate: Callable[[int], Array]) -> None:
        self.memory = memory
        self.arrays: dict[str, Array] = {}
        rank = memory.rank
        if rank < 2:
            self._add_halves(rank, allocate)
        else:
            self._add_quantised(allocate)

    def _add_halves(self, rank: int, allocate: Callable[[int], Array]) -> None:
        qkv = self._new("qkv", (64, 48), np.uint16, allocate)
        for name, rows in (("q", slice(0, 32)), ("k", slice(32, 48)), ("v", slice(48, 64))):
            self._hold(name, qkv[rows], cut(MODEL[name][0], "rows", rank, 2))
        gate = self._new("gate_up", (2, 150, 200), np.uint16, allocate)
        self._hold("up", gate[1], cut((300, 200), "rows", rank, 2))
        for name, how in (("embed", "rows"), ("o", "columns"), ("down", "columns")):
            box = cut(MODEL[name][0], how, rank, 2)
            self._hold(name, self._new(name, [b - a for a, b in box], np.uint16, allocate), box)
        norm = self._new("norm", (48,), np.float32, allocate)
        self.memory.add("norm", norm, dtype="float32")

    def _add_quantised(self, allocate: Callable[[int], Array]) -> None:
        for name, (shape, _) in MODEL.items():
            if len(shape) == 1:
                self._hold(name, self._new(name, shape, np.uint16, allocate), cut(shape, "all", 0, 1))
                continue
            grid = tuple(blocks(n) for n in shape)
            self.memory.add(name, self._new(name, shape, np.uint8, allocate), dtype="float8_e4m3fn")
            scales = self._new(f"{name}_scale", grid, np.float32, allocate)
            self.memory.add(f"{name}_scale", scales, scale_of=name, block=(128, 128))

    def _new(self, key: str, shape: Sequence[int], dtype: Any, allocate: Callable[[int], Array]) -> Array:
        kind = np.dtype(dtype)
        self.arrays[key] = allocate(int(np.prod(shape)) * kind.itemsize).view(kind).reshape(tuple(shape))
        return self.arrays[key]

    def _hold(self, name: str, array: Array, box: Box) -> None:
        self.memory.add(name, array, shape=MODEL[name][0], box=box, dtype="bfloat16")

    def expected(self, weights: Weights) -> dict[str, Array]:
        """What all its arrays must be."""
        rank = self.memory.rank
        if rank < 2:
            halves = {
                name: part(weights[name], cut(shape, "columns" if name in ("o", "down") else "rows", rank, 2))
                for name, (shape, _) in MODEL.items()
                if len(shape) == 2
            }
            gate = np.zeros((2, 150, 200), np.uint16)
            gate[1] = halves.pop("up")
            qkv = np.concatenate([halves.pop(name) for name in "qkv"])
            return {"qkv": qkv, "gate_up": gate, "norm": widened(weights["norm"]), **halves}
        made: dict[str, Array] = {"norm": weights["norm"]}
        for name, (shape, _) in MODEL.items():
            if len(shape) == 2:
                made[name] = np.empty(shape, np.uint8)
                made[f"{name}_scale"] = np.empty(tuple(blocks(n) for n in shape), np.float32)
                BlockQuantiser().quantise(weights[name], made[name], made[f"{name}_scale"])
        return made


def plain(nbytes: int) -> Array:
    """Memory of numpy's own."""
    return np.zeros(max(nbytes, 1), np.uint8)[:nbytes]


@dataclass
class Arena:
    """Memory of the engine's own, which peers map: pieces of one region."""

    region: xr.Region
    end: int = 0

    def allocate(self, nbytes: int) -> Array:
        at, self.end = self.end, self.end + -(-nbytes // 64) * 64
        return self.region.array()[at : at + nbytes]

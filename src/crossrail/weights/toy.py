"""A meaningless mixture of experts for demos and measurements: names and shards of real models, any size.

Trainers shard every parameter by rows, as FSDP does. One kind of inference rank has two tensor-parallel halves with
fused projections and stacked experts, in bfloat16; another has everything in fp8 with block scales. A version's weights
are a function of its number, so any holder of a part can check it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

import crossrail as xr
from crossrail.weights.conversion.casts import Caster
from crossrail.weights.conversion.float8 import BLOCK, BlockQuantiser, blocks
from crossrail.weights.inventory.holdings import Box
from crossrail.weights.inventory.memory import WeightMemory

Array = npt.NDArray[Any]
Shape = tuple[int, ...]
TargetKind = Literal["fused", "plain", "fp8"]

_ALIGN_BYTES = 64
_DRAWN = 1 << 16  # elements that are drawn; longer parameters repeat them
_TP = 2


@dataclass(frozen=True)
class ToyModel:
    """Sizes. Each expert has gate, up and down projections; attention has heads of 64."""

    layers: int = 2
    hidden: int = 512
    intermediate: int = 256
    experts: int = 8
    vocabulary: int = 2048

    def shapes(self) -> dict[str, Shape]:
        """Shapes of all parameters, by name in the checkpoint."""
        hidden, kv = self.hidden, max(self.hidden // 4, 64)
        shapes: dict[str, Shape] = {"model.embed_tokens.weight": (self.vocabulary, hidden)}
        for layer in range(self.layers):
            at = f"model.layers.{layer}."
            shapes |= {f"{at}self_attn.{n}_proj.weight": (kv if n in "kv" else hidden, hidden) for n in "qkvo"}
            shapes |= {f"{at}input_layernorm.weight": (hidden,), f"{at}mlp.gate.weight": (self.experts, hidden)}
            for expert in range(self.experts):
                name = f"{at}mlp.experts.{expert}."
                shapes |= {f"{name}{n}_proj.weight": (self.intermediate, hidden) for n in ("gate", "up")}
                shapes[f"{name}down_proj.weight"] = (hidden, self.intermediate)
        return shapes

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters in bfloat16."""
        return sum(2 * int(np.prod(shape)) for shape in self.shapes().values())

    @classmethod
    def of_bytes(cls, nbytes: int, hidden: int = 512, intermediate: int = 256) -> ToyModel:
        """A model of about so many bytes: as many experts as that takes."""
        small = cls(hidden=hidden, intermediate=intermediate, experts=1)
        expert = replace(small, experts=2).nbytes - small.nbytes
        return replace(small, experts=max(1, 1 + (nbytes - small.nbytes) // expert))


def weights(name: str, shape: Shape, version: int) -> Array:
    """The parameter in this version: bits of bfloat16."""
    rng = np.random.default_rng([version, zlib.crc32(name.encode())])
    drawn = rng.standard_normal(min(_DRAWN, int(np.prod(shape)))).astype(np.float32)
    bits = np.empty(drawn.shape, np.uint16)
    Caster().cast(drawn, "float32", bits, "bfloat16")
    return np.resize(bits, shape)


class _Pieces:
    """Memory of an engine's own, handed out piece by piece."""

    def __init__(self, engine: xr.Engine, nbytes: int) -> None:
        self.region = engine.alloc(nbytes)
        self._end = 0

    def take(self, shape: Shape, dtype: Any) -> Array:
        kind = np.dtype(dtype)
        nbytes = int(np.prod(shape)) * kind.itemsize
        at, self._end = self._end, self._end + -(-nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
        piece: Array = self.region.array()[at : at + nbytes].view(kind).reshape(shape)
        return piece


class ToyTrainer:
    """Rows of every parameter, as rank `rank` of `count` has them: as many each, the last ones fewer or none."""

    def __init__(self, model: ToyModel, engine: xr.Engine, rank: int, count: int) -> None:
        self._shapes = model.shapes()
        boxes = {name: rows(shape, rank, count) for name, shape in self._shapes.items()}
        nbytes = sum(2 * int(np.prod(extent(box))) + _ALIGN_BYTES for box in boxes.values())
        pieces = _Pieces(engine, nbytes)
        self.memory = WeightMemory(engine, "trainer", rank, [pieces.region])
        self._shards = [(name, box, pieces.take(extent(box), np.uint16)) for name, box in boxes.items()]
        for name, box, shard in self._shards:
            self.memory.add(name, shard, shape=self._shapes[name], box=box, dtype="bfloat16", mesh="fsdp")

    def train(self, version: int) -> None:
        """The weights become those of this version."""
        for name, box, shard in self._shards:
            shard[...] = weights(name, self._shapes[name], version)[slice(*box[0])]


class ToyTarget:
    """An inference rank's arrays, and what belongs into them."""

    def __init__(self, model: ToyModel, engine: xr.Engine, rank: int, kind: TargetKind) -> None:
        self._model, self._kind = model, kind
        self._shapes = model.shapes()
        self._pieces = _Pieces(engine, 2 * model.nbytes)
        self.memory = WeightMemory(engine, "target", rank, [self._pieces.region])
        self._views: list[tuple[Array, str, Box | None, bool]] = []  # of which parameter, its box; or its scales
        if kind == "fused":
            for half in range(_TP):
                self._add_half(half)
        else:
            for name, shape in self._shapes.items():
                if kind == "fp8" and len(shape) == 2:
                    self._add_quantised(name, shape)
                else:
                    self._add(name, self._pieces.take(shape, np.uint16), tuple((0, n) for n in shape))

    def mismatches(self, version: int, arrays: Any) -> Iterator[str]:
        """Parameters that are not, bit for bit, what conversion of the whole checkpoint gives.

        arrays: Reading.like.
        """
        quantised: dict[str, tuple[Array, Array]] = {}
        for view, name, box, is_scales in self._views:
            whole = weights(name, self._shapes[name], version)
            if box is None:
                if name not in quantised:
                    quantised[name] = _quantised(whole)
                wanted = quantised[name][is_scales]
            else:
                wanted = whole[tuple(slice(*each) for each in box)]
            if not np.array_equal(arrays(view), wanted):
                yield f"{name}{' (scales)' if is_scales else ''}"

    def _add(self, name: str, view: Array, box: Box) -> None:
        self.memory.add(name, view, shape=self._shapes[name], box=box, dtype="bfloat16")
        self._views.append((view, name, box, False))

    def _add_quantised(self, name: str, shape: Shape) -> None:
        values = self._pieces.take(shape, np.uint8)
        scales = self._pieces.take(tuple(blocks(n) for n in shape), np.float32)
        self.memory.add(name, values, dtype="float8_e4m3fn")
        self.memory.add(f"{name}_scale_inv", scales, scale_of=name, block=(BLOCK, BLOCK))
        self._views += [(values, name, None, False), (scales, name, None, True)]

    def _add_half(self, half: int) -> None:
        """Rank `half` of a tensor-parallel pair: rows of projections that fan out, columns of those that fan in."""
        model = self._model
        self._fuse(["model.embed_tokens.weight"], half)
        for layer in range(model.layers):
            at = f"model.layers.{layer}."
            self._fuse([f"{at}self_attn.{n}_proj.weight" for n in "qkv"], half)
            self._add_columns(f"{at}self_attn.o_proj.weight", half)
            for name in (f"{at}input_layernorm.weight", f"{at}mlp.gate.weight"):
                shape = self._shapes[name]
                self._add(name, self._pieces.take(shape, np.uint16), tuple((0, n) for n in shape))
            for expert in range(model.experts):
                name = f"{at}mlp.experts.{expert}."
                self._fuse([f"{name}{n}_proj.weight" for n in ("gate", "up")], half)
                self._add_columns(f"{name}down_proj.weight", half)

    def _fuse(self, names: list[str], half: int) -> None:
        boxes = [rows(self._shapes[name], half, _TP) for name in names]
        fused = self._pieces.take((sum(extent(box)[0] for box in boxes), self._shapes[names[0]][1]), np.uint16)
        end = 0
        for name, box in zip(names, boxes, strict=True):
            begin, end = end, end + extent(box)[0]
            self._add(name, fused[begin:end], box)

    def _add_columns(self, name: str, half: int) -> None:
        high, wide = self._shapes[name]
        box = ((0, high), (half * wide // _TP, (half + 1) * wide // _TP))
        self._add(name, self._pieces.take(extent(box), np.uint16), box)


def rows(shape: Shape, rank: int, count: int) -> Box:
    """The box of a rank that has its share of the first dimension, as FSDP cuts it."""
    share = -(-shape[0] // count)
    begin, end = (min(share * index, shape[0]) for index in (rank, rank + 1))
    return ((begin, end), *((0, n) for n in shape[1:]))


def extent(box: Box) -> Shape:
    """The shape of a box."""
    return tuple(stop - start for start, stop in box)


def _quantised(values: Array) -> tuple[Array, Array]:
    out = np.empty(values.shape, np.uint8)
    scales = np.empty(tuple(blocks(n) for n in values.shape), np.float32)
    BlockQuantiser().quantise(values, out, scales)
    return out, scales

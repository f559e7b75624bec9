"""What all ranks of an AllToAll agree on."""

from __future__ import annotations

import dataclasses
import json
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import SupportsIndex, TypeGuard

from crossrail.errors import UsageError
from crossrail.moe import bounds

# Bytes of an element, and the type that numpy, which lacks the first two, has it as.
ITEM_BYTES = {"float8_e4m3fn": 1, "bfloat16": 2, "float16": 2, "float32": 4}
NUMPY_TYPES = {"float8_e4m3fn": "uint8", "bfloat16": "uint16", "float16": "float16", "float32": "float32"}
OUT_DTYPES = ("bfloat16", "float16", "float32")
LAYOUTS = ("grouped", "masked")
ON_LOST = ("raise", "mask")
_ROW_UNIT = 16
TAG_BYTES = 8
_COUNT_MAX = (1 << 31) - 1
_COUNTS = ("experts", "hidden", "top_k", "max_tokens", "padding", "dp_size")


@dataclass(frozen=True, kw_only=True)
class Config:
    """The arguments of AllToAll that must be the same on all ranks. UsageError for one that makes no sense.

    Numbers may be of any kind, numpy's too; here they are int and float.
    """

    world: int
    experts: int
    hidden: int
    top_k: int
    max_tokens: int
    dtype: str
    scale_block: int | None
    out_dtype: str
    private_tokens: int | None
    padding: int
    layout: str
    node_size: int | None
    dp_size: int
    capacity_factor: float | None
    on_lost: str
    node_sums: bool = False

    def __post_init__(self) -> None:
        for name in (*_COUNTS, "scale_block", "private_tokens", "node_size", "capacity_factor"):
            object.__setattr__(self, name, _plain(getattr(self, name)))
        for name in _COUNTS:
            _require(_is_count(value := getattr(self, name), 1), name, value, "a number, 1 or more")
        for name in (*_COUNTS, "scale_block", "private_tokens"):
            value = getattr(self, name)
            _require(not isinstance(value, int) or value <= _COUNT_MAX, name, value, f"{_COUNT_MAX} or less")
        _require(self.dtype in tuple(ITEM_BYTES), "dtype", self.dtype, f"one of {', '.join(ITEM_BYTES)}")
        _require(self.out_dtype in OUT_DTYPES, "out_dtype", self.out_dtype, f"one of {', '.join(OUT_DTYPES)}")
        _require(self.layout in LAYOUTS, "layout", self.layout, f"one of {', '.join(LAYOUTS)}")
        _require(self.on_lost in ON_LOST, "on_lost", self.on_lost, f"one of {', '.join(ON_LOST)}")
        block, size = self.scale_block, self.node_size
        _require(block is None or _is_count(block, 1), "scale_block", block, "a number, 1 or more, or None")
        factor: object = self.capacity_factor
        is_factor = isinstance(factor, int | float) and not isinstance(factor, bool) and 0 < factor < math.inf
        _require(factor is None or is_factor, "capacity_factor", factor, "a number, more than 0, or None")
        divides = _is_count(size, 1) and self.world % size == 0
        _require(size is None or divides, "node_size", size, _divisor(self.world))
        _require(self.world % self.dp_size == 0, "dp_size", self.dp_size, _divisor(self.world))
        sums = self.node_sums
        _require(not sums or self.dp_size == 1, "node_sums", sums, f"False where dp_size is {self.dp_size}: not built")
        private = self.private_tokens
        _require(private is None or _is_count(private, 0), "private_tokens", private, "a number, 0 or more, or None")

    @property
    def x_bytes(self) -> int:
        """Of a token's row."""
        return self.hidden * ITEM_BYTES[self.dtype]

    @property
    def blocks(self) -> int:
        """Scales of a token, float32; 0: none."""
        return 0 if self.scale_block is None else -(-self.hidden // self.scale_block)

    @property
    def x_row_bytes(self) -> int:
        """Of a token's row and its scales."""
        return self.x_bytes + 4 * self.blocks

    @property
    def stride_bytes(self) -> int:
        """A row as it travels: x, its scales, zeros; with node_sums a tag at the end (native/moe/node_sums.h)."""
        return -(-(self.x_row_bytes + self.tag_bytes) // _ROW_UNIT) * _ROW_UNIT

    @property
    def tag_bytes(self) -> int:
        """Of a row that travels: which route it is of, and its weight."""
        return TAG_BYTES if self.node_sums else 0

    @property
    def tag_rows(self) -> int:
        """Tags that a rank shows its node: at most those of all rows that may come from far."""
        return self.groups * self.routes_to_rank_max if self.node_sums else 0

    @property
    def y_bytes(self) -> int:
        """Of a row of an expert's output."""
        return self.hidden * ITEM_BYTES[self.out_dtype]

    @property
    def groups(self) -> int:
        """Of ranks that hold the same tokens."""
        return self.world // self.dp_size

    @property
    def experts_per_rank(self) -> int:
        """Of all ranks but perhaps the last."""
        return -(-self.experts // self.world)

    @property
    def routes_to_rank_max(self) -> int:
        """Of one group: a token's experts differ."""
        return self.max_tokens * min(self.top_k, self.experts_per_rank)

    @property
    def rows_per_expert(self) -> int:
        """Layout "masked": room for each expert."""
        return bounds.rows_per_expert(self)

    @property
    def rows_max(self) -> int:
        """Room for the output of dispatch at a rank, in rows."""
        return bounds.output_rows(self)

    @property
    def rows_limit(self) -> int:
        """Room that a round needs more of is refused: of a rank's output, in layout "masked" of each of its experts."""
        return self.rows_per_expert if self.layout == "masked" else self.rows_max

    def output_rows(self, experts: int) -> int:
        """Room for the output of dispatch at a rank with so many experts."""
        return experts * self.rows_per_expert if self.layout == "masked" else self.rows_max

    def encode(self) -> str:
        return json.dumps(dataclasses.asdict(self))


def check_agreement(configs: Sequence[str], ranks: Sequence[int]) -> None:
    """UsageError that names the first argument in which two ranks differ, both values and ranks."""
    first, first_rank = json.loads(configs[0]), ranks[0]
    for text, rank in zip(configs[1:], ranks[1:], strict=True):
        other = json.loads(text)
        for name in {**first, **other}:
            ours, theirs = first.get(name, "unknown"), other.get(name, "unknown")
            if ours != theirs:
                raise UsageError(
                    f"{name} is {ours!r} on rank {first_rank} and {theirs!r} on rank {rank}: all must give the same"
                )


def _plain(value: object) -> object:
    """An int or float of a number; what is none stays as it is."""
    if isinstance(value, bool):
        return value
    if isinstance(value, SupportsIndex):
        try:
            return operator.index(value)
        except TypeError:  # an array of several
            return value
    return float(value) if isinstance(value, Real) else value


def _require(holds: bool, name: str, value: object, bound: str) -> None:
    if not holds:
        raise UsageError(f"{name} is {value!r}, must be {bound}")


def _is_count(value: object, least: int) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _divisor(world: int) -> str:
    return f"a divisor of the number of ranks, {world}"

"""The configuration that all ranks of an AllToAll must agree on."""

from __future__ import annotations

import dataclasses
import json
import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import Any, SupportsIndex, TypeGuard, cast

import numpy as np

from crossrail.errors import UsageError
from crossrail.moe import bounds
from crossrail.moe.experts import ExpertSplit
from crossrail.moe.nodes import Nodes, nodes_of

# Bytes per element; numpy lacks the first two types, and holds them as integers.
ITEM_BYTES = {"float8_e4m3fn": 1, "bfloat16": 2, "float16": 2, "float32": 4}
NUMPY_TYPES = {"float8_e4m3fn": "uint8", "bfloat16": "uint16", "float16": "float16", "float32": "float32"}
OUT_DTYPES = ("bfloat16", "float16", "float32")
LAYOUTS = ("grouped", "masked")
ON_LOST = ("raise", "mask")
PROXIES = ("caller", "thread")
_ROW_UNIT = 16
TAG_BYTES = 8
_COUNT_MAX = (1 << 31) - 1
_COUNTS = ("experts", "hidden", "top_k", "max_tokens", "padding", "dp_size")


@dataclass(frozen=True, kw_only=True)
class Config:
    """The arguments of AllToAll that must be the same on all ranks. UsageError for one that makes no sense.

    Numbers may be of any kind, numpy's too; here they are int and float. experts_per_rank: None becomes the even split.
    node_size: nodes of one size are a number.
    """

    world: int
    experts: int
    experts_per_rank: Sequence[int] | None = None
    hidden: int
    top_k: int
    max_tokens: int
    dtype: str
    scale_block: int | None
    out_dtype: str
    private_tokens: int | None
    padding: int
    layout: str
    node_size: int | Sequence[int] | None
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
        most = f"{self.experts} or less, as there are experts: those of a token differ"
        _require(self.top_k <= self.experts, "top_k", self.top_k, most)
        object.__setattr__(self, "experts_per_rank", self._split_given().counts)
        _require(self.dtype in tuple(ITEM_BYTES), "dtype", self.dtype, f"one of {', '.join(ITEM_BYTES)}")
        _require(self.out_dtype in OUT_DTYPES, "out_dtype", self.out_dtype, f"one of {', '.join(OUT_DTYPES)}")
        _require(self.layout in LAYOUTS, "layout", self.layout, f"one of {', '.join(LAYOUTS)}")
        _require(self.on_lost in ON_LOST, "on_lost", self.on_lost, f"one of {', '.join(ON_LOST)}")
        block = self.scale_block
        _require(block is None or _is_count(block, 1), "scale_block", block, "a number, 1 or more, or None")
        factor: object = self.capacity_factor
        is_factor = isinstance(factor, int | float) and not isinstance(factor, bool) and 0 < factor < math.inf
        _require(factor is None or is_factor, "capacity_factor", factor, "a number, more than 0, or None")
        object.__setattr__(self, "node_size", self._node_size_given())
        _require(self.world % self.dp_size == 0, "dp_size", self.dp_size, _divisor(self.world))
        sums = self.node_sums
        _require(is_flag(sums), "node_sums", sums, "True or False")
        object.__setattr__(self, "node_sums", bool(sums))
        _require(not sums or self.dp_size == 1, "node_sums", sums, f"False where dp_size is {self.dp_size}: not built")
        private = self.private_tokens
        _require(private is None or _is_count(private, 0), "private_tokens", private, "a number, 0 or more, or None")

    @property
    def x_bytes(self) -> int:
        """Bytes of a token's row."""
        return self.hidden * ITEM_BYTES[self.dtype]

    @property
    def blocks(self) -> int:
        """Scales of a token, float32; 0: none."""
        return 0 if self.scale_block is None else -(-self.hidden // self.scale_block)

    @property
    def x_row_bytes(self) -> int:
        """Bytes of a token's row and its scales."""
        return self.x_bytes + 4 * self.blocks

    @property
    def stride_bytes(self) -> int:
        """A row as it travels: x, its scales, zeros; with node_sums a tag at the end (native/moe/node_sums.h)."""
        return -(-(self.x_row_bytes + self.tag_bytes) // _ROW_UNIT) * _ROW_UNIT

    @property
    def tag_bytes(self) -> int:
        """Bytes of a travelling row's tag: which route it belongs to, and its weight."""
        return TAG_BYTES if self.node_sums else 0

    def tag_rows(self, rank: int) -> int:
        """Tags that a rank shows its node: at most one for each row that may come from far."""
        return self.groups * self.routes_limits[rank] if self.node_sums else 0

    @property
    def y_bytes(self) -> int:
        """Bytes of a row of an expert's output."""
        return self.hidden * ITEM_BYTES[self.out_dtype]

    @property
    def groups(self) -> int:
        """Number of groups of ranks that hold the same tokens."""
        return self.world // self.dp_size

    def sends_rows(self, rank: int, other: int) -> bool:
        """Whether rows of one go to the other, as between all that have the same index in their groups."""
        return rank % self.dp_size == other % self.dp_size

    @cached_property
    def nodes_given(self) -> Nodes | None:
        """The node of each rank, as asked for; None: found when they meet."""
        return None if self.node_size is None else nodes_of(self.world, self.node_size)

    @cached_property
    def split(self) -> ExpertSplit:
        """Which rank has which experts."""
        assert self.experts_per_rank is not None  # from __post_init__ on
        return ExpertSplit(tuple(self.experts_per_rank))

    @property
    def experts_per_rank_max(self) -> int:
        """Experts of the rank that has most: all ranks have as much room for rows from far ranks."""
        return self.split.most

    @property
    def routes_to_rank_max(self) -> int:
        """Most routes from one group to one rank: a token's experts differ."""
        return self.max_tokens * min(self.top_k, self.experts_per_rank_max)

    @property
    def rows_per_expert(self) -> int:
        """Layout "masked": room for each expert."""
        return bounds.rows_per_expert(self)

    @cached_property
    def output_rows(self) -> tuple[int, ...]:
        """Room for the output of dispatch at each rank, which depends on how many experts it has."""
        return tuple(bounds.output_rows(self, experts) for experts in self.split.counts)

    @cached_property
    def rows_limits(self) -> tuple[int, ...]:
        """By rank: a round that needs more is refused. Of its output, in layout "masked" of each of its experts."""
        return (self.rows_per_expert,) * self.world if self.layout == "masked" else self.output_rows

    @cached_property
    def routes_limits(self) -> tuple[int, ...]:
        """By rank: a round that has more to it of one group is refused. A token's experts differ."""
        return tuple(self.max_tokens * min(self.top_k, experts) for experts in self.split.counts)

    def encode(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    def _node_size_given(self) -> int | tuple[int, ...] | None:
        given = self.node_size
        if given is None or not isinstance(given, Sequence | np.ndarray) or isinstance(given, str | bytes):
            divides = _is_count(given, 1) and self.world % given == 0
            _require(given is None or divides, "node_size", given, f"{_divisor(self.world)}, or the size of each node")
            return cast(int | None, given)
        sizes = tuple(_plain(one) for one in given)
        bound = f"the number of ranks of each node, 1 or more, {self.world} in all"
        numbers = tuple(one for one in sizes if _is_count(one, 1))
        _require(len(numbers) == len(sizes) and sum(numbers) == self.world, "node_size", given, bound)
        return numbers[0] if len(set(numbers)) == 1 else numbers

    def _split_given(self) -> ExpertSplit:
        given = self.experts_per_rank
        if given is None:
            return ExpertSplit.even(self.experts, self.world)
        is_one_each = not isinstance(given, str | bytes) and isinstance(given, Iterable)
        counts = tuple(_plain(one) for one in given) if is_one_each else ()
        bound = f"a number of experts, 0 or more, for each of the {self.world} ranks"
        numbers = [one for one in counts if _is_count(one, 0)]
        _require(len(numbers) == len(counts) == self.world, "experts_per_rank", given, bound)
        _require(sum(numbers) == self.experts, "experts_per_rank", given, f"{self.experts} in all, as experts says")
        return ExpertSplit(tuple(numbers))


def is_flag(value: object) -> bool:
    """Whether it is True or False, numpy's included. 1 is not accepted, and "no" would count as set."""
    return isinstance(value, bool | np.bool_)


def check_proxy(proxy: object, cpu: object) -> None:
    """UsageError for arguments that make no sense on any machine; whether a thread may run on that core is for it."""
    _require(proxy in PROXIES, "proxy", proxy, f"one of {', '.join(PROXIES)}")
    is_core = cpu is None or _is_count(_plain(cpu), 0)
    _require(is_core, "proxy_cpu", cpu, "the number of a core, 0 or more, or None")
    if proxy == "caller" and cpu is not None:
        raise UsageError(f"proxy_cpu is {cpu!r}, and proxy is 'caller': there is no thread to pin")


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


def name_of_dtype(dtype: Any) -> Any:
    """The name of torch's or numpy's type; anything else as it is: Config refuses what is no name of one."""
    if isinstance(dtype, np.dtype):
        return dtype.name
    if isinstance(dtype, type) and issubclass(dtype, np.generic):
        return dtype.__name__
    return str(dtype).removeprefix("torch.") if type(dtype).__module__ == "torch" else dtype


def _plain(value: object) -> object:
    """A number as int or float; anything else is returned as it is."""
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

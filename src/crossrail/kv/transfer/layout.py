"""The layout of an inference instance's KV cache, and whether two instances can exchange theirs. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from crossrail.errors import UsageError
from crossrail.kv.errors import LayoutMismatch

Kind: TypeAlias = Literal["MHA", "GQA", "MLA", "PACKED", "PLANES", "JOINT"]
Order: TypeAlias = Literal["HND", "NHD"]

# The numpy type that holds one element; numpy has neither bfloat16 nor the 8-bit floats, whose bits are stored.
_STORAGE = {
    "float64": "float64",
    "float32": "float32",
    "float16": "float16",
    "bfloat16": "uint16",
    "float8_e4m3fn": "uint8",
    "float8_e5m2": "uint8",
    "int8": "int8",
    "uint8": "uint8",
}
_BOUNDS = {
    "layers": 4096,
    "pages": 1 << 31,
    "page_tokens": 1 << 16,
    "kv_heads": 4096,
    "head_dim": 1 << 16,
    "tp": 1024,
}
_LIKE_NO_OTHER = ("PACKED", "PLANES", "JOINT")  # kinds that can exchange KV only with their own kind
_LAYER_BYTES_MAX = 1 << 50  # so that offsets stay inside what an engine takes


@dataclass(frozen=True)
class KvLayout:
    """The KV of one instance: `tp` ranks of tensor parallelism, each with memory of the same shape.

    kv_heads: of the model. Rank r of tp holds kv_heads / tp of them, from head r * kv_heads / tp on; with more ranks
    than heads each head is replicated on tp / kv_heads neighbouring ranks. One must be a multiple of the other.
    page_tokens: tokens of a page. head_dim: elements of a head's vector; for MLA, whose one "head" every rank holds,
    the latent with its rotary part.
    dtype: "bfloat16", "float8_e4m3fn", ... or a numpy or torch dtype of that name.
    kind: "MLA" keeps one vector per token, the others a K and a V. "MHA" and "GQA" lie in memory alike. "PACKED" keeps
    K and V of a head together, page by page, in whatever form the attention kernel likes; head_dim counts both. Only
    whole heads of whole pages mean anything then: page_tokens must agree, and the form is the caller's to compare.
    "PLANES" keeps K and V of a layer in memory of their own, which count as two layers here: all K, then all V, say.
    "JOINT" keeps a head's K and V of a token in one row, V right behind K; head_dim counts both.

    Memory of a rank, from the slowest index to the fastest, all contiguous:
      separate_kv      layers, K and V, pages, page
      not separate_kv  layers, pages, K and V, page
    and in a page: "HND" heads, tokens, elements; "NHD" tokens, heads, elements.
    The layers may lie in one piece of memory or in one each (RankMemory).
    """

    layers: int
    pages: int
    page_tokens: int
    kv_heads: int
    head_dim: int
    dtype: str
    kind: Kind = "GQA"
    order: Order = "HND"
    separate_kv: bool = True
    tp: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", dtype_name(self.dtype))
        for name, bound in _BOUNDS.items():
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= bound:
                raise UsageError(f"{name}={value!r} must be a whole number from 1 to {bound}")
        _check_choice("kind", self.kind, get_args(Kind))
        _check_choice("order", self.order, get_args(Order))
        if type(self.separate_kv) is not bool:
            raise UsageError(f"separate_kv={self.separate_kv!r} must be True or False")
        if self.kind == "MLA" and self.kv_heads != 1:
            raise UsageError(f"kv_heads={self.kv_heads} of kind MLA: it keeps one latent vector per token, so 1")
        if self.kind == "PACKED" and self.order != "HND":
            raise UsageError(f"order={self.order!r} of kind PACKED: a head of a page must be in one piece, so 'HND'")
        if self.kv_heads % self.tp and self.tp % self.kv_heads:
            raise UsageError(f"kv_heads={self.kv_heads} and tp={self.tp}: one must be a multiple of the other")
        if self.layer_bytes > _LAYER_BYTES_MAX:
            raise UsageError(f"a layer has {self.layer_bytes} bytes, at most {_LAYER_BYTES_MAX} can be addressed")

    # ---- shards

    @cached_property
    def rank_heads(self) -> int:
        """Number of heads that one rank holds."""
        return max(self.kv_heads // self.tp, 1)

    @cached_property
    def replicas(self) -> int:
        """Number of neighbouring ranks that hold the same heads."""
        return max(self.tp // self.kv_heads, 1)

    def heads_of(self, rank: int) -> range:
        """The model's heads that this rank holds."""
        if not 0 <= rank < self.tp:
            raise UsageError(f"rank={rank} must be in 0..{self.tp - 1}")
        first = rank // self.replicas * self.rank_heads
        return range(first, first + self.rank_heads)

    # ---- memory of one rank, in bytes

    @cached_property
    def parts(self) -> int:
        """2: K and V; 1: the latent of MLA, K and V in one row or as the kernel packed them, or one of the two."""
        return 1 if self.kind in ("MLA", *_LIKE_NO_OTHER) else 2

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one head of one token."""
        return self.head_dim * self.storage.itemsize

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of K, or of V, of one page."""
        return self.rank_heads * self.page_tokens * self.row_bytes

    @cached_property
    def page_stride(self) -> int:
        return self.block_bytes if self.separate_kv else self.parts * self.block_bytes

    @cached_property
    def part_stride(self) -> int:
        """Bytes from a page's K to its V."""
        return self.pages * self.block_bytes if self.separate_kv else self.block_bytes

    @cached_property
    def head_stride(self) -> int:
        return self.page_tokens * self.row_bytes if self.order == "HND" else self.row_bytes

    @cached_property
    def token_stride(self) -> int:
        return self.row_bytes if self.order == "HND" else self.rank_heads * self.row_bytes

    @cached_property
    def layer_bytes(self) -> int:
        return self.pages * self.parts * self.block_bytes

    @cached_property
    def rank_bytes(self) -> int:
        """Bytes of all layers of one rank."""
        return self.layers * self.layer_bytes

    @cached_property
    def storage(self) -> np.dtype[Any]:
        """The numpy type that holds one element, its bits where numpy does not know the type."""
        return np.dtype(_STORAGE[self.dtype])

    def pages_of(self, tokens: int) -> int:
        """Number of pages that so many tokens take."""
        return -(-tokens // self.page_tokens)

    def layer_view(self, memory: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """A layer's memory as an array of shape (parts, pages, rank_heads, page_tokens, head_dim), whatever its order.

        memory: contiguous, layer_bytes long. The result shares it and has the dtype `storage`.
        """
        flat = memory.reshape(-1).view(np.uint8)
        if flat.nbytes != self.layer_bytes:
            raise UsageError(f"memory has {flat.nbytes} bytes, a layer has {self.layer_bytes}")
        outer = (self.parts, self.pages) if self.separate_kv else (self.pages, self.parts)
        inner = (self.rank_heads, self.page_tokens) if self.order == "HND" else (self.page_tokens, self.rank_heads)
        view = flat.view(self.storage).reshape(*outer, *inner, self.head_dim)
        if not self.separate_kv:
            view = view.swapaxes(0, 1)
        return view if self.order == "HND" else view.swapaxes(2, 3)

    # ---- telling others

    def to_wire(self) -> dict[str, Any]:
        """As ints, strings and a bool, for a message; the inverse of from_wire."""
        return asdict(self)

    @classmethod
    def from_wire(cls, wire: object) -> KvLayout:
        """Raises UsageError for anything that is no layout; no field may be missing or unknown."""
        names = {field.name for field in fields(cls)}
        given = dict(wire) if isinstance(wire, Mapping) else None
        if given is None or set(given) != names:
            raise UsageError(f"a layout has the fields {', '.join(sorted(names))}, not {wire!r:.200}")
        return cls(**given)

    def describe(self) -> str:
        """The layout in one line, for people."""
        where = "K and V apart" if self.separate_kv else "K and V in one page"
        return (
            f"{self.layers} layers, {self.kind} with {self.kv_heads} x {self.head_dim} {self.dtype}, "
            f"{self.pages} pages of {self.page_tokens} tokens, {self.order}"
            f"{'' if self.parts == 1 else ', ' + where}, TP {self.tp}"
        )


def dtype_name(dtype: object) -> str:
    """The name of a dtype that KV may have, from itself or a numpy or torch dtype. UsageError for any other."""
    name = dtype.name if isinstance(dtype, np.dtype) else getattr(dtype, "__name__", None) or str(dtype)
    name = name.removeprefix("torch.")
    if name not in _STORAGE:
        raise UsageError(f"dtype={dtype!r} must be one of {', '.join(_STORAGE)}")
    return name


def differences(ours: KvLayout, theirs: KvLayout, sides: tuple[str, str] = ("ours", "theirs")) -> list[str]:
    """What prevents two instances from exchanging KV: one line for each field, with both values. Empty: nothing.

    sides: what the text calls the two. Pages, page_tokens (except for PACKED), order, separate_kv and tp may differ,
    and MHA is GQA with as many heads.
    """
    names = ["layers", "kv_heads", "head_dim", "dtype"]
    packed = "PACKED" in (ours.kind, theirs.kind)
    if not {ours.kind, theirs.kind}.isdisjoint(_LIKE_NO_OTHER) or ours.parts != theirs.parts:
        names.insert(0, "kind")
    if packed:
        names.append("page_tokens")
    return [
        f"{name}: {sides[0]} {getattr(ours, name)}, {sides[1]} {getattr(theirs, name)}"
        for name in names
        if getattr(ours, name) != getattr(theirs, name)
    ]


def compatible(ours: KvLayout, theirs: KvLayout, sides: tuple[str, str] = ("ours", "theirs")) -> None:
    """Raises LayoutMismatch, which says what differs and shows both layouts, unless the two can exchange KV."""
    if differs := differences(ours, theirs, sides):
        raise LayoutMismatch(
            f"layouts do not match; {'; '.join(differs)}. {sides[0]} = [{ours.describe()}], {sides[1]} = "
            f"[{theirs.describe()}]"
        )


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UsageError(f"{name}={value!r} must be one of {', '.join(choices)}")

"""Translates SGLang's KVArgs for crossrail.kv: layout, memory, the form that both sides must agree on, and rows of aux.

A KVArgs is read, never kept. KV is on the host or on an NVIDIA GPU, aux on the host. An MHA pool has buffers for K of
each layer, then for V of each; an MLA pool one a layer. Each is [pages, page_size, heads, ...] without gaps: "NHD",
and a layer of kind PLANES, or MLA.
"""

from __future__ import annotations

import ctypes
import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from crossrail._buffers import memory_of
from crossrail.errors import UsageError
from crossrail.integrations.sglang.messages import AUX_BYTES_MAX, AUX_ROWS_MAX
from crossrail.kv import KvLayout, LayoutMismatch


class Model(NamedTuple):
    """What SGLang serves. digest: of its config. dtype: of its KV, unless --kv-cache-dtype says otherwise.

    scales: a digest of the file of the KV cache's scales; empty: the weights have them, or there are none. scheme: of
    those that the weights have, as the config says; empty: they have none.
    """

    digest: str
    dtype: str
    scales: str = ""
    scheme: str = ""


@dataclass(frozen=True)
class Pool:
    """The memory of one rank. buffers: (address, nbytes) of each layer; item_bytes: of a page in each.

    heads: of the whole model; 0: SGLang's decoder does not say, the prefiller's layout will (layout_beside).
    """

    buffers: list[tuple[int, int]]
    item_bytes: int
    page_tokens: int
    is_mla: bool
    tp: int
    heads: int
    form: dict[str, str]

    @property
    def pages(self) -> int:
        return self.buffers[0][1] // self.item_bytes

    def layout(self) -> KvLayout:
        """Raises UsageError when the numbers do not fit each other."""
        token_bytes, rest = divmod(self.item_bytes, self.page_tokens)
        rank_heads = max(self.heads // self.tp, 1)
        row_bytes, more = divmod(token_bytes, rank_heads)
        if rest or more:
            raise UsageError(
                f"kv_item_lens={self.item_bytes} do not split into page_size={self.page_tokens} tokens of "
                f"{rank_heads} heads"
            )
        return self._layout(row_bytes)

    def layout_beside(self, theirs: KvLayout) -> KvLayout:
        """Ours, with heads as the prefiller has them. Raises LayoutMismatch when they cannot be cut like that."""
        if theirs.page_tokens != self.page_tokens:
            raise LayoutMismatch(
                f"--page-size is {self.page_tokens} at this decoder and {theirs.page_tokens} at its prefiller, must be "
                "the same"
            )
        mine = replace(self, heads=theirs.kv_heads) if not self.is_mla else self
        layout = mine._layout(theirs.row_bytes)
        if layout.block_bytes != self.item_bytes:
            raise LayoutMismatch(
                f"a page of ours has {self.item_bytes} bytes; with TP {self.tp}, of a prefiller with "
                f"{theirs.describe()}, it should have {layout.block_bytes}: use the same model and KV cache dtype on "
                "both sides"
            )
        return layout

    def _layout(self, row_bytes: int) -> KvLayout:
        return KvLayout(
            layers=len(self.buffers),
            pages=self.pages,
            page_tokens=self.page_tokens,
            kv_heads=1 if self.is_mla else self.heads,
            head_dim=row_bytes,
            dtype="uint8",
            kind="MLA" if self.is_mla else "PLANES",
            order="NHD",
            tp=self.tp,
        )


def read_pool(args: Any, *, is_mla: bool, tp: int, model: Model) -> Pool:
    """Reads a KVArgs. Raises UsageError, which names the field, for what cannot be transferred."""
    if states := [str(getattr(state, "value", state)) for state in getattr(args, "state_types", None) or []]:
        raise UsageError(
            f"state_types={', '.join(states)}: crossrail moves plain MHA, GQA and MLA caches, no other state"
        )
    dtype = str(getattr(args, "kv_cache_dtype_str", None))
    if "fp4" in dtype:
        raise UsageError(
            f"--kv-cache-dtype={dtype}: SGLang keeps the scales of such a cache beside it, and shows them to no backend"
        )
    items, sizes, addresses = list(args.kv_item_lens), list(args.kv_data_lens), list(args.kv_data_ptrs)
    if not addresses or not len(items) == len(sizes) == len(addresses):
        raise UsageError(
            f"{len(addresses)} kv_data_ptrs, {len(sizes)} kv_data_lens, {len(items)} kv_item_lens: no KV cache"
        )
    if len(set(items)) != 1 or len({size // items[0] for size in sizes}) != 1:
        raise UsageError(
            f"kv_item_lens={sorted(set(items))}: layers, and K and V, must have pages of one size and number"
        )
    heads = 0 if is_mla else int(getattr(args, "total_kv_head_num", 0) or 0)
    if heads and max(heads // tp, 1) != args.kv_head_num:
        raise UsageError(
            f"kv_head_num={args.kv_head_num} of {heads} heads with TP {tp}, should be {max(heads // tp, 1)}"
        )
    pages = sizes[0] // items[0]
    buffers = [(address, pages * items[0]) for address in addresses]
    is_on_gpu("kv_data_ptrs", buffers)
    form = {
        "backend": "sglang, MLA" if is_mla else "sglang, MHA",
        "model": model.digest,
        "cache dtype": _cache_dtype(dtype, model),
        "cache scales": _scales(dtype, model),
        "cache layout": str(getattr(args, "kv_layout", None)),
        "layer ids": hashlib.sha256(repr(list(getattr(args, "kv_layer_ids", []))).encode()).hexdigest()[:16],
        "draft buffers": str(getattr(args, "num_draft_entries", 0)),
        "aux row bytes": ",".join(map(str, args.aux_item_lens)),
    }
    return Pool(buffers, items[0], args.page_size, is_mla, tp, heads, form)


def _cache_dtype(said: str, model: Model) -> str:
    """What SGLang's --kv-cache-dtype means: "auto" is one thing with --dtype float16, another with bfloat16."""
    return {"auto": model.dtype, "bf16": "bfloat16"}.get(said, said)


def _scales(said: str, model: Model) -> str:
    """What the numbers in the cache are multiples of. Only float8 has any: caches of the model's own dtype have not."""
    if model.scales:
        return model.scales
    return f"of the weights, {model.scheme or 'which have none'}" if "fp8" in said else "none"


class AuxRows:
    """SGLang's metadata buffers, one row of each per request. Any thread; rows belong to their request's owner."""

    def __init__(self, args: Any) -> None:
        self._places = list(zip(args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens, strict=True))
        self.sizes = [item for _, _, item in self._places]
        if len(self.sizes) > AUX_ROWS_MAX or sum(self.sizes) > AUX_BYTES_MAX:
            raise UsageError(
                f"aux_item_lens: {len(self.sizes)} rows of {sum(self.sizes)} bytes, at most {AUX_ROWS_MAX} of "
                f"{AUX_BYTES_MAX} in all go with a request"
            )
        if is_on_gpu("aux_data_ptrs", [(address, nbytes) for address, nbytes, _ in self._places]):
            raise UsageError(
                "aux_data_ptrs are memory of a GPU: crossrail moves these rows by the CPU, unset "
                "SGLANG_MOONCAKE_CUSTOM_MEM_POOL"
            )

    def read(self, index: int) -> list[bytes]:
        """A copy of row `index` of each."""
        return [ctypes.string_at(self._place(place, index), place[2]) for place in self._places]

    def write(self, index: int, rows: list[bytes]) -> None:
        """Raises UsageError for rows of other sizes, having written nothing."""
        if [len(row) for row in rows] != self.sizes:
            raise UsageError(f"aux rows of {[len(row) for row in rows]} bytes came, ours have {self.sizes}")
        for place, row in zip(self._places, rows, strict=True):
            ctypes.memmove(self._place(place, index), row, len(row))

    def _place(self, place: tuple[int, int, int], index: int) -> int:
        address, nbytes, item = place
        if not 0 <= index < nbytes // item:
            raise UsageError(f"aux_index={index} must be in 0..{nbytes // item - 1}")
        return int(address + index * item)


def is_gpu_address(address: int) -> bool:
    """Whether NVIDIA's driver considers it a GPU address."""
    return address > 0 and memory_of((address, 1)).is_cuda


def is_on_gpu(name: str, buffers: list[tuple[int, int]]) -> bool:
    """Whether these are memory of a GPU, and not of the host. UsageError for any other, and for some of each."""
    on_gpu = [is_gpu_address(address) for address, _ in buffers]
    if all(on_gpu) and buffers:
        return True
    if any(on_gpu):
        odd = on_gpu.index(not on_gpu[0])
        raise UsageError(
            f"{name}[{odd}]={buffers[odd][0]:#x} and {name}[0] are not both memory of a GPU: all must be, or none"
        )
    for i in _outside_the_host(buffers):
        raise UsageError(
            f"{name}[{i}]={buffers[i][0]:#x} is not memory of the host, nor of a GPU that NVIDIA's driver knows: "
            "crossrail moves no other"
        )
    return False


def _outside_the_host(buffers: list[tuple[int, int]]) -> list[int]:
    """The buffers that this process cannot read and write, by number."""
    ranges: list[tuple[int, int]] = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        where, access = line.split(maxsplit=2)[:2]
        begin, end = (int(part, 16) for part in where.split("-"))
        if not access.startswith("rw"):
            continue
        if ranges and ranges[-1][1] == begin:
            ranges[-1] = (ranges[-1][0], end)
        else:
            ranges.append((begin, end))
    return [
        i
        for i, (address, nbytes) in enumerate(buffers)
        if not any(begin <= address and address + nbytes <= end for begin, end in ranges)
    ]


def wait_for_kernels(device: str) -> None:
    """Returns when all that this process has launched on that GPU so far has ended. Blocks. RuntimeError: it failed."""
    import torch

    torch.cuda.synchronize(device)

"""A transformers cache whose keys and values are in a node's pages, where NICs read and write them too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from crossrail._extras import needs
from crossrail.kv import model as kv
from crossrail.kv.transfer.layout import KvLayout

with needs(__name__, "'crossrail[transformers]'"):
    import torch
    from transformers.cache_utils import Cache, CacheLayerMixin


@dataclass(frozen=True)
class Row:
    """What a forward pass computes for one request: `count` tokens after `start` others whose KV is already there.

    pages: int64 tensor; token t is in pages[t // page_tokens].
    """

    pages: torch.Tensor
    start: int
    count: int
    page_tokens: int

    @property
    def end(self) -> int:
        return self.start + self.count

    @cached_property
    def filled(self) -> torch.Tensor:
        """The pages of tokens 0..end-1."""
        return self.pages[: -(-self.end // self.page_tokens)]

    @cached_property
    def places(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Page and slot of each new token."""
        positions = torch.arange(self.start, self.end)
        return self.pages[positions // self.page_tokens], positions % self.page_tokens


class Shard(NamedTuple):
    """One rank's keys, or values: shape (pages, heads, page_tokens, dim), and which of the model's heads they are."""

    memory: torch.Tensor
    heads: slice


class PagedLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is not typed
    """One layer for one forward pass over `rows`, which all have the same number of new tokens.

    Shapes are transformers' own, (rows, heads, tokens, dim). Rows shorter than the longest begin with zeros, which the
    attention mask has to exclude. This object stores nothing: everything is in the pages. replicas: neighbouring shards
    that hold the same heads; all are written, the first is read.
    """

    is_sliding = False  # all tokens are kept; models with a sliding window mask the older ones themselves

    def __init__(self, rows: Sequence[Row], keys: Sequence[Shard], values: Sequence[Shard], replicas: int) -> None:
        super().__init__()
        self._rows = rows
        self._keys = keys
        self._values = values
        self._replicas = replicas
        self._longest = max(row.end for row in rows)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores the keys and values of the new tokens, and returns those of all tokens."""
        return self._exchange(self._keys, key_states), self._exchange(self._values, value_states)

    def _exchange(self, shards: Sequence[Shard], states: torch.Tensor) -> torch.Tensor:
        for row, new in zip(self._rows, states, strict=True):
            page, slot = row.places
            for shard in shards:
                shard.memory[page, :, slot] = new[shard.heads].transpose(0, 1)
        if len(self._rows) == 1:
            return self._read(shards, self._rows[0]).unsqueeze(0)
        held = states.new_zeros(len(self._rows), states.shape[1], self._longest, states.shape[3])
        for row, place in zip(self._rows, held, strict=True):
            place[:, self._longest - row.end :] = self._read(shards, row)
        return held

    def _read(self, shards: Sequence[Shard], row: Row) -> torch.Tensor:
        """The KV of tokens 0..end-1; shape (heads, tokens, dim)."""
        parts = [
            shard.memory.transpose(0, 1)[:, row.filled].flatten(1, 2)[:, : row.end]
            for shard in shards[:: self._replicas]
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._longest, 0

    def get_seq_length(self) -> int:
        return self._longest - self._rows[0].count

    def get_max_length(self) -> int:
        return -1

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to initialize: the pages exist before the first token."""


def paged_cache(cache: kv.Cache, layout: KvLayout, key_dim: int, rows: Sequence[Row]) -> Cache:
    """A cache for one forward pass: what is written goes into the memory of `cache`, without a copy.

    key_dim: for MLA, how many elements of a token's vector transformers calls its key; the others are its value.
    """
    dtype = getattr(torch, layout.dtype)
    layers = []
    for layer in range(layout.layers):
        keys, values = [], []
        for rank, of_rank in enumerate(cache):
            memory = torch.from_numpy(of_rank[layer]).view(dtype)
            heads = slice(layout.heads_of(rank).start, layout.heads_of(rank).stop)
            if layout.kind == "MLA":
                keys.append(Shard(memory[0, ..., :key_dim], heads))
                values.append(Shard(memory[0, ..., key_dim:], heads))
            else:
                keys.append(Shard(memory[0], heads))
                values.append(Shard(memory[1], heads))
        layers.append(PagedLayer(rows, keys, values, layout.replicas))
    return Cache(layers=layers)

"""The KV memory of one rank, registered with its engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy.typing as npt

from crossrail import Engine, Region, RegionDescriptor
from crossrail._buffers import GpuBytes
from crossrail._options import check_kind, check_whole
from crossrail.errors import UsageError
from crossrail.kv.transfer.layout import KvLayout


class RankMemory:
    """Where one rank keeps its KV: one region with all layers, or one region per layer. Immutable; any thread.

    It is in host or GPU memory; the two sides of a transfer may differ in this. No engine waits for a GPU's kernels:
    what they write must be complete before it is counted (KvSender), and kernels that use pages must have ended before
    these are given to a request (KvReceiver).
    Owner of the regions: whoever made them. They must stay open while requests run.
    """

    def __init__(self, engine: Engine, layout: KvLayout, regions: Sequence[Region]) -> None:
        _check_owner(engine, layout)
        self.engine = engine
        self.layout = layout
        self.regions = tuple(regions)
        _check_count(len(self.regions), "regions", layout)
        nbytes = layout.rank_bytes if len(self.regions) == 1 else layout.layer_bytes
        for i, region in enumerate(self.regions):
            if region.nbytes != nbytes:
                raise UsageError(
                    f"region {i} has {region.nbytes} bytes, the layout has {nbytes} a region: {layout.describe()}"
                )

    def __repr__(self) -> str:
        return (
            f"<RankMemory of {self.layout.rank_bytes} bytes in {len(self.regions)} of the regions of {self.engine!r}>"
        )

    @classmethod
    def alloc(cls, engine: Engine, layout: KvLayout) -> RankMemory:
        """Zeroed memory allocated by the engine: the fast source and target between processes of one host."""
        _check_owner(engine, layout)
        return cls(engine, layout, [engine.alloc(layout.rank_bytes)])

    @classmethod
    def register(cls, engine: Engine, layout: KvLayout, buffers: Sequence[Any]) -> RankMemory:
        """Existing memory: one buffer with all layers, or one per layer, each as Engine.register takes it."""
        _check_owner(engine, layout)
        _check_count(len(buffers), "buffers", layout)  # an array alone would be registered row by row
        return cls(engine, layout, [engine.register(buffer) for buffer in buffers])

    def registered_again(self) -> RankMemory:
        """The same memory in new regions, which the caller owns: peers that have these descriptors do not
        have those.
        """
        # Either object keeps the region alive, and thereby its buffer.
        buffers = [
            region.view() if region.device == "cpu" else GpuBytes(region.base, region.nbytes, region)
            for region in self.regions
        ]
        return RankMemory(self.engine, self.layout, [self.engine.register(buffer) for buffer in buffers])

    def place(self, layer: int) -> tuple[Region, int]:
        """The region that contains a layer, and the offset of its first byte. UsageError if there is no such layer."""
        if not 0 <= layer < self.layout.layers:
            raise UsageError(f"layer={layer} must be 0 to {self.layout.layers - 1}")
        if len(self.regions) == 1:
            return self.regions[0], layer * self.layout.layer_bytes
        return self.regions[layer], 0

    @property
    def descriptors(self) -> tuple[RegionDescriptor, ...]:
        """The descriptors of its regions, in order, for those who will write there."""
        return tuple(region.descriptor for region in self.regions)

    def layer(self, layer: int) -> npt.NDArray[Any]:
        """One layer's KV as an array of shape (parts, pages, rank_heads, page_tokens, head_dim) that shares the memory.

        Its dtype is layout.storage. It keeps the memory alive. Peers may write to it: the lease of a page says until
        when. Only for host memory: raises UsageError for GPU memory, which the CPU cannot read.
        """
        region, offset = self.place(layer)
        if region.device != "cpu":
            raise UsageError(
                f"layer {layer} is on {region.device}, where the CPU cannot look: use the tensor that was registered"
            )
        return self.layout.layer_view(region.array()[offset : offset + self.layout.layer_bytes])


def to_ranks(layout: KvLayout, ranks: Sequence[RankMemory] | Mapping[int, RankMemory]) -> dict[int, RankMemory]:
    """By rank, from a mapping or a sequence of all ranks. UsageError unless each is memory of a rank of the layout."""
    if not isinstance(ranks, Mapping):
        check_kind(ranks, "ranks", Sequence, "a list of RankMemory, or a mapping from rank to RankMemory")
        if len(ranks) != layout.tp:
            raise UsageError(f"{len(ranks)} ranks are given, the layout has {layout.tp}")
        ranks = dict(enumerate(ranks))
    for rank, memory in ranks.items():
        check_whole(rank=rank)
        check_kind(memory, f"rank {rank}", RankMemory, "a RankMemory")
    if not ranks or not all(0 <= rank < layout.tp for rank in ranks):
        raise UsageError(f"ranks {sorted(ranks)} must be some of 0..{layout.tp - 1}")
    for rank, memory in ranks.items():
        if memory.layout != layout:
            raise UsageError(f"rank {rank} has another layout: {memory.layout.describe()}")
    return dict(ranks)


def _check_owner(engine: object, layout: object) -> None:
    check_kind(engine, "engine", Engine, "an Engine")
    check_kind(layout, "layout", KvLayout, "a KvLayout")


def _check_count(count: int, what: str, layout: KvLayout) -> None:
    if count not in (1, layout.layers):
        raise UsageError(f"{count} {what} for {layout.layers} layers: there must be 1 or one a layer")

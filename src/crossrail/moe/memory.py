"""What a rank of an AllToAll will allocate, known before the AllToAll is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from crossrail._options import check_whole
from crossrail.errors import UsageError
from crossrail.moe.config import Config, name_of_dtype
from crossrail.moe.links.board import BoardLayout, output_bytes
from crossrail.moe.links.far_memory import FarMemory
from crossrail.moe.meeting import make_layout
from crossrail.moe.peers import with_room_for_all

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class MemoryBounds:
    """The memory of one rank, in bytes, for both of the rounds that may be open.

    board_bytes: what it shows to ranks that share memory with it; on a GPU without a board, also its rows.
    output_bytes: what dispatch returns. far_bytes: rows, results and routes of ranks that share no memory with it, 0 if
    all do; RDMA NICs pin these. output_rows: capacity of one dispatch's output, in rows.
    """

    board_bytes: int
    output_bytes: int
    far_bytes: int
    output_rows: int

    @property
    def total_bytes(self) -> int:
        """The sum of all three. Less is resident until rounds have used it, except for what NICs pin."""
        return self.board_bytes + self.output_bytes + self.far_bytes


def memory_bounds(
    *,
    world: int,
    experts: int,
    experts_per_rank: Sequence[int] | None = None,
    hidden: int,
    top_k: int,
    max_tokens: int,
    dtype: torch.dtype | str = "float8_e4m3fn",
    scale_block: int | None = 128,
    out_dtype: torch.dtype | str = "bfloat16",
    private_tokens: int | None = None,
    padding: int = 1,
    layout: str = "grouped",
    node_size: int | Sequence[int] | None = None,
    dp_size: int = 1,
    capacity_factor: float | None = None,
    on_lost: str = "raise",
    node_sums: bool = False,
    rank: int | None = None,
) -> MemoryBounds:
    """The memory that AllToAll allocates. The arguments are those of AllToAll, and two more.

    rank: the rank, since ranks may have different numbers of experts; None: the one with most. world: number of ranks.
    node_size: how many consecutive ranks share memory, or how many on each node; None: all. The arithmetic is in
    docs/moe-inside.md, "Memory"; buffers have room for any routing, or for what capacity_factor allows. Allocates
    nothing; any thread. UsageError for arguments that AllToAll refuses.
    """
    config = Config(
        world=world, experts=experts, experts_per_rank=experts_per_rank, hidden=hidden, top_k=top_k,
        max_tokens=max_tokens, dtype=name_of_dtype(dtype), scale_block=scale_block,
        out_dtype=name_of_dtype(out_dtype),
        private_tokens=private_tokens, padding=padding, layout=layout, node_size=node_size, dp_size=dp_size,
        capacity_factor=capacity_factor, on_lost=on_lost, node_sums=node_sums,
    )  # fmt: skip
    nodes = config.nodes_given or (0,) * world
    far_bytes = 0
    if len(set(nodes)) > 1:
        told = with_room_for_all(config) if on_lost == "mask" else config
        memory = FarMemory.of(told, make_layout(told, nodes))
        far_bytes = memory.rows.nbytes + memory.routes.nbytes
    if rank is None:
        rank = config.split.counts.index(config.experts_per_rank_max)
    check_whole(rank=rank)
    if not 0 <= rank < world:
        raise UsageError(f"rank is {rank}, must be one of {world}")
    board = BoardLayout(config, rank)
    return MemoryBounds(board.nbytes, output_bytes(config, rank), far_bytes, config.output_rows[rank])

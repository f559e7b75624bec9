"""The text of GraphAllToAll.explain."""

from __future__ import annotations

from collections.abc import Sequence

from crossrail.moe.config import Config
from crossrail.moe.graph.posting import PostingThread
from crossrail.moe.graph.steps import Steps
from crossrail.moe.links.far import Far


def explained(
    config: Config, far: Far, steps: Steps, thread: PostingThread, rows: str, is_gpu: bool, peer_access: bool
) -> str:
    """rows: where they are."""
    travels, output = far.memory.rows.nbytes, steps.room * (config.x_row_bytes + config.y_bytes)
    own, memory = steps.own, steps.memory
    return (
        f"rank {own.rank} of {config.world}: {own.end - own.first} of {config.experts} experts, "
        f"room for {steps.room} rows\n"
        f"  rows: in {rows}\n"
        f"  kernels: {steps.kernels.name}, {'launched on the current stream' if is_gpu else 'in each call'}\n"
        f"  board of rounds {steps.board.nbytes / 1e6:.1f} MB{' of pinned memory' * is_gpu}, rows that "
        f"travel {travels / 1e6:.1f} MB, those that stay {memory.own_nbytes / 1e6:.1f} MB\n"
        f"{_words(thread) if is_gpu else ''}"
        f"  each dispatch makes tensors, and its experts as many results: {output / 1e6:.1f} MB"
        f"{_ways(far, peer_access)}"
    )


def _words(thread: PostingThread) -> str:
    why = thread.proxy.why_pinned
    where = f"pinned memory, {why}" if why else "memory of the GPU, by GDRCopy"
    return f"  words that kernels wait for: in {where}\n"


def _ways(far: Far, peer_access: bool) -> str:
    """A line for each way in which rows go to other ranks, or come from there."""
    reached = sorted(far.reached)
    lines = [f"ranks {_listed(reached)}: kernels write to their memory"] if reached else []
    ranks_by_reason: dict[str, list[int]] = {}
    for rank, reason in sorted(far.unreached.items()):
        ranks_by_reason.setdefault(reason, []).append(rank)
    lines += [f"ranks {_listed(ranks)}: by the engine, {reason}" for reason, ranks in ranks_by_reason.items()]
    if not peer_access and far.ranks:
        lines.append("other ranks: by the engine, peer_access is False")
    if far.heard:
        lines.append(f"ranks {_listed(far.heard)}: their kernels write to our memory")
    return "".join(f"\n  {line}" for line in lines)


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(str(rank) for rank in ranks)

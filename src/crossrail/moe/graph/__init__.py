"""Dispatch and combine whose halves only launch kernels, so that they can be captured in CUDA graphs."""

from crossrail._extras import needs

with needs(__name__, "'crossrail[torch]'"):
    from crossrail.moe.graph.all_to_all import GraphAllToAll
    from crossrail.moe.graph.rounds import GraphDispatched, GraphRound

__all__ = ["GraphAllToAll", "GraphDispatched", "GraphRound"]

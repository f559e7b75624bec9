"""Dispatch and combine whose halves only launch kernels, so that CUDA graphs can have them."""

from crossrail.moe.graph.all_to_all import GraphAllToAll
from crossrail.moe.graph.rounds import GraphDispatched, GraphRound

__all__ = ["GraphAllToAll", "GraphDispatched", "GraphRound"]

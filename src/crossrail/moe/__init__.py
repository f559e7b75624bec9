"""Dispatch of tokens to experts and combine of their results, over any transport."""

from typing import TYPE_CHECKING

from crossrail._lazy import lazily, listed

if TYPE_CHECKING:
    from crossrail.moe.all_to_all import AllToAll
    from crossrail.moe.errors import CapacityExceeded, MaskedOut, NoMajority, PeerFailed
    from crossrail.moe.group import EngineGroup, Group, TorchGroup
    from crossrail.moe.memory import MemoryBounds, memory_bounds
    from crossrail.moe.metrics import RoundCollector
    from crossrail.moe.rounds import Dispatched, Round

__all__ = [
    "AllToAll",
    "CapacityExceeded",
    "Dispatched",
    "EngineGroup",
    "Group",
    "MaskedOut",
    "MemoryBounds",
    "NoMajority",
    "PeerFailed",
    "Round",
    "RoundCollector",
    "TorchGroup",
    "memory_bounds",
]

# `crossrail moe --help` should not have to import numpy. Hidden from type checkers, as in crossrail itself.
if not TYPE_CHECKING:
    __getattr__ = lazily(
        __name__,
        {
            "AllToAll": "all_to_all",
            "CapacityExceeded": "errors",
            "Dispatched": "rounds",
            "EngineGroup": "group",
            "Group": "group",
            "MaskedOut": "errors",
            "MemoryBounds": "memory",
            "NoMajority": "errors",
            "PeerFailed": "errors",
            "Round": "rounds",
            "RoundCollector": "metrics",
            "TorchGroup": "group",
            "memory_bounds": "memory",
        },
        modules=["all_to_all", "errors", "group", "memory", "rounds"],
    )


__dir__ = listed(__name__, __all__, ["graph"])

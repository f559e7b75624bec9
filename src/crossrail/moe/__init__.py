"""Dispatch of tokens to experts and combine of what they return, over whatever rail there is."""

from crossrail.moe.all_to_all import AllToAll
from crossrail.moe.errors import CapacityExceeded, MaskedOut, NoMajority
from crossrail.moe.group import EngineGroup, Group, TorchGroup
from crossrail.moe.rounds import Dispatched, Round

__all__ = [
    "AllToAll",
    "CapacityExceeded",
    "Dispatched",
    "EngineGroup",
    "Group",
    "MaskedOut",
    "NoMajority",
    "Round",
    "TorchGroup",
]

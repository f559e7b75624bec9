"""Dispatch of tokens to experts and combine of what they return, over whatever rail there is."""

from typing import TYPE_CHECKING

from crossrail._lazy import lazily
from crossrail.moe.all_to_all import AllToAll
from crossrail.moe.errors import CapacityExceeded, MaskedOut, NoMajority
from crossrail.moe.group import EngineGroup, Group, TorchGroup
from crossrail.moe.rounds import Dispatched, Round

if TYPE_CHECKING:
    from crossrail.moe.metrics import RoundCollector

__all__ = [
    "AllToAll",
    "CapacityExceeded",
    "Dispatched",
    "EngineGroup",
    "Group",
    "MaskedOut",
    "NoMajority",
    "Round",
    "RoundCollector",
    "TorchGroup",
]

__getattr__ = lazily(__name__, {"RoundCollector": "metrics"})  # needs prometheus_client

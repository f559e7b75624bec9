"""Moves tensors between the processes of LLM systems, point to point, over whatever NIC is there.

>>> import crossrail as xr
>>> engine = xr.Engine("decoder-0")
"""

from crossrail import _libfabric
from crossrail._core import Address, Message, PeerGroup, RegionDescriptor, Transfer, __version__
from crossrail.counters import CountTicket, ImmCounter
from crossrail.engine import Engine
from crossrail.errors import (
    ChecksumMismatch,
    CrossrailError,
    EngineClosed,
    MessageTooLong,
    PeerLost,
    RemoteAccessError,
    RemoteRegionClosed,
    TransferCancelled,
    TransferError,
    TransportError,
    UsageError,
    WaitTimeout,
)
from crossrail.messages import ReceivePool
from crossrail.peers import EngineEvent, Explanation, Heartbeat, PathExplanation
from crossrail.rdma import RdmaOptions
from crossrail.regions import Region
from crossrail.watchers import Watcher

_libfabric.announce()

__all__ = [
    "Address",
    "ChecksumMismatch",
    "CountTicket",
    "CrossrailError",
    "Engine",
    "EngineClosed",
    "EngineEvent",
    "Explanation",
    "Heartbeat",
    "ImmCounter",
    "Message",
    "MessageTooLong",
    "PathExplanation",
    "PeerGroup",
    "PeerLost",
    "RdmaOptions",
    "ReceivePool",
    "Region",
    "RegionDescriptor",
    "RemoteAccessError",
    "RemoteRegionClosed",
    "Transfer",
    "TransferCancelled",
    "TransferError",
    "TransportError",
    "UsageError",
    "WaitTimeout",
    "Watcher",
    "__version__",
]

"""Moves tensors between the processes of LLM systems, point to point, over whatever NIC is there.

>>> import crossrail as xr
>>> engine = xr.Engine("decoder-0")
"""

from crossrail import _interrupt, _libfabric
from crossrail._core import Address, GpuMapping, Message, PeerGroup, RegionDescriptor, Transfer, __version__
from crossrail.counters import CountTicket, ImmCounter
from crossrail.engine import Engine
from crossrail.errors import (
    ChecksumMismatch,
    CrossrailError,
    EngineClosed,
    LateWrite,
    MessageTooLong,
    PeerLost,
    RemoteAccessError,
    RemoteRegionClosed,
    RemoteRegionRevoked,
    SimulationIdle,
    TransferCancelled,
    TransferError,
    TransportError,
    UsageError,
    WaitTimeout,
)
from crossrail.flight import dump_on_signal
from crossrail.messages import ReceivePool
from crossrail.peers import EngineEvent, Explanation, Heartbeat, PathExplanation
from crossrail.poison import Poisoned
from crossrail.rdma import RdmaOptions
from crossrail.regions import Region
from crossrail.tls import TlsConfig
from crossrail.watchers import Watcher

_libfabric.announce()
_interrupt.over()

__all__ = [
    "Address",
    "ChecksumMismatch",
    "CountTicket",
    "CrossrailError",
    "Engine",
    "EngineClosed",
    "EngineEvent",
    "Explanation",
    "GpuMapping",
    "Heartbeat",
    "ImmCounter",
    "LateWrite",
    "Message",
    "MessageTooLong",
    "PathExplanation",
    "PeerGroup",
    "PeerLost",
    "Poisoned",
    "RdmaOptions",
    "ReceivePool",
    "Region",
    "RegionDescriptor",
    "RemoteAccessError",
    "RemoteRegionClosed",
    "RemoteRegionRevoked",
    "SimulationIdle",
    "TlsConfig",
    "Transfer",
    "TransferCancelled",
    "TransferError",
    "TransportError",
    "UsageError",
    "WaitTimeout",
    "Watcher",
    "__version__",
    "dump_on_signal",
]

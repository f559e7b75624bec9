"""Moves tensors between the processes of LLM systems, point to point, over whatever NIC is there.

>>> import crossrail as xr
>>> engine = xr.Engine("decoder-0")

What is here; all else that help() lists below under this package is reached through these, or private:

    Engine                            takes part in transfers: one for each process or device
    Region, RegionDescriptor          memory that it knows; where that is, for peers
    Transfer                          what a submit returns: done, failed or cancelled, once
    ImmCounter, CountTicket, CountFlag    counts what arrives
    Message, ReceivePool              messages of peers
    Watcher                           a word in memory, of which callbacks and writes are told
    Address, PeerGroup, Explanation, PathExplanation, Heartbeat, EngineEvent    peers
    Poisoned, GpuMapping              memory that is watched for late writes; a peer's, for kernels
    RdmaOptions, TlsConfig            options of an Engine
    dump_on_signal                    recordings of all engines, on a signal
    CrossrailError                    the root of all errors:
        UsageError, EngineClosed, TransportError, WaitTimeout, LateWrite, SimulationIdle
        TransferError: PeerLost, TransferCancelled, RemoteRegionClosed, RemoteRegionRevoked, RemoteAccessError,
            ChecksumMismatch, MessageTooLong

    crossrail.kv                      KV caches from prefill to decode
    crossrail.weights                 weights from trainers to inference
    crossrail.moe                     dispatch and combine of experts
    crossrail.sim, crossrail.testing  the simulator, and its plugin of pytest
    crossrail.observe                 metrics
    crossrail.topology                GPUs, NICs and which belong together
    crossrail.integrations            vLLM, SGLang, verl, checkpoint-engine, transformers, DeepEP
"""

from typing import TYPE_CHECKING

from crossrail import _ending, _interrupt  # noqa: F401 - _ending is registered by it
from crossrail._lazy import lazily, listed

if TYPE_CHECKING:
    from crossrail._core import Address, GpuMapping, Message, PeerGroup, RegionDescriptor, Transfer, __version__
    from crossrail.counters import CountFlag, CountTicket, ImmCounter
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

__all__ = [
    "Address",
    "ChecksumMismatch",
    "CountFlag",
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

# Who asks the command line for help need not wait for numpy and the native half. Hidden from type checkers, for which a
# __getattr__ would make every misspelt name one that is there.
if not TYPE_CHECKING:
    __getattr__ = lazily(
        __name__,
        {
            "Address": "_core",
            "ChecksumMismatch": "errors",
            "CountFlag": "counters",
            "CountTicket": "counters",
            "CrossrailError": "errors",
            "Engine": "engine",
            "EngineClosed": "errors",
            "EngineEvent": "peers",
            "Explanation": "peers",
            "GpuMapping": "_core",
            "Heartbeat": "peers",
            "ImmCounter": "counters",
            "LateWrite": "errors",
            "Message": "_core",
            "MessageTooLong": "errors",
            "PathExplanation": "peers",
            "PeerGroup": "_core",
            "PeerLost": "errors",
            "Poisoned": "poison",
            "RdmaOptions": "rdma",
            "ReceivePool": "messages",
            "Region": "regions",
            "RegionDescriptor": "_core",
            "RemoteAccessError": "errors",
            "RemoteRegionClosed": "errors",
            "RemoteRegionRevoked": "errors",
            "SimulationIdle": "errors",
            "TlsConfig": "tls",
            "Transfer": "_core",
            "TransferCancelled": "errors",
            "TransferError": "errors",
            "TransportError": "errors",
            "UsageError": "errors",
            "WaitTimeout": "errors",
            "Watcher": "watchers",
            "__version__": "_core",
            "dump_on_signal": "flight",
        },
        modules=[
            "counters",
            "engine",
            "errors",
            "flight",
            "messages",
            "peers",
            "poison",
            "rdma",
            "regions",
            "tls",
            "watchers",
        ],
    )


__dir__ = listed(__name__, __all__, ["integrations", "kv", "moe", "observe", "sim", "testing", "topology", "weights"])


_interrupt.over()

"""Moves tensors between the processes of LLM systems, point to point, over whatever NIC is there.

>>> import crossrail as xr
>>> engine = xr.Engine("decoder-0")

The public interface. Everything else that help() lists under this package is private, or reached through these names:

    Engine                            moves bytes; one per process or device
    Region, RegionDescriptor          registered memory; its description for peers
    Transfer                          the result of a submit: done, failed or cancelled, exactly once
    ImmCounter, CountTicket, CountFlag    count arrivals
    Message, ReceivePool              two-sided messages
    Watcher                           a word in memory that starts callbacks and writes when it changes
    Address, PeerGroup, Explanation, PathExplanation, Heartbeat, EngineEvent    peers
    Poisoned, GpuMapping              memory watched for late writes; a peer's GPU memory, mapped for kernels
    RdmaOptions, TlsConfig            options of an Engine
    dump_on_signal                    writes the flight recordings of all engines on a signal
    CrossrailError                    the base class of all errors:
        UsageError, EngineClosed, TransportError, WaitTimeout, LateWrite, SimulationIdle
        TransferError: PeerLost, TransferCancelled, RemoteRegionClosed, RemoteRegionRevoked, RemoteAccessError,
            ChecksumMismatch, MessageTooLong

    crossrail.kv                      KV caches from prefill to decode
    crossrail.weights                 weights from trainers to inference
    crossrail.moe                     dispatch and combine for mixture-of-experts layers
    crossrail.sim, crossrail.testing  the simulator, and its pytest plugin
    crossrail.observe                 metrics
    crossrail.topology                GPUs, NICs and which belong together
    crossrail.integrations            vLLM, SGLang, verl, checkpoint-engine, transformers, DeepEP
"""

from typing import TYPE_CHECKING

from crossrail import _ending, _interrupt  # noqa: F401 - importing _ending registers its exit handler
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

# Lazy, so that `crossrail --help` does not import numpy and the native module. Hidden from type checkers, which would
# otherwise accept every misspelt name.
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

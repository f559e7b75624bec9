"""Moves KV cache between the instances of an inference system that prefills and decodes on different machines.

transfer/ is the library: layouts and plans, pages and who may use them, the two sides of a request's transfer.
services/ are router, prefillers and decoders, which say to each other what is in messages.py; http/ is where clients
ask and nodes look for routers, etcd/ another place to be found. model.py says what computes; models/ are real ones, and
toy.py is one for tests.
"""

from typing import TYPE_CHECKING

from crossrail._lazy import lazily
from crossrail.kv.errors import (
    DuplicateRequest,
    LayoutMismatch,
    NodeRefused,
    NoPages,
    Overloaded,
    PagesInUse,
    RequestFailed,
    RouterNotFound,
    Superseded,
    SurplusCount,
    TransferStopped,
    Unavailable,
    UnknownModel,
)
from crossrail.kv.transfer.foreign_pages import NOT_YET, foreign_lease
from crossrail.kv.transfer.job import LayerTime, SendJob
from crossrail.kv.transfer.layout import KvLayout, compatible, differences
from crossrail.kv.transfer.memory import RankMemory
from crossrail.kv.transfer.pages import PageLease, PagePool, PageState, PoolReport
from crossrail.kv.transfer.plan import PageWrites, TransferPlan, expected_count, plan_transfer
from crossrail.kv.transfer.prefix import page_hashes
from crossrail.kv.transfer.receiver import KvReceiver
from crossrail.kv.transfer.reception import Reception
from crossrail.kv.transfer.sender import KvSender, Step
from crossrail.kv.transfer.target import KvTarget, RankTarget

if TYPE_CHECKING:
    from crossrail.kv.services.decoder import Decoder
    from crossrail.kv.services.metrics import RouterCollector
    from crossrail.kv.services.node import Node, NodeOptions
    from crossrail.kv.services.prefiller import Prefiller
    from crossrail.kv.services.router import Router, RouterOptions

__all__ = [
    "NOT_YET",
    "Decoder",
    "DuplicateRequest",
    "KvLayout",
    "KvReceiver",
    "KvSender",
    "KvTarget",
    "LayerTime",
    "LayoutMismatch",
    "NoPages",
    "Node",
    "NodeOptions",
    "NodeRefused",
    "Overloaded",
    "PageLease",
    "PagePool",
    "PageState",
    "PageWrites",
    "PagesInUse",
    "PoolReport",
    "Prefiller",
    "RankMemory",
    "RankTarget",
    "Reception",
    "RequestFailed",
    "Router",
    "RouterCollector",
    "RouterNotFound",
    "RouterOptions",
    "SendJob",
    "Step",
    "Superseded",
    "SurplusCount",
    "TransferPlan",
    "TransferStopped",
    "Unavailable",
    "UnknownModel",
    "compatible",
    "differences",
    "expected_count",
    "foreign_lease",
    "page_hashes",
    "plan_transfer",
]

# Who uses the library alone needs no msgspec, and nobody prometheus_client who counts otherwise.
__getattr__ = lazily(
    __name__,
    {
        "Decoder": "services.decoder",
        "Node": "services.node",
        "NodeOptions": "services.node",
        "Prefiller": "services.prefiller",
        "Router": "services.router",
        "RouterCollector": "services.metrics",
        "RouterOptions": "services.router",
    },
)

"""Moves KV cache between the instances of an inference system that prefills and decodes on different machines.

transfer/ is the library: layouts and plans, pages and who may use them, the two sides of a request's transfer.
router/ and nodes/, the prefillers and decoders, serve requests together by the messages in messages.py; http/ is where
clients send requests and nodes look up routers, etcd/ another way to find each other. model.py says what a model has to
do; models/ are real ones, and toy.py is one for tests.
"""

from typing import TYPE_CHECKING

from crossrail._lazy import lazily, listed

if TYPE_CHECKING:
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
    from crossrail.kv.nodes.decoder import Decoder
    from crossrail.kv.nodes.node import Node
    from crossrail.kv.nodes.prefiller import Prefiller
    from crossrail.kv.options import NodeOptions, RouterOptions
    from crossrail.kv.router.metrics import RouterCollector
    from crossrail.kv.router.router import Router
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

# `crossrail kv --help` should not have to import numpy. Hidden from type checkers, as in crossrail itself.
if not TYPE_CHECKING:
    __getattr__ = lazily(
        __name__,
        {
            "Decoder": "nodes.decoder",
            "DuplicateRequest": "errors",
            "KvLayout": "transfer.layout",
            "KvReceiver": "transfer.receiver",
            "KvSender": "transfer.sender",
            "KvTarget": "transfer.target",
            "LayerTime": "transfer.job",
            "LayoutMismatch": "errors",
            "NOT_YET": "transfer.foreign_pages",
            "NoPages": "errors",
            "Node": "nodes.node",
            "NodeOptions": "options",
            "NodeRefused": "errors",
            "Overloaded": "errors",
            "PageLease": "transfer.pages",
            "PagePool": "transfer.pages",
            "PageState": "transfer.pages",
            "PageWrites": "transfer.plan",
            "PagesInUse": "errors",
            "PoolReport": "transfer.pages",
            "Prefiller": "nodes.prefiller",
            "RankMemory": "transfer.memory",
            "RankTarget": "transfer.target",
            "Reception": "transfer.reception",
            "RequestFailed": "errors",
            "Router": "router.router",
            "RouterCollector": "router.metrics",
            "RouterNotFound": "errors",
            "RouterOptions": "options",
            "SendJob": "transfer.job",
            "Step": "transfer.sender",
            "Superseded": "errors",
            "SurplusCount": "errors",
            "TransferPlan": "transfer.plan",
            "TransferStopped": "errors",
            "Unavailable": "errors",
            "UnknownModel": "errors",
            "compatible": "transfer.layout",
            "differences": "transfer.layout",
            "expected_count": "transfer.plan",
            "foreign_lease": "transfer.foreign_pages",
            "page_hashes": "transfer.prefix",
            "plan_transfer": "transfer.plan",
        },
        modules=["errors", "transfer"],
    )


__dir__ = listed(__name__, __all__, ["model"])

"""Moves KV cache between the instances of an inference system that prefills and decodes on different machines.

layout.py says how an instance keeps its KV; plan.py, which bytes go from which rank to which, and how many counts that
makes; pages.py, who may use a page and when; sender.py and receiver.py are the two sides of a request's transfer.
"""

from crossrail.kv.errors import DuplicateRequest, LayoutMismatch, NoPages, PagesInUse, SurplusCount, TransferStopped
from crossrail.kv.foreign_pages import NOT_YET, foreign_lease
from crossrail.kv.job import LayerTime, SendJob
from crossrail.kv.layout import KvLayout, compatible, differences
from crossrail.kv.memory import RankMemory
from crossrail.kv.pages import PageLease, PagePool, PageState, PoolReport
from crossrail.kv.plan import PageWrites, TransferPlan, expected_count, plan_transfer
from crossrail.kv.prefix import page_hashes
from crossrail.kv.receiver import KvReceiver
from crossrail.kv.reception import Reception
from crossrail.kv.sender import KvSender, Step
from crossrail.kv.target import KvTarget, RankTarget

__all__ = [
    "NOT_YET",
    "DuplicateRequest",
    "KvLayout",
    "KvReceiver",
    "KvSender",
    "KvTarget",
    "LayerTime",
    "LayoutMismatch",
    "NoPages",
    "PageLease",
    "PagePool",
    "PageState",
    "PageWrites",
    "PagesInUse",
    "PoolReport",
    "RankMemory",
    "RankTarget",
    "Reception",
    "SendJob",
    "Step",
    "SurplusCount",
    "TransferPlan",
    "TransferStopped",
    "compatible",
    "differences",
    "expected_count",
    "foreign_lease",
    "page_hashes",
    "plan_transfer",
]

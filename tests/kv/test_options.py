"""What a router or a node could not work with is refused by its options, which name it and the bound."""

from __future__ import annotations

import random
from dataclasses import fields

import pytest

from crossrail.errors import UsageError
from crossrail.kv import messages as m
from crossrail.kv.etcd.membership import EtcdRoster
from crossrail.kv.etcd.records import Place
from crossrail.kv.nodes.node import NodeOptions
from crossrail.kv.router.router import Router, RouterOptions
from tests.support.kv_net import Net

OPTIONS = [(kind, field.name) for kind in (NodeOptions, RouterOptions) for field in fields(kind)]
TIMES = [(kind, name) for kind, name in OPTIONS if name.endswith("_s")]
COUNTS = [(kind, name) for kind, name in OPTIONS if not name.endswith("_s")]


@pytest.mark.parametrize(("kind", "name"), TIMES)
def test_time_that_is_none_is_refused(kind: type[NodeOptions | RouterOptions], name: str) -> None:
    is_patience = name in ("queue_s", "page_wait_s")  # 0: nothing is waited for
    bound = "0 or more" if is_patience else r"more than 0 and at most 1e\+07"
    for bad in (-1.0, float("nan"), *(() if is_patience else (0, float("inf"), 1e8))):
        with pytest.raises(UsageError, match=f"^{name} is {bad}, must be seconds, {bound}$"):
            kind(**{name: bad})
    for strange in (None, "1", True):
        with pytest.raises(UsageError, match=f"^{name} must be a number, not "):
            kind(**{name: strange})
    assert getattr(kind(**{name: 1}), name) == 1


@pytest.mark.parametrize(("kind", "name"), COUNTS)
def test_count_that_is_none_is_refused(kind: type[NodeOptions | RouterOptions], name: str) -> None:
    least = 0 if name == "restarts_max" else 1
    with pytest.raises(UsageError, match=f"^{name} is {least - 1}, must be {least} or more$"):
        kind(**{name: least - 1})
    for strange in (None, 1.5, True):
        with pytest.raises(UsageError, match=f"^{name} must be a whole number, not "):
            kind(**{name: strange})
    assert getattr(kind(**{name: least}), name) == least


async def test_lease_that_ends_between_two_heartbeats_is_refused() -> None:
    mailbox = m.mailbox(Net(random.Random(1)).wire("router"), b"s3cret")
    with pytest.raises(UsageError, match=r"^heartbeat_s=2 must be at most half of lease_s=3\.9"):
        Router("router", mailbox, RouterOptions(heartbeat_s=2.0, lease_s=3.9))
    Router("router", mailbox, RouterOptions(heartbeat_s=2.0, lease_s=4.0))
    # Its lease is of its own record then; a member may be silent for three beats.
    roster = EtcdRoster(1.0, Place(("127.0.0.1:1",), "here"), b"s3cret", 2.0)
    Router("router", mailbox, RouterOptions(heartbeat_s=2.0, lease_s=1.0), roster)

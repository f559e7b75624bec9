"""Data parallelism: replicas of a server, or the parts of a DP attention, each of which has some of the rooms."""

from __future__ import annotations

from typing import Any

import pytest

from crossrail.errors import UsageError
from tests.sglang.conftest import Open
from tests.sglang.side import FAILED, Side, ask, failure, finish
from tests.support.limits import eventually

KINDS = ["replicas", "attention"]


def part(kind: str, rank: int) -> dict[str, Any]:
    """SGLang's numbers of one of two."""
    if kind == "replicas":
        return {"dp_size": 2, "dp_rank": rank}
    return {"attn_dp_size": 2, "attn_dp_rank": rank}


def goes(p: Side, d: Side, room: int, dp_rank: int, **sender: Any) -> None:
    receiver = d.receiver(room, dp_rank)
    ask(receiver)
    finish(p, d, p.sender(room, **sender), receiver, f"room {room}")


@pytest.mark.parametrize("kind", KINDS)
def test_each_copy_sends_its_rooms(open_side: Open, d: Side, kind: str) -> None:
    copies = [open_side("prefill", parallel=part(kind, rank)) for rank in (0, 1)]
    eventually(lambda: d.manager.try_ensure_parallel_info(d.address), "the copies are known")
    info = d.manager.prefill_info_table[d.address]
    assert (info.dp_size, info.follow_bootstrap_room, info.attn_tp_size) == (2, True, 1)
    for room in (4, 5):
        goes(copies[room % 2], d, room, room % 2)


@pytest.mark.parametrize("kind", KINDS)
def test_copies_of_decoders_ask_one_prefiller(open_side: Open, p: Side, kind: str) -> None:
    for rank in (0, 1):
        copy = open_side("decode", parallel=part(kind, rank) | {"load_balance_method": "round_robin"})
        assert f"sglang-decode-{rank}-" in copy.manager.core.node.engine.address.name
        goes(p, copy, 10 + rank, 0)


def test_a_router_may_choose_the_copy(open_side: Open, d: Side) -> None:
    copies = [open_side("prefill", parallel=part("attention", rank)) for rank in (0, 1)]
    goes(copies[1], d, 4, 1, is_sent_here=True)


def test_a_router_that_tells_only_the_prefiller_reads_why(open_side: Open) -> None:
    copy = open_side("prefill", parallel=part("attention", 1))
    sender = copy.sender(4)
    assert sender.poll() == FAILED
    assert "came to rank 1 of 2 of data parallelism, and its decoder asks rank 0" in failure(sender).failure_reason


@pytest.mark.parametrize("dp_rank", [1, -1])
def test_a_copy_that_is_not_there(p: Side, d: Side, dp_rank: int) -> None:
    receiver = d.receiver(1, dp_rank)
    assert receiver.poll() == FAILED
    assert f"disagg_prefill_dp_rank={dp_rank}: the prefill server has 1 rank" in failure(receiver).failure_reason


def test_ranks_that_only_sglangs_own_servers_tell_are_refused(open_side: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_DISAGGREGATION_FORCE_QUERY_PREFILL_DP_RANK", "true")
    with pytest.raises(UsageError, match="FORCE_QUERY_PREFILL_DP_RANK must not be set"):
        open_side("decode")

"""Who is a member, and under which name: the roster by itself, on times that the tests make up."""

import asyncio
from dataclasses import replace

import msgspec
import pytest

import crossrail as xr
from crossrail.kv import messages as m
from crossrail.kv.etcd.membership import EtcdRoster
from crossrail.kv.etcd.records import Place, Seal
from crossrail.kv.router.membership import NotYet, Roster
from tests.support.kv_cluster import LAYOUT, SECRET, node_record


def test_node_not_heard_of_for_a_lease_is_gone() -> None:
    roster, gone = Roster(lease_s=2.0), []
    roster.on_gone(lambda member, why: gone.append((member.name, why)))
    roster.join(node_record("d0"), m.Load(), 10.0)
    assert roster.heartbeat("d0", b"d0", m.Load(requests=3), 11.5)
    roster.sweep(13.4, lambda _: False)
    assert [member.load.requests for member in roster.members("decoder")] == [3] and not gone
    roster.sweep(13.6, lambda _: False)
    assert gone == [("d0", "node 'd0' was not heard from for 2 s")]
    assert not roster.heartbeat("d0", b"d0", m.Load(), 13.7)


def test_second_node_of_a_name_is_refused_while_the_first_is_heard_of() -> None:
    roster, second = Roster(lease_s=2.0), node_record("d0", address=b"second")
    roster.join(node_record("d0", address=b"first"), m.Load(), 0.0)
    for now_s in (0.1, 0.5):  # a heartbeat may have been on its way as the first one died
        with pytest.raises(NotYet, match="another node has the name 'd0': waiting"):
            roster.join(second, m.Load(), now_s)
        assert roster.heartbeat("d0", b"first", m.Load(), now_s)
    with pytest.raises(xr.UsageError, match="another node has the name 'd0', and lives"):
        roster.join(second, m.Load(), 1.1)
    assert [member.address for member in roster.members("decoder")] == [b"first"]
    with pytest.raises(NotYet):  # nothing is kept of what was refused
        roster.join(second, m.Load(), 1.2)


def test_node_restarted_under_its_name_joins_when_the_old_one_is_gone() -> None:
    roster, gone = Roster(lease_s=2.0), []
    roster.on_gone(lambda member, why: gone.append(member.address))
    roster.join(node_record("d0", address=b"old"), m.Load(), 0.0)
    with pytest.raises(NotYet):
        roster.join(node_record("d0", address=b"new"), m.Load(), 0.1)
    roster.excuse(1.0, 0.2)  # the router stood still: that says nothing of who lives
    with pytest.raises(NotYet):
        roster.join(node_record("d0", address=b"new"), m.Load(), 0.3)
    roster.sweep(0.4, lambda address: address == b"old")
    roster.join(node_record("d0", address=b"new"), m.Load(), 0.5)
    assert gone == [b"old"] and [member.address for member in roster.members("decoder")] == [b"new"]
    assert not roster.heartbeat("d0", b"old", m.Load(), 0.6)  # should it thaw


def test_node_of_another_layout_is_refused_with_both_sides() -> None:
    roster = Roster(lease_s=2.0)
    roster.join(node_record("p0", "prefiller"), m.Load(), 0.0)
    with pytest.raises(
        xr.UsageError, match=r"(?s)'d0' does not fit 'p0'.*head_dim: ours 16, theirs 8.*16 float16.*8 f"
    ):
        roster.join(node_record("d0", layout=replace(LAYOUT, head_dim=16)), m.Load(), 0.1)
    roster.join(node_record("d0", layout=replace(LAYOUT, tp=2, page_tokens=16, order="NHD")), m.Load(), 0.2)


def test_malformed_layout_is_refused() -> None:
    with pytest.raises(xr.UsageError, match="a layout has the fields"):
        Roster(2.0).join(m.NodeRecord("d0", b"d0", {"layers": 3}, role="decoder", model="model"), m.Load(), 0.0)


@pytest.mark.parametrize(("heartbeat_s", "silent_s"), [(0.5, 2.0), (5.0, 15.0)])
async def test_member_in_etcd_is_missed_after_two_leases_and_not_before_its_third_report(
    heartbeat_s: float, silent_s: float
) -> None:
    place, gone = Place(("127.0.0.1:1",), "never-asked"), []
    roster = EtcdRoster(1.0, place, SECRET, heartbeat_s)
    roster.on_gone(lambda member, why: gone.append(member.name))
    record = msgspec.msgpack.encode(node_record("d0"))
    roster._on_change("d0", Seal(SECRET).close(place.nodes + "d0", record))
    heard_s = asyncio.get_running_loop().time()
    roster.sweep(heard_s + silent_s - 0.1, lambda _: False)
    assert not gone
    roster.sweep(heard_s + silent_s + 0.1, lambda _: False)
    assert gone == ["d0"]

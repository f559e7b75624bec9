"""Membership in a real etcd: nodes and routers that come, go, stand still and lose it, and etcd that goes away."""

import asyncio
import base64
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from crossrail.kv import messages as m
from crossrail.kv.errors import Superseded
from crossrail.kv.etcd import membership as etcd_membership
from crossrail.kv.etcd import records as etcd_records
from crossrail.kv.etcd.client import Etcd
from crossrail.kv.etcd.membership import EtcdRoster
from crossrail.kv.etcd.records import Place
from crossrail.kv.nodes.decoder import Decoder
from crossrail.kv.nodes.prefiller import Prefiller
from crossrail.kv.router.membership import Roster
from crossrail.kv.router.router import Router
from tests.kv.conftest import quiet, start, until
from tests.kv.steps import hold
from tests.support.etcd import ETCD, EtcdServer
from tests.support.kv_cluster import SECRET, Cluster, monolithic, prompt_of
from tests.support.kv_net import BadWire
from tests.support.limits import WAIT_S

pytestmark = pytest.mark.skipif(ETCD is None, reason="no etcd here (Debian: etcd-server)")
GREEDY = m.Sampling(max_tokens=8, ignore_end=True)
LEASE_S = 2.0


@pytest.fixture
def listed_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """To be asked for before a cluster."""
    monkeypatch.setattr(etcd_records, "_LIST_EVERY_S", 0.1)


@pytest.fixture
def looked_for_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """By each member, its own record; its watch of the others misses nothing. To be asked for before a cluster."""
    monkeypatch.setattr(etcd_records, "_LOOK_EVERY_S", 0.1)


@pytest.fixture
async def cluster(nothing_leaks: None, place: Place) -> AsyncIterator[Cluster]:
    made = Cluster(place=place)
    made.add_router()
    yield made
    await made.close()


@asynccontextmanager
async def client(place: Place) -> AsyncIterator[Etcd]:
    async with Etcd(place.endpoints) as etcd:
        yield etcd


def names(router: Router | None, role: m.Role) -> list[str]:
    assert router is not None
    return [member.name for member in router.roster.members(role)]


async def assert_serves(cluster: Cluster, seed: int = 3) -> None:
    prompt = prompt_of(40, seed=seed)
    tokens, end = await asyncio.wait_for(cluster.complete(prompt, GREEDY), WAIT_S)
    assert tokens == await monolithic(prompt, GREEDY), end
    await quiet(cluster)


async def test_nodes_and_router_find_each_other(cluster: Cluster) -> None:
    await start(cluster, prefillers=2, decoders=2)
    assert names(cluster.router, "prefiller") == ["p0", "p1"] and names(cluster.router, "decoder") == ["d0", "d1"]
    await assert_serves(cluster)


async def test_two_routers_share_nodes_and_one_may_go(cluster: Cluster, place: Place) -> None:
    second = Cluster(place=place)
    second.add_router("router-2")
    await start(cluster, prefillers=2)
    await until(lambda: all(len(node.links) == 2 for node in cluster.nodes.values()), "links with both")
    for node in cluster.nodes.values():
        await asyncio.wait_for(asyncio.gather(*(link.joined.wait() for link in node.links)), WAIT_S)
    prompts = [prompt_of(50 + n, seed=n) for n in range(6)]
    sides = [cluster, second] * 3
    results = await asyncio.gather(*(side.complete(p, GREEDY) for side, p in zip(sides, prompts, strict=True)))
    for prompt, (tokens, end) in zip(prompts, results, strict=True):
        assert tokens == await monolithic(prompt, GREEDY), end
    await second.close()
    await assert_serves(cluster)


async def test_node_that_leaves_is_gone_at_once(cluster: Cluster) -> None:
    await start(cluster, decoders=2)
    node = cluster.nodes.pop("d1")
    assert await node.drain(WAIT_S)
    await node.close()
    await cluster.presences.pop("d1").close()
    await until(lambda: names(cluster.router, "decoder") == ["d0"], "d1 is gone")
    await assert_serves(cluster)


async def test_node_whose_lease_ends_is_gone_and_comes_back(cluster: Cluster, place: Place) -> None:
    await start(cluster)
    gone: list[str] = []
    assert cluster.router is not None
    cluster.router.roster.on_gone(lambda member, why: gone.append(why))
    lease = cluster.presences["d0"].registration.lease
    assert lease is not None
    async with client(place) as etcd:
        await etcd.revoke(lease)
    await until(lambda: gone, "d0 is gone")
    assert gone == ["node 'd0' left, or its lease in etcd has ended"]
    await until(lambda: names(cluster.router, "decoder") == ["d0"], "d0 is back")
    await until(lambda: cluster.nodes["d0"].links[0].joined.is_set(), "and joined")
    await assert_serves(cluster)


async def test_records_that_somebody_removes_are_back(looked_for_often: None, cluster: Cluster, place: Place) -> None:
    """Though their leases live: as of an operator who tidies up."""
    await start(cluster)
    gone: list[str] = []
    assert cluster.router is not None
    cluster.router.roster.on_gone(lambda member, why: gone.append(why))
    async with client(place) as etcd:
        for key in (place.nodes + "d0", place.routers + "router"):
            await etcd._ask("kv/deleterange", {"key": base64.b64encode(key.encode()).decode()})
        await until(lambda: gone, "d0 is gone")
        await until(lambda: names(cluster.router, "decoder") == ["d0"], "d0 is back", 3 * LEASE_S)
        await until(lambda: cluster.nodes["d0"].links[0].joined.is_set(), "and joined")
        assert place.routers + "router" in (await etcd.list(place.routers))[0]
    await assert_serves(cluster)


async def test_node_whose_record_another_has_replaced_is_refused(
    looked_for_often: None, cluster: Cluster, place: Place
) -> None:
    await start(cluster)
    async with client(place) as etcd:
        key, value = (base64.b64encode(text.encode()).decode() for text in (place.nodes + "d0", "another's"))
        await etcd._ask("kv/put", {"key": key, "value": value, "lease": str(await etcd.grant(30))})
        with pytest.raises(Superseded, match=r"another process has .*/d0 in etcd, and keeps it"):
            await asyncio.wait_for(asyncio.shield(cluster.nodes["d0"].refused), WAIT_S)


async def test_node_that_neither_dies_nor_keeps_its_lease_alive_is_gone(cluster: Cluster) -> None:
    await start(cluster, decoders=2)
    await until(lambda: names(cluster.router, "decoder") == ["d0", "d1"], "both are there")
    await cluster.nodes.pop("d1").mailbox.close()  # its engine lives, and it would answer
    await until(lambda: names(cluster.router, "decoder") == ["d0"], "d1 is gone")
    await assert_serves(cluster)
    await cluster.presences.pop("d1").close()


async def test_decoder_cut_off_from_its_router_alone_is_done_without_until_it_is_heard_of(
    nothing_leaks: None, place: Place
) -> None:
    """etcd has its record all the time, and its engine is not seen to have ended."""
    cluster = Cluster(place=place, spoil=lambda wire: BadWire(wire, random.Random(1), 0, 0, 0))
    roster = cluster.add_router().roster
    assert isinstance(roster, EtcdRoster)
    await start(cluster, decoders=2)
    await until(lambda: names(cluster.router, "decoder") == ["d0", "d1"], "both are there")
    prompt, long = prompt_of(60), m.Sampling(max_tokens=60, ignore_end=True)
    decoders = [node for node in cluster.nodes.values() if isinstance(node, Decoder)]
    holds = [hold(node, after=3) for node in decoders]
    asked = asyncio.ensure_future(cluster.complete(prompt, long))
    await until(lambda: any(each.tokens for node in decoders for each in node._servings.values()), "it has begun")
    (busy,) = [node for node in decoders if node._servings]
    cluster.spoilt[busy.name]._loss = 1.0
    patience_s, roster._silent_s = roster._silent_s, 1.0
    await until(lambda: busy.name not in names(cluster.router, "decoder"), "it is done without")
    roster._silent_s = patience_s
    for goes_on in holds:
        goes_on.set()
    tokens, end = await asyncio.wait_for(asked, WAIT_S)
    assert tokens == await monolithic(prompt, long), end
    assert busy.name not in names(cluster.router, "decoder")
    async with client(place) as etcd:
        assert place.nodes + busy.name in (await etcd.list(place.nodes))[0]
    cluster.spoilt[busy.name]._loss = 0.0
    await until(lambda: busy.name in names(cluster.router, "decoder"), "it is back", 2 * WAIT_S)
    await assert_serves(cluster)
    await cluster.close()


async def test_etcd_restarted_nobody_is_missed(cluster: Cluster, etcd_server: EtcdServer) -> None:
    await start(cluster)
    gone: list[str] = []
    assert cluster.router is not None
    cluster.router.roster.on_gone(lambda member, why: gone.append(why))
    etcd_server.stop()
    await assert_serves(cluster)  # without it
    etcd_server.start()
    cluster.add(Decoder, "d1")
    await until(lambda: "d1" in names(cluster.router, "decoder"), "who comes later is seen")
    assert not gone
    await assert_serves(cluster, seed=4)


async def test_etcd_that_lost_its_data_hears_it_again(cluster: Cluster, etcd_server: EtcdServer) -> None:
    await start(cluster)
    gone: list[str] = []
    assert cluster.router is not None
    cluster.router.roster.on_gone(lambda member, why: gone.append(why))
    etcd_server.stop()
    etcd_server.erase()
    etcd_server.start()
    cluster.add(Prefiller, "p1")
    await until(lambda: "p1" in names(cluster.router, "prefiller"), "who comes later is seen")
    assert not gone
    await assert_serves(cluster)


async def test_router_restarted_finds_its_nodes_and_what_they_run(cluster: Cluster) -> None:
    await start(cluster, token_s=0.0004)
    prompt = prompt_of(120)
    asked = asyncio.ensure_future(cluster.complete(prompt, GREEDY, request="r1"))
    await until(lambda: any(node.load().requests for node in cluster.nodes.values()), "the request runs")
    await cluster.close_router()
    await asked
    router = cluster.add_router()
    await until(lambda: (found := router.adopted("r1")) and found.end, "the request ends")
    found = router.adopted("r1")
    assert found is not None and found.tokens == await monolithic(prompt, GREEDY)


async def test_node_restarted_in_a_dead_ones_stead_takes_its_name(cluster: Cluster) -> None:
    await start(cluster)
    await cluster.kill("d0")
    cluster.add(Decoder, "d0")
    address = cluster.nodes["d0"].mailbox.address
    assert cluster.router is not None
    roster = cluster.router.roster
    await until(lambda: [x.address for x in roster.members("decoder")] == [address], "the new one is the member")
    await until(lambda: not roster.members("decoder")[0].load.draining, "and has told its load")
    await assert_serves(cluster)


async def test_second_router_of_a_name_is_refused_and_the_first_keeps_its_nodes(cluster: Cluster, place: Place) -> None:
    await start(cluster)
    second = Cluster(place=place)
    second.add_router()
    assert second.router is not None
    with pytest.raises(Superseded, match=r"another process has .*/router in etcd, and keeps it"):
        await asyncio.wait_for(asyncio.shield(second.router.refused), WAIT_S)
    await second.close()
    await assert_serves(cluster)


async def test_router_that_does_not_come_back_is_looked_for_no_longer(
    listed_often: None, cluster: Cluster, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_membership, "_ROUTER_GONE_S", 0.5)
    await start(cluster)
    decoder = cluster.nodes["d0"]
    for _ in range(2):
        second = Cluster(place=place)
        second.add_router("passing")
        await until(lambda: len(decoder.links) == 2 and decoder.links[1].joined.is_set(), "it has joined both")
        await second.close()
        await until(lambda: len(decoder.links) == 1, "only the first is looked for")
    await assert_serves(cluster)


async def test_node_of_a_cluster_without_routers_says_so_once(
    listed_often: None, place: Place, nothing_leaks: None, caplog: pytest.LogCaptureFixture
) -> None:
    """As of a cluster whose name is mistyped: nothing else would tell its operator."""
    cluster = Cluster(place=place)
    cluster.add(Decoder, "d0")
    words = f"node d0: etcd has no router yet, and waits for one: below {place.routers}"
    await until(lambda: words in caplog.text, "it says so")
    await asyncio.sleep(0.5)
    cluster.add_router()
    await until(lambda: f"node d0: etcd has a router now: below {place.routers}" in caplog.text, "it says so")
    assert caplog.text.count("node d0: etcd has") == 2
    await cluster.close()


async def test_records_of_another_secret_are_not_taken(cluster: Cluster, place: Place) -> None:
    await start(cluster)
    cluster.add(Decoder, "stranger", secret=b"guessed")
    async with client(place) as etcd:
        lease = await etcd.grant(30)
        await etcd.put_if_ours(place.nodes + "junk", b"no record", lease)
        cluster.add(Decoder, "d1")
        await until(lambda: "d1" in names(cluster.router, "decoder"), "who comes later is seen")
        assert names(cluster.router, "decoder") == ["d0", "d1"]
        assert isinstance(cluster.router, Router) and isinstance(cluster.router.roster, EtcdRoster)
        assert not cluster.nodes["stranger"].links
        await etcd.revoke(lease)
    assert SECRET != b"guessed"


async def test_record_that_is_not_taken_is_told_once(
    listed_often: None, cluster: Cluster, place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    await start(cluster)
    async with client(place) as etcd:
        lease = await etcd.grant(30)
        for below in (place.nodes, place.routers):
            await etcd.put_if_ours(below + "junk", b"no record", lease)
        await until(lambda: caplog.text.count("of router 'junk' is not taken") >= 2, "both nodes have seen it")
        await asyncio.sleep(1.0)
        assert [caplog.text.count(f"of {what} 'junk' is not taken") for what in ("node", "router")] == [1, 2]
        await etcd.revoke(lease)


async def test_key_that_is_no_text_is_passed_over_and_told_once(
    listed_often: None, cluster: Cluster, place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """Before anybody follows, and while they do: anybody who can write to etcd may put it there."""
    keys = [below.encode() + key for below in (place.nodes, place.routers) for key in (b"\xff", b"\xfe\xfe")]
    async with client(place) as etcd:

        async def put(*keys: bytes) -> None:
            for key in keys:
                pair = {"key": base64.b64encode(key).decode(), "value": "AAAA"}
                await etcd._ask("kv/put", pair)

        await put(*keys[::2])
        await start(cluster)
        await put(*keys[1::2])
        await until(lambda: caplog.text.count("is passed over") >= 6, "both nodes and the router have seen theirs")
        cluster.add(Decoder, "d1")
        await until(lambda: "d1" in names(cluster.router, "decoder"), "who comes later is seen")
        await until(lambda: cluster.nodes["d1"].links and cluster.nodes["d1"].links[0].joined.is_set(), "and joins")
        await asyncio.sleep(1.0)
        told = [message for message in caplog.messages if "is passed over: it is not in UTF-8" in message]
        # One client each has d0, p0 and d1 (of routers), and the router (of nodes): two keys.
        assert len(told) == 8
    await assert_serves(cluster)


async def test_record_that_breaks_what_reads_it_ends_nothing(
    cluster: Cluster, place: Place, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one of a later version might, that knows the secret."""
    join = Roster.join

    def breaking(self: Roster, record: m.NodeRecord, *more: Any) -> None:
        if record.node == "odd":
            raise ZeroDivisionError("odd")
        join(self, record, *more)

    monkeypatch.setattr(Roster, "join", breaking)
    await start(cluster)
    cluster.add(Decoder, "odd")
    await until(lambda: "record of node 'odd' is not taken: odd" in caplog.text, "it is told")
    assert "ZeroDivisionError" in caplog.text
    cluster.add(Decoder, "d1")
    await until(lambda: "d1" in names(cluster.router, "decoder"), "who comes later is seen")
    await assert_serves(cluster)

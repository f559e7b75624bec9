"""Membership in a real etcd: nodes and routers that come, go, stand still and lose it, and etcd that goes away."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import pytest

import crossrail as xr
from crossrail.kv import etcd_membership, etcd_records
from crossrail.kv import messages as m
from crossrail.kv.decoder import Decoder
from crossrail.kv.etcd import Change, Etcd, EtcdError
from crossrail.kv.etcd_membership import EtcdRoster
from crossrail.kv.etcd_records import Place, Registration, Seal, Superseded, follow
from crossrail.kv.prefiller import Prefiller
from crossrail.kv.router import Router
from tests.kv.conftest import quiet, start, until
from tests.support.etcd import ETCD, EtcdServer
from tests.support.kv_cluster import SECRET, Cluster, monolithic, prompt_of
from tests.support.limits import WAIT_S

pytestmark = pytest.mark.skipif(ETCD is None, reason="no etcd here (Debian: etcd-server)")
GREEDY = m.Sampling(max_tokens=8, ignore_end=True)
LEASE_S = 2.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    made = EtcdServer(tmp_path_factory.mktemp("etcd"))
    made.start()
    yield made
    made.stop()


@pytest.fixture
def place(server: EtcdServer, request: pytest.FixtureRequest) -> Place:
    """A cluster of each test's own."""
    return Place((server.endpoint,), request.node.name)


@pytest.fixture
def listed_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """To be asked for before a cluster."""
    monkeypatch.setattr(etcd_records, "_LIST_EVERY_S", 0.1)


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


# --- the client ---


async def test_key_lives_as_long_as_its_lease(place: Place) -> None:
    async with client(place) as etcd:
        lease = await etcd.grant(30)
        await etcd.put_if_ours(place.nodes + "a", b"\x00\xff", lease)
        found, revision = await etcd.list(place.nodes)
        assert found == {place.nodes + "a": b"\x00\xff"} and await etcd.keep_alive(lease)

        await etcd.revoke(lease)

        assert (await etcd.list(place.nodes))[0] == {} and not await etcd.keep_alive(lease)
        await etcd.revoke(lease)  # which has ended already
        changes = [change async for change in etcd.watch(place.nodes, revision, 0.5)]
        assert changes == [Change(place.nodes + "a", None)]


async def test_name_of_somebody_else_is_not_overwritten(place: Place) -> None:
    async with client(place) as etcd:
        first, second = await etcd.grant(30), await etcd.grant(30)
        assert await etcd.put_if_ours(place.nodes + "a", b"mine", first)
        assert not await etcd.put_if_ours(place.nodes + "a", b"yours", second)
        assert await etcd.put_if_ours(place.nodes + "a", b"mine", second)
        await etcd.revoke(first)
        assert (await etcd.list(place.nodes))[0] == {place.nodes + "a": b"mine"}


async def test_member_that_does_not_answer_is_passed_over(place: Place) -> None:
    async with Etcd(["127.0.0.1:1", *place.endpoints]) as etcd:
        await etcd.grant(30)
    async with Etcd(["127.0.0.1:1"]) as etcd:
        with pytest.raises(EtcdError, match=r"no member of etcd answers: 127\.0\.0\.1:1: "):
            await etcd.grant(30)


async def test_absence_has_the_same_words_whoever_is_asked_first() -> None:
    words = []
    for ports in ((1, 2, 3), (2, 3, 1)):
        async with Etcd([f"127.0.0.1:{port}" for port in ports]) as etcd:
            with pytest.raises(EtcdError) as error:
                await etcd.grant(30)
            words.append(str(error.value))
    assert words[0] == words[1]


@asynccontextmanager
async def impostor(answer: bytes) -> AsyncIterator[str]:
    """Whatever listens where etcd should. b"": it takes connections, and says nothing."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if answer:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(answer) + answer)
        else:
            await reader.read()  # until the client hangs up
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()


class Gate:
    """A way to etcd that falls silent: connections stay, and nothing comes through any more."""

    def __init__(self, endpoint: str) -> None:
        self._to = endpoint.split(":")
        self._tasks: set[asyncio.Task[None]] = set()
        self.is_silent = False

    @asynccontextmanager
    async def open(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers, questions = await asyncio.open_connection(*self._to)
        for way in ((reader, questions), (answers, writer)):
            self._tasks.add(asyncio.ensure_future(self._pass(*way)))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                if not self.is_silent:
                    writer.write(data)
        finally:
            writer.close()


@pytest.mark.parametrize("silent", [1, 2])
async def test_member_that_falls_silent_costs_no_lease_and_no_news(place: Place, silent: int) -> None:
    seen: list[str] = []
    gates = [Gate(place.endpoints[0]) for _ in range(silent)]
    async with AsyncExitStack() as stack:
        endpoints = [await stack.enter_async_context(gate.open()) for gate in gates] + [*place.endpoints]
        place = Place(tuple(endpoints), place.cluster)
        etcd = place.open(LEASE_S)
        registration = Registration(etcd, place.nodes + "a", b"a", LEASE_S)
        following = follow(etcd, place.nodes, seen.extend, lambda name, _: seen.append(name))
        tasks = [asyncio.ensure_future(work) for work in (registration.run(), following)]
        await until(lambda: registration.there.is_set() and "a" in seen, "it is registered, and followed")
        lease = registration.lease

        for gate in gates:
            gate.is_silent = True

        async with Etcd(endpoints[silent:]) as other:
            await other.put_if_ours(place.nodes + "b", b"b", await other.grant(30))
            await until(lambda: "b" in seen, "what comes then is seen", 3 * LEASE_S)
            await asyncio.sleep(2 * LEASE_S)
            assert await other.keep_alive(lease) and registration.lease == lease
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await registration.end()


async def test_watch_that_is_not_begun_ends_in_time() -> None:
    async with impostor(b"") as endpoint, Etcd([endpoint], timeout_s=0.3) as etcd:
        with pytest.raises(EtcdError, match="no answer in time"):
            await asyncio.wait_for(anext(etcd.watch("/a/", 1, for_s=1e6)), WAIT_S)


async def test_watch_that_is_cancelled_whenever_leaves_no_connection() -> None:
    there = set[asyncio.StreamWriter]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there.add(writer)
        with suppress(ConnectionResetError):
            while await reader.read(1000):
                writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        there.discard(writer)
        writer.close()

    async def follow_it() -> None:
        async for _ in etcd.watch("/a/", 1, for_s=WAIT_S):
            raise AssertionError("nothing changes")

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with Etcd([f"127.0.0.1:{server.sockets[0].getsockname()[1]}"]) as etcd:
        for turns in range(30):
            task = asyncio.ensure_future(follow_it())
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
            await until(lambda: not there, f"cancelled after {turns} turns of the loop, its connection is closed")
    server.close()


@pytest.mark.parametrize("answer", [b"{}", b"[]", b'"yes"', b"no JSON"])
async def test_whoever_is_no_etcd_is_passed_over(place: Place, answer: bytes) -> None:
    async with impostor(answer) as endpoint:
        async with Etcd([endpoint]) as etcd:
            for question in (etcd.grant(5), etcd.keep_alive(1), etcd.list("/a/"), etcd.put_if_ours("/a/b", b"", 1)):
                with pytest.raises(EtcdError, match=r"no member of etcd answers: .* (ValueError|JSONDecodeError)"):
                    await question
        async with Etcd([endpoint, *place.endpoints]) as etcd:
            assert await etcd.grant(5) > 0


async def test_absence_is_told_once_for_each_reason_and_when_it_is_over(
    place: Place, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("crossrail.kv.etcd_records._RETRY_S", 0.01)
    async with client(place) as etcd:
        registration = Registration(etcd, place.nodes + "a", b"a", 0.3)
        grant, tries = etcd.grant, 0

        async def away(ttl_s: float) -> int:
            nonlocal tries
            tries += 1
            if tries <= 8:
                raise EtcdError("it is down" if tries <= 4 else "it is slow")
            return await grant(ttl_s)

        monkeypatch.setattr(etcd, "grant", away)
        keeping = asyncio.ensure_future(registration.run())
        await asyncio.wait_for(registration.there.wait(), WAIT_S)
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
    told = [record.getMessage().removeprefix(f"{place.nodes}a is ") for record in caplog.records]
    assert told == [
        "not kept alive, and is tried again: it is down",
        "not kept alive, and is tried again: it is slow",
        "kept alive again: etcd answers",
    ]


async def test_question_that_etcd_refuses_is_an_error_in_its_words(place: Place) -> None:
    async with client(place) as etcd:
        with pytest.raises(EtcdError, match="lease not found"):
            await etcd.put_if_ours(place.nodes + "a", b"", 123456)


@pytest.mark.parametrize("url", ["http://a:1", "etcd://a", "etcd://a:1,b", "etcd://a:1/b/c", "etcd:///x"])
def test_place_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(xr.UsageError, match="must be etcd://HOST:PORT"):
        Place.from_url(url)


def test_place_from_url() -> None:
    assert Place.from_url("etcd://a:1,b:2/blue") == Place(("a:1", "b:2"), "blue")
    assert Place.from_url("etcd://a:1").nodes == "/crossrail/kv/default/nodes/"


def test_sealed_record_is_good_under_its_own_key_only() -> None:
    seal = Seal(b"secret")
    value = seal.close("nodes/a", b"data")
    assert seal.open("nodes/a", value) == b"data"
    for key, other, words in [("nodes/b", seal, value), ("nodes/a", Seal(b"guess"), value), ("nodes/a", seal, b"data")]:
        with pytest.raises(xr.UsageError, match="sealed with another secret"):
            other.open(key, words)


async def test_registration_comes_back_but_not_over_another(place: Place) -> None:
    key = place.nodes + "a"
    async with client(place) as etcd:
        registration = Registration(etcd, key, b"old", LEASE_S)
        running = asyncio.ensure_future(registration.run())
        await asyncio.wait_for(registration.there.wait(), WAIT_S)
        assert registration.lease is not None
        await etcd.revoke(registration.lease)
        registration.there.clear()
        await asyncio.wait_for(registration.there.wait(), WAIT_S)
        assert (await etcd.list(key))[0] == {key: b"old"}

        taken = False
        while not taken:
            await etcd.revoke(registration.lease)
            taken = await etcd.put_if_ours(key, b"new", await etcd.grant(30))

        with pytest.raises(Superseded, match=r"another process has .*/a in etcd, and keeps it"):
            await asyncio.wait_for(running, WAIT_S)
        assert (await etcd.list(key))[0] == {key: b"new"}


async def test_name_of_who_lives_is_not_taken_and_that_of_who_died_is(place: Place) -> None:
    key = place.nodes + "a"
    async with client(place) as first_etcd, client(place) as second_etcd:
        first = Registration(first_etcd, key, b"first", LEASE_S)
        keeping = asyncio.ensure_future(first.run())
        await asyncio.wait_for(first.there.wait(), WAIT_S)
        with pytest.raises(Superseded, match=r"another process has .*/a in etcd, and keeps it"):
            await asyncio.wait_for(Registration(second_etcd, key, b"second", LEASE_S).run(), WAIT_S)
        assert (await second_etcd.list(key))[0] == {key: b"first"}

        third = Registration(second_etcd, key, b"third", LEASE_S)
        waiting = asyncio.ensure_future(third.run())
        keeping.cancel()  # it dies: nobody revokes its lease

        await asyncio.wait_for(third.there.wait(), WAIT_S)
        assert (await first_etcd.list(key))[0] == {key: b"third"}
        waiting.cancel()
        await asyncio.gather(keeping, waiting, return_exceptions=True)
        await third.end()


# --- clusters ---


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


async def test_node_that_neither_dies_nor_keeps_its_lease_alive_is_gone(cluster: Cluster) -> None:
    await start(cluster, decoders=2)
    await until(lambda: names(cluster.router, "decoder") == ["d0", "d1"], "both are there")
    await cluster.nodes.pop("d1").mailbox.close()  # its engine lives, and it would answer
    await until(lambda: names(cluster.router, "decoder") == ["d0"], "d1 is gone")
    await assert_serves(cluster)
    await cluster.presences.pop("d1").close()


async def test_etcd_restarted_nobody_is_missed(cluster: Cluster, server: EtcdServer) -> None:
    await start(cluster)
    gone: list[str] = []
    assert cluster.router is not None
    cluster.router.roster.on_gone(lambda member, why: gone.append(why))
    server.stop()
    await assert_serves(cluster)  # without it
    server.start()
    cluster.add(Decoder, "d1")
    await until(lambda: "d1" in names(cluster.router, "decoder"), "who comes later is seen")
    assert not gone
    await assert_serves(cluster, seed=4)


async def test_etcd_that_lost_its_data_hears_it_again(cluster: Cluster, server: EtcdServer) -> None:
    await start(cluster)
    gone: list[str] = []
    assert cluster.router is not None
    cluster.router.roster.on_gone(lambda member, why: gone.append(why))
    server.stop()
    server.erase()
    server.start()
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

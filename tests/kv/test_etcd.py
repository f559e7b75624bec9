"""A client of a real etcd, and records in it: leases, members that fall silent, and what is no etcd."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import pytest

import crossrail as xr
from crossrail.kv import messages as m
from crossrail.kv.errors import Superseded
from crossrail.kv.etcd.client import Change, Etcd, EtcdError
from crossrail.kv.etcd.records import Place, Registration, Seal, follow
from tests.kv.conftest import until
from tests.support.etcd import ETCD
from tests.support.limits import WAIT_S

pytestmark = pytest.mark.skipif(ETCD is None, reason="no etcd here (Debian: etcd-server)")
GREEDY = m.Sampling(max_tokens=8, ignore_end=True)
LEASE_S = 2.0


@asynccontextmanager
async def client(place: Place) -> AsyncIterator[Etcd]:
    async with Etcd(place.endpoints) as etcd:
        yield etcd


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


async def test_name_of_ours_whose_lease_ends_meanwhile_is_still_ours(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer to an earlier put was lost; its key goes at whatever moment."""
    async with client(place) as etcd:
        earlier, lease = await etcd.grant(30), await etcd.grant(30)
        await etcd.put_if_ours(place.nodes + "a", b"mine", earlier)
        ask = etcd._ask

        async def ask_and_expire(path: str, *more: Any) -> Any:
            answer = await ask(path, *more)
            if path == "kv/txn":
                await etcd.revoke(earlier)
            return answer

        monkeypatch.setattr(etcd, "_ask", ask_and_expire)
        assert await etcd.put_if_ours(place.nodes + "a", b"mine", lease)
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


NO_ETCD = [
    b"{}",
    b"[]",
    b'"yes"',
    b"no JSON",
    b'{"error": "no backend", "code": "SERVICE_UNAVAILABLE"}',
    b'{"error": "no backend", "code": null}',
    b'{"error": "Not Found"}',
    b'{"error": "Not Found", "code": 404}',
]


@pytest.mark.parametrize("answer", NO_ETCD)
async def test_whoever_is_no_etcd_is_passed_over(place: Place, answer: bytes) -> None:
    async with impostor(answer) as endpoint:
        async with Etcd([endpoint]) as etcd:
            for question in (etcd.grant(5), etcd.keep_alive(1), etcd.list("/a/"), etcd.put_if_ours("/a/b", b"", 1)):
                with pytest.raises(EtcdError, match=r"no member of etcd answers: .* is not etcd's: 200 OK"):
                    await question
        async with Etcd([endpoint, *place.endpoints]) as etcd:
            assert await etcd.grant(5) > 0


@pytest.mark.parametrize(
    "answer",
    [
        b'{"error": "no leader", "message": "no leader", "code": 14}',
        b'{"error": {"grpc_code": 14, "http_code": 503, "message": "no leader"}}',  # of a stream
    ],
)
async def test_etcd_that_cannot_answer_now_is_passed_over(place: Place, answer: bytes) -> None:
    async with impostor(answer) as endpoint, Etcd([endpoint]) as etcd:
        with pytest.raises(EtcdError, match=r"no member of etcd answers: .*: .*no leader"):
            await etcd.keep_alive(1)
        async with Etcd([endpoint, *place.endpoints]) as other:
            assert not await other.keep_alive(1)


async def test_absence_is_told_once_for_each_reason_and_when_it_is_over(
    place: Place, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("crossrail.kv.etcd.records._RETRY_S", 0.01)
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


@pytest.mark.parametrize(
    "url",
    [
        "http://a:1",
        "etcd://a",
        "etcd://a:1,b",
        "etcd://a:1/b/c",
        "etcd:///x",
        "etcd://[::1/x",
        "etcd://a:65536",
        "etcd://:1/x",
        "etcd://a:1#b",
    ],
)
def test_place_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(xr.UsageError, match="must be etcd://HOST:PORT"):
        Place.from_url(url)


def test_place_from_url() -> None:
    assert Place.from_url("etcd://a:1,b:2/blue") == Place(("a:1", "b:2"), "blue")
    assert Place.from_url("etcd://a:1").nodes == "/crossrail/kv/default/nodes/"
    assert Place.from_url("etcd://[::1]:2379/b").endpoints == ("[::1]:2379",)


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

"""Requests that wait for a decoder: whose turn it is, and what that costs where many wait."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from crossrail.control.mailbox import NoAnswer
from crossrail.control.wire import Wire
from crossrail.kv import messages as m
from crossrail.kv.errors import Overloaded
from crossrail.kv.router import known_room, waiting
from crossrail.kv.router.known_room import Refusal
from crossrail.kv.router.membership import Roster
from crossrail.kv.router.placement import Placement
from crossrail.kv.router.requests import Running
from crossrail.kv.router.router import Router, RouterOptions
from crossrail.kv.router.waiting import Waiter, Waiting
from tests.kv.conftest import until
from tests.support.kv_cluster import LAYOUT, node_record
from tests.support.limits import WAIT_S

SHORT = m.Sampling(max_tokens=3)


class NoWire(Wire):
    """Nothing goes out, and nothing comes."""

    address = b"router"
    packet_bytes_max = 60_000

    def identity(self, address: bytes) -> bytes:
        return address.ljust(16, b"_")[:16]

    async def send(self, to: bytes, packet: bytes) -> None:
        pass

    async def packets(self) -> AsyncIterator[tuple[bytes, bytes]]:
        await asyncio.Event().wait()
        yield b"", b""

    def is_lost(self, address: bytes) -> bool:
        return False

    async def until_lost(self, address: bytes) -> None:
        await asyncio.Event().wait()

    def revive(self, address: bytes) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass
class Town:
    """A router whose decoders d0, d1 ... have so many places each, and end nothing by themselves. No node is missed."""

    router: Router
    places: dict[bytes, int] = field(default_factory=dict)
    tokens_max: int = 1 << 20  # that a request may have at any of them
    offered: list[str] = field(default_factory=list)
    started: list[str] = field(default_factory=list)
    where: dict[str, tuple[bytes, int]] = field(default_factory=dict)
    is_silent: set[bytes] = field(default_factory=set)

    async def ask(self, to: bytes, question: Any, *_: object) -> m.Message:
        if not isinstance(question, m.Start):
            return m.Taken()
        self.offered.append(question.request)
        await asyncio.sleep(0.001)
        if to in self.is_silent:
            await asyncio.Event().wait()
        if not self.places[to] or len(question.tokens) // 4 + question.sampling.max_tokens > self.tokens_max:
            return m.StartRefused(question.request, "full", busy=True)
        self.places[to] -= 1
        self.started.append(question.request)
        self.where[question.request] = (to, question.placement)
        return m.Started(question.request)

    def add(self, name: str, places: int, role: m.Role = "decoder") -> None:
        self.places[name.encode()] = places
        self.router.roster.join(node_record(name, role), m.Load(), asyncio.get_running_loop().time() + 1e6)
        self.router._waiting.news(name.encode())

    async def beat(self, name: str, places: int = 0) -> None:
        """Its heartbeat; so many more places are free."""
        self.places[name.encode()] += places
        await self.router._on_heartbeat(name.encode(), m.Heartbeat(name, m.Load()))

    async def end(self, request: str) -> None:
        """It has generated what it was to, and has its place no longer."""
        address, placement = self.where.pop(request)
        self.places[address] += 1
        self.router._on_tokens(address, m.Tokens(request, 0, m.pack_tokens([1]), m.End("length"), placement))

    def come(self, name: str, tokens: int = 1) -> asyncio.Future[list[int]]:
        async def complete() -> list[int]:
            prompt = np.arange(tokens, dtype=np.int32) + sum(name.encode())  # no two have a prefix in common
            chunks = self.router.complete(prompt, SHORT, request=name)
            return [token async for chunk in chunks for token in chunk.tokens]

        return asyncio.ensure_future(complete())


@pytest.fixture
def refusals_are_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until there is news: none is tried again. To be asked for before a town."""
    monkeypatch.setattr(waiting, "_LOOK_S", WAIT_S)


@pytest.fixture
async def town() -> AsyncIterator[Town]:
    mailbox = m.mailbox(NoWire(), b"s3cret")
    made = Town(Router("router", mailbox, RouterOptions(queue_s=WAIT_S, requests_max=5000)))
    mailbox.ask = made.ask  # type: ignore[method-assign, assignment]
    made.router.start()
    yield made
    await made.router.close()


async def come_all(town: Town, names: list[str]) -> list[asyncio.Future[list[int]]]:
    """One behind the other."""
    clients = []
    for name in names:
        clients.append(town.come(name))
        await until(lambda name=name: name in town.router._running, "it has come")
    return clients


def is_quiet(town: Town) -> bool:
    waiting = town.router._waiting
    return not waiting._open and not any(room.offers for room in waiting._rooms.values())


async def test_equal_requests_start_in_the_order_in_which_they_came(refusals_are_believed: None, town: Town) -> None:
    """Also those that come the moment that a place is free."""
    town.add("d0", 1)
    town.add("d1", 1)
    names = [f"r{n:03}" for n in range(60)]
    clients = await come_all(town, names[:40])
    for place in range(len(names)):
        # Who is offered to a decoder that is full would miss his turn at the other one.
        await until(lambda: is_quiet(town), "nothing is on its way, or about to be")
        late = names[40 + place : 41 + place]
        await town.end(town.started[place])
        clients += [town.come(request) for request in late]
        await until(lambda place=place: len(town.started) >= min(place + 3, len(names)), "the next one starts")
    assert await asyncio.gather(*clients) == [[1]] * len(names)
    assert town.started == names


async def test_smaller_ones_pass_where_a_larger_one_has_no_room_and_equal_ones_do_not(town: Town) -> None:
    town.tokens_max = 20
    town.add("p", 0, "prefiller")
    town.add("d0", 3)
    large = town.come("large", 40)
    await until(lambda: town.offered == ["large"], "it is refused")
    equal = town.come("equal", 40)
    small = town.come("small", 10)
    await until(lambda: town.started == ["small"], "the small one starts")
    town.tokens_max = 100
    await town.beat("d0")
    await until(lambda: len(town.started) == 3, "all start")
    assert town.started == ["small", "large", "equal"]
    for name in town.started:
        await town.end(name)
    await asyncio.gather(large, equal, small)


async def test_request_whose_decoder_died_has_its_old_place(town: Town) -> None:
    town.add("d0", 1)
    first, *others = await come_all(town, ["r0", "r1", "r2"])
    await until(lambda: town.started == ["r0"], "the first has started")
    (member,) = town.router.roster.members("decoder")
    town.router.roster.remove(member, "it died")  # type: ignore[attr-defined]
    # Before that it has no place, and another decoder goes to those that wait.
    await until(lambda: "r0" in town.router._waiting._by_name, "it waits again")
    town.add("d1", 1)
    for name in ("r0", "r1", "r2"):
        await until(lambda name=name: name in town.where and town.where[name][0] == b"d1", "it is the next")
        # One that is refused just before this one ends would be passed by another whose offer arrives just after it.
        await until(lambda: is_quiet(town), "nothing is on its way")
        await town.end(name)
    assert await asyncio.gather(first, *others) == [[1]] * 3


async def test_change_costs_one_offer_however_many_wait(town: Town) -> None:
    town.add("d0", 0)
    clients = await come_all(town, [f"r{n}" for n in range(200)])
    await asyncio.sleep(0.3)
    before = len(town.offered)
    begun_s = time.monotonic()
    for _ in range(50):
        await town.beat("d0")
        await asyncio.sleep(0.005)
    expired = (time.monotonic() - begun_s) / 0.2 + 1
    assert len(town.offered) - before <= 50 + expired
    for client in clients:
        client.cancel()
    await asyncio.gather(*clients, return_exceptions=True)
    assert not town.router._waiting._by_name and not town.router._waiting._idle


@pytest.mark.parametrize("tokens", [1, 400])
async def test_one_that_is_tried_and_taken_opens_its_decoder_for_all(
    refusals_are_believed: None, town: Town, tokens: int
) -> None:
    """Though by then its own prompt is known to be there, whose room it needs no more."""
    town.add("d0", 0)
    town.add("p0", 0, "prefiller")
    clients = [town.come("r" + n * "x", tokens) for n in range(40)]
    await until(lambda: len(town.router._waiting._by_name) == 40 and is_quiet(town), "all wait")
    await town.beat("d0", places=40)  # its load is what it was: one may try
    await until(lambda: len(town.started) == 40, "all have started")
    for client in clients:
        client.cancel()
    await asyncio.gather(*clients, return_exceptions=True)


async def test_change_costs_no_look_at_all_who_wait(town: Town, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each decoder has its heartbeats, and none has room."""
    decoders, beats = 64, 5
    for index in range(decoders):
        town.add(f"d{index}", 0)
    clients = await come_all(town, [f"r{n}" for n in range(300)])
    await asyncio.sleep(1.0)
    looks: Counter[str] = Counter()

    def counted(name: str) -> None:
        call = getattr(Waiting, name)

        def look(*arguments: object) -> object:
            looks[name] += 1
            return call(*arguments)

        monkeypatch.setattr(Waiting, name, look)

    for name in ("_may_have", "_look_for"):
        counted(name)
    offered = len(town.offered)
    for _ in range(beats):
        for index in range(decoders):
            await town.beat(f"d{index}")
        await asyncio.sleep(0.2)
    changes = 2 * decoders * beats  # beats, and refusals that are believed no longer
    assert len(town.offered) - offered <= changes
    assert looks["_look_for"] <= changes
    assert looks["_may_have"] <= decoders * changes, "and not each of those that wait for each change"
    for client in clients:
        client.cancel()
    await asyncio.gather(*clients, return_exceptions=True)


class Crowd:
    """300 requests for model "full", whose decoders have refused, beside as many decoders of model "idle"."""

    decoders, waiters = 32, 300

    def __init__(self, stack: contextlib.ExitStack, prefillers: bool) -> None:
        self.stack = stack
        self.now_s = asyncio.get_running_loop().time()
        roster = Roster(WAIT_S)
        for model in ("full", "idle"):
            for index in range(self.decoders):
                record = structs.replace(node_record(f"{model}{index}"), model=model)
                roster.join(record, m.Load(), self.now_s)
            if prefillers:
                roster.join(structs.replace(node_record(f"p-{model}", "prefiller"), model=model), m.Load(), self.now_s)
        self.waiting = Waiting(roster, Placement(roster))
        self.waiting.prefillers_changed()
        for member in self.waiting._decoders():
            if member.record.model == "full":
                self.waiting._rooms[member.address].refused(1, Refusal("full"), self.now_s)
        self.crowd = [self.come("full", number) for number in range(self.waiters)]
        self.waiting._next()  # closes what is open since it is new

    def come(self, model: str, number: int) -> Waiter:
        prompt = np.arange(40, dtype=np.int32)
        running = Running(f"r{number}", prompt, SHORT, [], self.now_s + WAIT_S, model, number)
        return self.stack.enter_context(self.waiting.queued(running, self.now_s))


@pytest.mark.parametrize("what", ["refused", "come", "come-elsewhere", "keep"])
async def test_decoders_that_do_not_suit_those_who_wait_cost_no_look_at_each_of_them(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    with contextlib.ExitStack() as stack:
        town = Crowd(stack, prefillers=what != "keep")
        looks = 0
        suits = Waiting._suits

        def counted(*arguments: Any) -> bool:
            nonlocal looks
            looks += 1
            return suits(*arguments)

        monkeypatch.setattr(Waiting, "_suits", counted)
        found = None
        if what == "refused":
            town.waiting._look_for(town.crowd[100])
        elif what == "come":
            town.come("full", town.waiters)
        elif what == "come-elsewhere":
            found = town.come("idle", town.waiters)
        else:  # no prefiller has any of these models, so there is no decoder to be kept
            town.waiting._keep(town.now_s)
        turn = town.waiting._next()
        assert (turn and turn[0]) is found
        assert looks <= 2 * (town.waiters + 2 * town.decoders), "not all of them times decoders"


async def test_all_decoders_that_were_full_and_have_room_again_get_their_next(
    refusals_are_believed: None, town: Town
) -> None:
    """However many at once, and those first that nobody may have."""
    names = [f"d{n:02}" for n in range(40)]
    for name in names:
        town.add(name, 0)
    clients = await come_all(town, [f"r{n:02}" for n in range(30)])
    await until(lambda: is_quiet(town), "all are refused")
    for member in town.router.roster.members("decoder"):
        member.load = m.Load(draining=member.name in names[:20])
    for name in names:
        town.places[name.encode()] = 2
        town.router._waiting.news(name.encode())
    await until(lambda: len(town.started) == 30, "all have started")
    assert all(town.places[name.encode()] == 2 for name in names[:20])
    for request in list(town.where):
        await town.end(request)
    assert await asyncio.gather(*clients) == [[1]] * 30


async def test_silent_decoder_does_not_hold_the_first_that_waits_for_ever(town: Town) -> None:
    town.router.options = RouterOptions(queue_s=WAIT_S, answer_timeout_s=0.1)
    ask = town.ask

    async def in_time(to: bytes, question: Any, kinds: object, timeout_s: float) -> m.Message:
        try:
            return await asyncio.wait_for(ask(to, question), timeout_s)
        except asyncio.TimeoutError:
            raise NoAnswer("it said nothing") from None

    town.router.mailbox.ask = in_time  # type: ignore[method-assign, assignment]
    town.add("d0", 5)
    town.is_silent.add(b"d0")
    first = town.come("first")
    await until(lambda: town.offered == ["first"], "it is asked")
    town.add("d1", 1)
    await until(lambda: town.started == ["first"], "another one has it", 2.0)
    await town.end("first")
    assert await first == [1]


async def test_request_that_fits_only_where_nothing_is_taken_is_told_what_the_others_have(town: Town) -> None:
    """It waits, since a decoder that drains may be replaced by one that is as large."""
    town.router.options = RouterOptions(queue_s=0.5)
    town.add("p0", 0, "prefiller")
    for name, pages in (("small", 8), ("less", 4), ("large", 64)):
        town.places[name.encode()] = 1
        record = node_record(name, layout=replace(LAYOUT, pages=pages))
        town.router.roster.join(record, m.Load(draining=name == "large"), asyncio.get_running_loop().time() + 1e6)
    with pytest.raises(Overloaded) as error:
        await town.come("r1", 101)
    tokens = 101 + SHORT.max_tokens
    says = f"{tokens} tokens take 13 pages, and node 'small', the largest decoder that takes requests, has 8"
    assert says in str(error.value)
    assert not town.offered


async def test_decoder_that_is_kept_takes_requests(refusals_are_believed: None, town: Town) -> None:
    for name in ("d0", "d1"):
        town.add(name, 0)
    d0, d1 = town.router.roster.members("decoder")
    d0.load = m.Load(hangs=True)
    client = town.come("r0")
    await until(lambda: town.offered == ["r0"] and is_quiet(town), "it is refused")
    town.router._waiting._keep(asyncio.get_running_loop().time() + 2 * WAIT_S)
    assert [town.router._placement.kept_for(member) for member in (d0, d1)] == [None, "r0"]
    client.cancel()
    await asyncio.wait([client])


async def test_request_behind_others_is_told_so(town: Town) -> None:
    town.router.options = RouterOptions(queue_s=0.3, answer_timeout_s=0.1)
    town.add("d0", 5)
    town.is_silent.add(b"d0")
    before = [town.come(f"r{n}") for n in range(known_room._OFFERS)]
    await until(lambda: len(town.offered) == known_room._OFFERS, "as many as may be are on their way to it")
    with pytest.raises(Overloaded, match="requests that came before have their turn first"):
        await town.come("late")
    for client in before:
        client.cancel()
    await asyncio.wait(before)


@pytest.mark.parametrize("places", [0, 3])
async def test_request_that_may_not_wait_is_offered_once_to_who_may_have_room(town: Town, places: int) -> None:
    town.router.options = RouterOptions(queue_s=0.0)
    for name in ("d0", "d1", "d2"):
        town.add(name, 0)
    town.places[b"d2"] = places
    clients = [town.come(f"r{n}") for n in range(3)]
    if places:
        await until(lambda: len(town.started) == 3, "all are taken")
        for name in list(town.where):
            await town.end(name)
    ends = await asyncio.gather(*clients, return_exceptions=True)
    assert all(end == [1] if places else isinstance(end, Overloaded) for end in ends)

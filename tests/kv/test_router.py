"""A router at work: nodes here are scripts, and the network is in memory."""

import asyncio
import random
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import numpy as np
import pytest

import crossrail as xr
from crossrail.kv import messages as m
from crossrail.kv.errors import Overloaded, Unavailable
from crossrail.kv.router import redispatch
from crossrail.kv.router.membership import Roster
from crossrail.kv.router.requests import Chunk
from crossrail.kv.router.router import Router
from tests.kv.conftest import until
from tests.kv.scripts import OPTIONS, SHORT, Town, prefiller_of
from tests.support.kv_cluster import LAYOUT, node_record, prompt_of
from tests.support.kv_net import MemoryWire, Net
from tests.support.limits import WAIT_S
from tests.support.seeds import Seed


async def test_busy_decoder_is_passed_over(town: Town) -> None:
    busy, free = await town.add("a", "busy"), await town.add("b", load=m.Load(queued_tokens=1000))
    assert await town.complete() == [1, 2, 3]
    assert len(busy.started) == len(free.started) == 1


async def test_all_busy_is_overloaded_and_says_what_the_last_said(town: Town) -> None:
    await town.add("a", "busy")
    with pytest.raises(Overloaded, match=rf"no node took the request within {OPTIONS.queue_s:g} s.*told to say busy"):
        await town.complete()
    assert town.router.requests == 0


async def test_requests_that_wait_for_room_do_not_all_ask_after_each_change(town: Town) -> None:
    town.router.options = replace(OPTIONS, queue_s=WAIT_S, answer_timeout_s=WAIT_S)
    town.patient()
    full = await town.add("d0", "busy")
    clients = [asyncio.ensure_future(town.complete(seed)) for seed in range(200)]
    await until(lambda: town.router.requests == 200 and full.started, "all wait")
    asked = len(full.started)
    for _ in range(20):
        await asyncio.sleep(0.02)
        await full.mailbox.ask(town.router.mailbox.address, m.Heartbeat("d0", m.Load()), m.HeartbeatTaken, WAIT_S)
    assert len(full.started) - asked < 600, f"{len(full.started) - asked} offers for 20 changes"
    full.answer = "serve"
    assert await asyncio.wait_for(asyncio.gather(*clients), WAIT_S) == [[1, 2, 3]] * 200


async def test_what_no_decoder_could_do_is_asked_of_one_only(town: Town) -> None:
    scripts = [await town.add(name, "never") for name in ("a", "b")]
    with pytest.raises(xr.UsageError, match="told to say never"):
        await town.complete()
    assert sum(len(script.started) for script in scripts) == 1


async def test_large_request_does_not_wait_behind_small_ones_for_ever(town: Town) -> None:
    """Small ones are always under way, and the large one fits beside none of them."""
    town.router.options = replace(OPTIONS, queue_s=4.0, answer_timeout_s=WAIT_S)
    town.patient()
    script = await town.add("a")
    running: set[str] = set()

    async def on_start(router: bytes, start: m.Start) -> m.Message:
        is_large = start.sampling.max_tokens > SHORT.max_tokens
        if running and (is_large or len(running) == 4):
            return m.StartRefused(start.request, f"{len(running)} are under way", busy=True)
        running.add(start.request)
        script.mailbox.spawn(serve(router, start), "a script")
        return m.Started(start.request)

    async def serve(router: bytes, start: m.Start) -> None:
        await asyncio.sleep(0.02)
        running.discard(start.request)
        await script.serve(router, start.request, start.placement)

    async def small_ones() -> None:
        while not large.done():
            assert await town.complete() == [1, 2, 3]

    async def large_one() -> list[int]:
        chunks = town.router.complete(prompt_of(1), m.Sampling(max_tokens=500))
        return [token async for chunk in chunks for token in chunk.tokens]

    script.mailbox.handle(m.Start, on_start)
    large: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
    others = [asyncio.ensure_future(small_ones()) for _ in range(8)]
    await until(lambda: len(running) == 4, "it is full")
    large = asyncio.ensure_future(large_one())
    assert await large == [1, 2, 3]
    await asyncio.gather(*others)


async def test_one_of_several_decoders_is_kept_and_another_serves_on(town: Town) -> None:
    town.router.options = replace(OPTIONS, queue_s=8.0)
    town.patient()
    await town.add("a", "busy")
    large = asyncio.ensure_future(town.complete())
    await until(lambda: bool(town.router._placement._kept), "a decoder is kept")
    town.router.options = replace(OPTIONS, queue_s=0.0)
    with pytest.raises(Overloaded, match="node 'a' is kept for a request that has waited longer"):
        await town.complete()
    await town.add("b")
    assert await town.complete() == await large == [1, 2, 3]
    assert not town.router._placement._kept


async def test_what_only_one_decoder_has_pages_for_goes_there(town: Town) -> None:
    refusing = await town.add("a", "never", layout=replace(LAYOUT, pages=4))
    taking = await town.add("b", load=m.Load(queued_tokens=1000))
    chunks = town.router.complete(prompt_of(1), m.Sampling(max_tokens=400))
    assert [token async for chunk in chunks for token in chunk.tokens] == [1, 2, 3]
    assert len(taking.started) == 1 and not refusing.started


async def test_silent_decoder_is_passed_over_and_what_it_begins_later_is_not_wanted(town: Town) -> None:
    late, other = await town.add("a", "late"), await town.add("b", load=m.Load(queued_tokens=1000))
    assert await town.complete() == [1, 2, 3]
    assert len(other.started) == 1
    for _ in range(200):
        if late.unwanted and late.cancelled:
            break
        await asyncio.sleep(0.02)
    assert late.unwanted == late.cancelled == late.started


async def test_request_that_was_only_offered_to_a_decoder_that_dies_goes_to_another(town: Town) -> None:
    late, other = await town.add("a", "late"), await town.add("b", load=m.Load(queued_tokens=1000))
    running = asyncio.ensure_future(town.complete())
    while not late.started:
        await asyncio.sleep(0.001)
    assert isinstance(late.mailbox.wire, MemoryWire)
    late.mailbox.wire.kill()
    assert await running == [1, 2, 3] and len(other.started) == 1
    assert [member.name for member in town.router.roster.members("decoder")] == ["b"]


@pytest.mark.parametrize("drains", [False, True])
async def test_request_that_waits_for_a_decoder_hears_that_the_router_is_closing(town: Town, drains: bool) -> None:
    town.router.options = replace(OPTIONS, queue_s=2 * WAIT_S)
    waiting = asyncio.create_task(town.ends())
    await until(lambda: town.router.requests == 1, "it waits")
    if drains:
        assert not await town.router.drain(0.3)
    await town.router.close()
    assert await asyncio.wait_for(waiting, 1.0) == "the router is closing"


@pytest.mark.parametrize("load", [m.Load(draining=True), m.Load(hangs=True)], ids=["draining", "hanging"])
async def test_decoder_that_takes_no_requests_gets_nothing(town: Town, load: m.Load) -> None:
    idle = await town.add("a", load=load)
    await town.add("b", load=m.Load(queued_tokens=10_000))
    assert await town.complete() == [1, 2, 3] and idle.started == []


async def test_same_prefix_goes_where_it_was(town: Town) -> None:
    town.patient()
    scripts = [await town.add(name) for name in ("a", "b", "c")]
    fetched = prefiller_of(town, "p")
    town.router.roster.join(fetched, m.Load(), asyncio.get_running_loop().time() + 1e6)
    where: dict[int, set[str]] = {}
    for seed in (1, 2, 3, 1, 2, 3):
        before = {script.mailbox.address: len(script.started) for script in scripts}
        assert await town.complete(seed, count=1000) == [1, 2, 3]
        name = next(n for n, s in town.scripts.items() if len(s.started) > before[s.mailbox.address])
        where.setdefault(seed, set()).add(name)
    assert all(len(names) == 1 for names in where.values())


async def test_prefiller_found_for_a_request_whose_client_left_has_nothing_to_do(
    town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its decoder asks for another one, there is none, and the client leaves while the router waits for one."""
    monkeypatch.setattr(redispatch, "_SAME_AGAIN_S", WAIT_S)
    town.router.options = replace(OPTIONS, queue_s=WAIT_S)
    town.patient()
    script = await town.add("a", "pause")
    only = prefiller_of(town, "p")
    town.router.roster.join(only, m.Load(), asyncio.get_running_loop().time())
    client = asyncio.ensure_future(town.complete(count=1000))
    await script.paused.wait()
    await until(lambda: town.router._placement._sent[only.address] == 1000, "it counts as the prefiller's work")

    lost = m.PrefillerLost(script.started[0], 1, "p", only.address, "it died")
    asked = asyncio.ensure_future(script.mailbox.ask(town.router.mailbox.address, lost, m.Reassigned, WAIT_S))
    await until(lambda: town.router.mailbox._being_answered, "the router looks for another one")
    client.cancel()

    assert (await asked).prefiller is None
    assert town.router._placement._sent[only.address] == 0
    script.go_on.set()


async def test_prefiller_that_was_missed_and_is_back_has_only_what_it_was_given_since(town: Town) -> None:
    town.patient()
    script = await town.add("a", "pause")
    sent, back = town.router._placement._sent, prefiller_of(town, "p")
    clients = []
    for count in (1000, 500):
        town.router.roster.join(back, m.Load(), asyncio.get_running_loop().time())
        clients.append(asyncio.ensure_future(town.complete(count=count)))
        await until(lambda count=count: sent[back.address] == count, "it counts as the prefiller's work")
        if count == 1000:
            (member,) = town.router.roster.members("prefiller")
            town.router.roster.remove(member, "it was not heard from for a lease")
    script.go_on.set()
    assert await asyncio.gather(*clients) == [[1, 2, 3]] * 2
    assert sent[back.address] == 0


@pytest.mark.parametrize("role", ["prefiller", "decoder"])
async def test_nothing_is_kept_of_a_node_that_went_as_it_was_given_a_request(town: Town, role: m.Role) -> None:
    """Between the question to the decoder and its answer: whoever counts it as a member then never forgets it."""
    town.router.options = replace(OPTIONS, queue_s=WAIT_S, answer_timeout_s=WAIT_S)
    town.patient()
    script = await town.add("a")
    now_s = asyncio.get_running_loop().time()
    town.router.roster.join(prefiller_of(town, "p"), m.Load(), now_s)
    asked, goes_on = script.answer_when_told()
    client = asyncio.ensure_future(town.complete(count=1000))
    await asked.wait()
    (gone,) = town.router.roster.members(role)
    town.router.roster.remove(gone, "it was not heard from for a lease")
    goes_on.set()
    if role == "decoder":  # it goes on at another one
        await town.add("b")
    assert await client == [1, 2, 3]
    placement = town.router._placement
    assert gone.address not in placement._sent and gone.address not in placement._prefixes._nodes
    assert not any(placement._sent.values())


async def test_decoder_hears_the_end_of_a_request_whose_prefillers_all_gave_long_reasons(town: Town) -> None:
    town.router.options = replace(OPTIONS, attempts_max=1)
    town.patient()
    script = await town.add("a", "pause")
    client = asyncio.ensure_future(town.complete())
    await script.paused.wait()
    lost = m.PrefillerLost(script.started[0], 1, "p", b"elsewhere", "x" * 2000)
    answer = await script.mailbox.ask(town.router.mailbox.address, lost, m.Reassigned, WAIT_S)
    assert answer.prefiller is None
    assert answer.reason.startswith("1 attempts failed (prefillers that were tried: 1): xxx")
    script.go_on.set()
    assert await client == [1, 2, 3]


async def test_prefiller_that_was_heard_of_since_it_was_full_is_asked_before_a_better_one_that_was_not(
    town: Town,
) -> None:
    town.patient()
    script = await town.add("a", "pause")
    loop = asyncio.get_running_loop()
    nodes = {name: prefiller_of(town, name) for name in ("p1", "p2", "p3")}
    for name, node in nodes.items():
        town.router.roster.join(node, m.Load(queued_tokens=10_000 if name == "p3" else 0), loop.time())
    client = asyncio.ensure_future(town.complete(count=1000))
    await script.paused.wait()
    await until(lambda: town.router._placement._sent[nodes["p1"].address] == 1000, "the first one is asked")
    asked = []
    for attempt, name in ((1, "p1"), (2, "p2"), (3, "p3")):
        town.router.roster.excuse(1.0, loop.time())  # as when the router stood still, which tells nothing of room
        if name == "p3":
            town.router.roster.heartbeat("p2", nodes["p2"].address, m.Load(queued_tokens=100), loop.time())
        lost = m.PrefillerLost(script.started[0], attempt, name, nodes[name].address, "it is full", busy=True)
        answer = await script.mailbox.ask(town.router.mailbox.address, lost, m.Reassigned, WAIT_S)
        assert answer.prefiller is not None
        asked.append(answer.prefiller.node)
    assert asked == ["p2", "p3", "p2"]  # and not p1, which is the best of those that are full
    script.go_on.set()
    assert await client == [1, 2, 3]


async def test_prefiller_where_an_attempt_failed_is_asked_again_only_once_all_have_failed(
    town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much the others have to do, also when they have no room."""
    monkeypatch.setattr(redispatch, "_SAME_AGAIN_S", 0.01)
    town.patient()
    script = await town.add("a", "pause")
    nodes = {name: prefiller_of(town, name) for name in ("p1", "p2", "p3")}
    for name, node in nodes.items():
        load = m.Load(queued_tokens=10_000 if name == "p3" else 0)
        town.router.roster.join(node, load, asyncio.get_running_loop().time())
    client = asyncio.ensure_future(town.complete(count=1000))
    await script.paused.wait()
    asked = ["p1"]
    for attempt, busy in enumerate((False, False, True, True, False), 1):
        who = (asked[-1], nodes[asked[-1]].address)
        lost = m.PrefillerLost(script.started[0], attempt, *who, "it hangs, or is full", busy=busy)
        answer = await script.mailbox.ask(town.router.mailbox.address, lost, m.Reassigned, WAIT_S)
        assert answer.prefiller is not None
        asked.append(answer.prefiller.node)
    assert asked[:5] == ["p1", "p2", "p3", "p3", "p3"] and asked[5] in ("p1", "p2")
    script.go_on.set()
    assert await client == [1, 2, 3]


async def test_prefiller_whose_model_hangs_is_not_asked_though_it_has_nothing_to_do(town: Town) -> None:
    town.patient()
    script = await town.add("a")
    loads = {"p1": m.Load(hangs=True), "p2": m.Load(queued_tokens=10_000)}
    for name, load in loads.items():
        town.router.roster.join(prefiller_of(town, name), load, asyncio.get_running_loop().time())
    assert await town.complete(count=1000) == [1, 2, 3]
    assert script.prefillers == ["p2"]


@pytest.mark.parametrize("role", ["prefiller", "decoder"])
async def test_request_where_all_models_hang_is_told_so(town: Town, role: m.Role) -> None:
    town.patient()
    hangs = m.Load(hangs=True)
    await town.add("d1", load=hangs if role == "decoder" else None)
    p1 = prefiller_of(town, "p1")
    town.router.roster.join(p1, hangs if role == "prefiller" else m.Load(), asyncio.get_running_loop().time())
    with pytest.raises(Unavailable, match=f"no {role} takes requests: the model hangs at node '{role[0]}1'"):
        await town.complete(count=1000)


async def test_wait_for_the_decoders_pages_is_no_wait_for_a_prefiller_with_room(
    town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redispatch, "_SAME_AGAIN_S", 0.01)
    town.router.options = replace(OPTIONS, queue_s=1.0)
    town.patient()
    script = await town.add("a", "pause")
    only = prefiller_of(town, "p")
    town.router.roster.join(only, m.Load(), asyncio.get_running_loop().time())
    client = asyncio.ensure_future(town.complete(count=1000))
    await script.paused.wait()

    async def refused(attempt: int) -> m.Reassigned:
        lost = m.PrefillerLost(script.started[0], attempt, "p", only.address, "it is full", busy=True)
        return await script.mailbox.ask(town.router.mailbox.address, lost, m.Reassigned, WAIT_S)

    assert (await refused(1)).prefiller == only.ref
    await asyncio.sleep(1.2)  # for pages
    assert (await refused(2)).prefiller == only.ref
    attempt = 3
    while (answer := await refused(attempt)).prefiller is not None:
        attempt += 1
    assert answer.ends == "overloaded" and "no prefiller had room within 1 s" in answer.reason
    script.go_on.set()
    assert await client == [1, 2, 3]


@pytest.mark.parametrize("is_lost", [False, True])
@pytest.mark.parametrize("hangs_after", [0, 1])
async def test_request_goes_on_elsewhere_that_its_decoder_gives_up_before_its_answer_has_come(
    town: Town, hangs_after: int, is_lost: bool
) -> None:
    answer_s = OPTIONS.answer_timeout_s if is_lost else WAIT_S
    town.router.options = replace(OPTIONS, queue_s=WAIT_S, answer_timeout_s=answer_s)
    town.patient()
    town.router.roster.join(prefiller_of(town, "p"), m.Load(), asyncio.get_running_loop().time())
    first = await town.add("a", "hangs")
    first.hangs_after, first.is_lost = hangs_after, is_lost
    client = asyncio.ensure_future(town.complete())
    await asyncio.wait_for(first.refused.wait(), WAIT_S)
    second = await town.add("b")
    assert await asyncio.wait_for(client, WAIT_S) == [1, 2, 3]
    assert second.started == first.started[:1]
    # One that said nothing is passed over, as any that does not answer.
    assert town.router.counts["restarted"] == (0 if is_lost and not hangs_after else 1)


@pytest.mark.parametrize("how", ["goes on", "joins again"])
async def test_prefiller_that_failed_is_tried_again_once_it_is_back_and_the_other_is_full(
    town: Town, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(redispatch, "_SAME_AGAIN_S", 0.01)
    town.router.options = replace(OPTIONS, queue_s=WAIT_S)
    town.patient()
    script, roster, loop = await town.add("a", "pause"), town.router.roster, asyncio.get_running_loop()
    assert isinstance(roster, Roster)
    broken, full = prefiller_of(town, "p"), prefiller_of(town, "q")
    roster.join(broken, m.Load(), loop.time())
    client = asyncio.ensure_future(town.complete(count=1000))
    await script.paused.wait()
    roster.join(full, m.Load(), loop.time())

    async def after(attempt: int, lost: m.NodeRecord, is_busy: bool) -> m.NodeRef | None:
        why = m.PrefillerLost(script.started[0], attempt, lost.node, lost.address, "no luck", busy=is_busy)
        return (await script.mailbox.ask(town.router.mailbox.address, why, m.Reassigned, WAIT_S)).prefiller

    assert await after(1, broken, is_busy=False) == full.ref
    roster.heartbeat("p", broken.address, m.Load(), loop.time())
    assert await after(2, full, is_busy=True) == full.ref  # nothing says that it would not fail again
    if how == "goes on":
        roster.heartbeat("p", broken.address, m.Load(hangs=True), loop.time())
        roster.heartbeat("p", broken.address, m.Load(), loop.time())
    else:
        roster.leave("p", broken.address)
        roster.join(broken, m.Load(), loop.time())
    assert await after(3, full, is_busy=True) == broken.ref
    assert await after(4, broken, is_busy=False) == full.ref
    assert await after(5, full, is_busy=True) == full.ref
    script.go_on.set()
    assert await client == [1, 2, 3]


async def test_prompt_that_fits_no_prefiller_is_refused_at_once_and_waits_where_one_that_fitted_has_gone(
    town: Town,
) -> None:
    town.router.options = replace(OPTIONS, queue_s=WAIT_S)
    town.patient()
    await town.add("a")
    small = node_record("small", "prefiller", town.net.wire("small").address)
    large = prefiller_of(town, "large")
    roster, loop = town.router.roster, asyncio.get_running_loop()
    assert isinstance(roster, Roster)
    roster.join(small, m.Load(), loop.time())
    words = "the 514 tokens of the prompt take 65 pages at prefiller 'small', which has 64, and no other has room for"
    with pytest.raises(xr.UsageError, match=words):
        await town.complete(count=514)
    assert await town.complete(count=513) == [1, 2, 3]

    roster.join(large, m.Load(draining=True), loop.time())  # it fits: another of its size may come
    waiting = asyncio.ensure_future(town.complete(count=514))
    await asyncio.sleep(0.05)
    roster.leave("large", large.address)
    town.router.options = replace(OPTIONS, queue_s=0.0)
    assert not waiting.done()
    roster.join(large, m.Load(), loop.time())
    assert await waiting == [1, 2, 3]
    roster.heartbeat("large", large.address, m.Load(draining=True), loop.time())
    with pytest.raises(Unavailable, match="pages for 513 tokens takes requests now, also not node 'large'"):
        await town.complete(count=514)


async def test_join_for_somebody_else_is_refused(town: Town) -> None:
    script = await town.add("a")
    stolen = m.Join(node_record("b", address=b"elsewhere"), m.Load())
    answer = await script.mailbox.ask(town.router.mailbox.address, stolen, m.JoinRefused, WAIT_S)
    assert "an address that is not its own" in answer.reason


async def test_decoder_that_is_frozen_for_a_lease_is_fenced_when_it_thaws(town: Town) -> None:
    script = await town.add("a", "pause")
    wire = script.mailbox.wire
    assert isinstance(wire, MemoryWire)
    running = asyncio.ensure_future(town.ends())
    await script.paused.wait()
    wire.freeze()
    why = f"its decoder is gone: node 'a' was not heard from for {OPTIONS.lease_s:g} s"
    assert why in await asyncio.wait_for(running, WAIT_S)
    wire.thaw()
    script.go_on.set()
    await asyncio.wait_for(script.refused.wait(), WAIT_S)
    assert script.unwanted == script.started
    heartbeat = m.Heartbeat("a", m.Load())
    answer = await script.mailbox.ask(town.router.mailbox.address, heartbeat, m.HeartbeatTaken, WAIT_S)
    assert not answer.member


async def test_decoder_whose_tokens_come_is_not_missed_for_its_heartbeats(town: Town) -> None:
    script = await town.add("a")  # sends no heartbeats
    script.pace_s = 0.8 * OPTIONS.lease_s
    assert await town.complete() == [1, 2, 3]
    assert not town.router.counts["restarted"]
    await until(lambda: not town.router.roster.members("decoder"), "one that says nothing later is missed")


async def test_request_without_room_ends_with_its_own_time(town: Town) -> None:
    await town.add("a", "busy")
    chunks = town.router.complete(prompt_of(1), SHORT, timeout_s=OPTIONS.queue_s / 3)
    (only,) = [chunk async for chunk in chunks]
    assert only.end is not None and only.end.reason == "deadline" and "told to say busy" in only.end.detail


async def test_request_ends_with_its_own_time_though_a_decoder_has_yet_to_answer(town: Town) -> None:
    town.router.options = replace(OPTIONS, queue_s=WAIT_S, answer_timeout_s=WAIT_S)
    town.patient()
    script = await town.add("a")
    asked, goes_on = script.answer_when_told()
    chunks = town.router.complete(prompt_of(1), SHORT, request="r1", timeout_s=OPTIONS.queue_s)
    (only,) = await asyncio.wait_for(_all(chunks), WAIT_S / 2)
    assert asked.is_set() and only.end == m.End("deadline", "node 'a' did not answer before its time was up")
    await until(lambda: script.cancelled == ["r1"], "it hears that nobody waits")
    goes_on.set()
    assert await asyncio.wait_for(town.complete(), WAIT_S / 2) == [1, 2, 3]  # nothing is held against it
    assert not any(town.router._placement._sent.values())


async def _all(chunks: AsyncIterator[Chunk]) -> list[Chunk]:
    return [chunk async for chunk in chunks]


async def test_router_that_stood_still_for_a_lease_misses_nobody_for_that(town: Town) -> None:
    await town.add("a")

    time.sleep(2 * OPTIONS.lease_s)  # noqa: ASYNC251  # the loop, with all that is on it
    await asyncio.sleep(3 * OPTIONS.sweep_s)

    assert [member.name for member in town.router.roster.members("decoder")] == ["a"]
    await until(lambda: not town.router.roster.members("decoder"), "one that says nothing later is missed")


async def test_tokens_of_a_stranger_are_not_taken(town: Town) -> None:
    await town.add("a", "pause")
    stranger = await town.add("b", load=m.Load(draining=True))
    running = asyncio.ensure_future(town.complete())
    while not town.scripts["a"].started:
        await asyncio.sleep(0.001)
    forged = m.Tokens(town.scripts["a"].started[0], 0, m.pack_tokens([9, 9]), m.End("length"))
    assert not (await stranger.mailbox.ask(town.router.mailbox.address, forged, m.Taken, WAIT_S)).wanted
    town.scripts["a"].go_on.set()
    assert await running == [1, 2, 3]


def test_names_of_requests_differ_between_routers(seed: Seed) -> None:
    net = Net(random.Random(seed.number()))
    routers = [Router("same", m.mailbox(net.wire("same"), b"s3cret")) for _ in range(2)]
    names = [router.new_name() for router in routers for _ in range(100)]
    assert len(set(names)) == 200 and np.unique([len(name) for name in names]).max() <= 128

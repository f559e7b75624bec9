"""Several routers at a time, over the same nodes; and some of them gone."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from crossrail.kv import messages as m
from crossrail.kv.errors import DuplicateRequest, Overloaded
from crossrail.kv.nodes import decoder as decoder_module
from crossrail.kv.nodes import to_router
from crossrail.kv.nodes.decoder import Decoder
from crossrail.kv.nodes.prefiller import Prefiller
from crossrail.kv.router.router import RouterOptions
from tests.kv.conftest import quiet, start, until
from tests.kv.steps import (
    GREEDY,
    PROMPT,
    SLOW_S,
    assert_still_serves,
    hold,
    jobs,
    prefiller,
    reach,
    under_way,
)
from tests.support.kv_cluster import LAYOUT, NODE, ROUTER, Cluster, monolithic, prompt_of
from tests.support.limits import WAIT_S


def second_router(cluster: Cluster, options: RouterOptions = ROUTER) -> Cluster:
    """That of another, whose nodes are those of this one, from now on."""
    second = Cluster(router_options=options)
    second.add_router("router-2")
    cluster.also = [second.where]
    return second


async def both_joined(cluster: Cluster) -> None:
    """The nodes of both routers, each of them."""
    for node in cluster.nodes.values():
        await asyncio.wait_for(node.links[1].joined.wait(), WAIT_S)


async def test_two_routers_share_nodes(cluster: Cluster) -> None:
    second = second_router(cluster)
    await start(cluster, token_s=SLOW_S / 10)
    await both_joined(cluster)
    prompts = [prompt_of(50 + n, seed=n) for n in range(8)]
    sides = [cluster, second] * 4
    results = await asyncio.gather(*(side.complete(p, GREEDY) for side, p in zip(sides, prompts, strict=True)))
    for prompt, (tokens, end) in zip(prompts, results, strict=True):
        assert tokens == await monolithic(prompt, GREEDY), end
    await quiet(cluster)
    await second.close()


async def test_cancel_of_another_router_ends_nothing(cluster: Cluster) -> None:
    """As of one whose Start of this name was not answered in time."""
    second = Cluster()
    router = second.add_router("router-2")
    await start(cluster, token_s=SLOW_S)
    client = asyncio.ensure_future(cluster.complete(PROMPT, GREEDY, request="r1"))
    await until(lambda: cluster.nodes["d0"].load().requests, "the decoder has it")
    cancel = m.Cancel("r1", "it was given to another decoder")
    assert not (await router.mailbox.ask(cluster.nodes["d0"].mailbox.address, cancel, m.Taken, WAIT_S)).wanted
    tokens, end = await client
    assert tokens == await monolithic(PROMPT, GREEDY), end
    await quiet(cluster)
    await second.close()


async def test_name_that_was_used_at_another_router_is_told_as_such(cluster: Cluster) -> None:
    second = second_router(cluster)
    await start(cluster, token_s=SLOW_S)
    await both_joined(cluster)
    first = asyncio.ensure_future(cluster.complete(PROMPT, GREEDY, request="r1"))
    await until(lambda: cluster.nodes["d0"].load().requests, "the decoder has it")
    with pytest.raises(DuplicateRequest, match="'r1' is or was under way at node 'd0'"):
        await second.complete(PROMPT, GREEDY, request="r1")
    assert (await first)[0] == await monolithic(PROMPT, GREEDY)
    with pytest.raises(DuplicateRequest, match="'r1' is or was under way at node 'd0'"):
        await second.complete(PROMPT, GREEDY, request="r1")
    await quiet(cluster)
    await second.close()


@pytest.mark.parametrize("leaves", [False, True], ids=["both stay", "one leaves"])
async def test_one_name_at_two_routers_is_two_requests_at_a_prefiller(cluster: Cluster, leaves: bool) -> None:
    """As of a proxy that repeats a request, with its X-Request-Id, at another router: each has a decoder of its own."""
    second = Cluster(layout=LAYOUT)
    router = second.add_router("router-2")
    await start(cluster, token_s=SLOW_S)
    cluster.also = [second.where]
    prefiller(cluster).add_link(second.where)
    second.add(Decoder, "d1", SLOW_S)
    await asyncio.wait_for(second.joined(), WAIT_S)
    await until(lambda: router.roster.members("prefiller"), "the prefiller has joined both")
    first = asyncio.ensure_future(cluster.complete(PROMPT, GREEDY, request="r1"))
    await reach(cluster, "first layer posted")
    other = asyncio.ensure_future(second.complete(PROMPT[:90], GREEDY, request="r1"))
    await until(lambda: len(jobs(cluster)) == 2, "the prefiller has both")
    if leaves:
        other.cancel()
        await asyncio.gather(other, return_exceptions=True)
    else:
        assert (await other)[0] == await monolithic(PROMPT[:90], GREEDY)
    assert (await first)[0] == await monolithic(PROMPT, GREEDY)
    assert [each.router.counts["redispatched"] for each in (cluster, second)] == [0, 0]
    await quiet(cluster)
    await quiet(second)
    await second.close()


async def test_large_request_does_not_wait_for_ever_behind_small_ones_of_another_router(cluster: Cluster) -> None:
    cluster.router.options = replace(ROUTER, queue_s=WAIT_S)
    second = second_router(cluster, replace(ROUTER, queue_s=WAIT_S))
    await start(cluster, token_s=SLOW_S)
    await both_joined(cluster)
    large = prompt_of(LAYOUT.pages * LAYOUT.page_tokens - GREEDY.max_tokens, seed=99)
    longer = m.Sampling(max_tokens=40, ignore_end=True)

    async def small_ones(seed: int) -> None:
        prompt = prompt_of(80 + seed, seed)
        expected = await monolithic(prompt, longer)
        while not waiting.done():
            tokens, end = await second.complete(prompt, longer)
            assert tokens == expected, end

    waiting: asyncio.Future[tuple[list[int], m.End]] = asyncio.get_running_loop().create_future()
    others = [asyncio.ensure_future(small_ones(seed)) for seed in range(6)]
    await until(lambda: cluster.nodes["d0"].load().requests >= 3, "the decoder is full")
    waiting = asyncio.ensure_future(cluster.complete(large, GREEDY))
    tokens, end = await waiting
    assert tokens == await monolithic(large, GREEDY), end
    await asyncio.gather(*others)
    await quiet(cluster)
    await second.close()


async def test_room_kept_for_a_request_that_gave_up_is_soon_had_by_others(cluster: Cluster) -> None:
    cluster.router.options = replace(ROUTER, queue_s=1.0)
    second = second_router(cluster, replace(ROUTER, queue_s=WAIT_S))
    await start(cluster)
    await both_joined(cluster)
    decoder, long = cluster.nodes["d0"], m.Sampling(max_tokens=200, ignore_end=True)
    whole = prompt_of(LAYOUT.pages * LAYOUT.page_tokens - GREEDY.max_tokens)
    goes_on = hold(decoder)
    first = asyncio.ensure_future(second.complete(PROMPT, long))
    await until(lambda: decoder.load().requests, "it has a request")
    large = asyncio.ensure_future(cluster.complete(whole, GREEDY, request="large"))
    await until(lambda: decoder._kept_room._of, "room is kept for a large one")
    with pytest.raises(Overloaded):
        await large
    await until(lambda: not decoder._kept_room._of, "it is told", 1.0)
    assert not first.done()
    goes_on.set()
    assert (await second.complete(PROMPT, GREEDY, request="large"))[0] == await monolithic(PROMPT, GREEDY)
    await first
    await quiet(cluster)
    await second.close()


@pytest.mark.parametrize("starts", [False, True], ids=["client leaves", "starts elsewhere"])
async def test_decoder_hears_at_once_that_room_is_needed_no_longer(cluster: Cluster, starts: bool) -> None:
    cluster.router.options = replace(ROUTER, queue_s=4.0)
    second = second_router(cluster, replace(ROUTER, queue_s=WAIT_S))
    await start(cluster)
    await both_joined(cluster)
    decoder, long = cluster.nodes["d0"], m.Sampling(max_tokens=300, ignore_end=True)
    goes_on = hold(decoder)
    first = asyncio.ensure_future(second.complete(PROMPT, long))
    await until(lambda: decoder.load().requests, "it has a request")
    whole = prompt_of(LAYOUT.pages * LAYOUT.page_tokens - GREEDY.max_tokens)
    large = asyncio.ensure_future(cluster.complete(whole, GREEDY, request="large"))
    await until(lambda: decoder._kept_room._of, "room is kept for a large one")
    if starts:
        cluster.add(Decoder, "d1")
        await until(lambda: cluster.nodes["d1"].load().requests, "it starts elsewhere")
    else:
        await asyncio.sleep(0.1)  # it was refused, and waits
        large.cancel()
    await until(lambda: not decoder._kept_room._of, "it is told", 1.0)
    assert not first.done()
    goes_on.set()
    if starts:
        assert (await large)[0] == await monolithic(whole, GREEDY)
    await first
    await quiet(cluster)
    await second.close()


async def test_log_says_which_of_two_routers_is_lost(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    second = second_router(cluster)
    await start(cluster)
    await both_joined(cluster)
    await second.close()
    await until(lambda: "node d0 has lost router 'router-2', and keeps trying: " in caplog.text, "it says so")
    assert "node d0 has lost router 'router'" not in caplog.text
    await assert_still_serves(cluster)


async def test_what_ran_for_a_router_that_is_gone_takes_no_place_of_others_once_it_has_ended(cluster: Cluster) -> None:
    """Its end is kept for the next router at that URL, which may never come."""
    second = second_router(cluster, replace(ROUTER, queue_s=WAIT_S / 2))
    cluster.node_options = replace(NODE, requests_max=2)
    await start(cluster, token_s=SLOW_S)
    await both_joined(cluster)
    decoder = cluster.nodes["d0"]
    clients = [asyncio.ensure_future(cluster.complete(PROMPT, GREEDY, request=name)) for name in ("r1", "r2")]
    await until(lambda: decoder.load().requests == 2, "its places are taken")
    await cluster.close_router()
    await asyncio.gather(*clients)
    assert (await second.complete(PROMPT, GREEDY))[0] == await monolithic(PROMPT, GREEDY)
    await until(lambda: not decoder.load().requests and len(decoder._servings) == 2, "two ends are left to be told")
    assert not decoder.load().queued_tokens
    router = cluster.add_router("router-again")
    await until(lambda: all((found := router.adopted(r)) and found.end for r in ("r1", "r2")), "both are told")
    await quiet(cluster)
    await second.close()


@asynccontextmanager
async def router_and_prefiller_gone(cluster: Cluster, stands: bool = False) -> AsyncIterator[Cluster]:
    """Of a request r1 at d0, at once, as of one host. Another router is there, in what this yields, and then p1.

    stands: the router is there, and says nothing, until this context ends.
    """
    second = second_router(cluster, replace(ROUTER, queue_s=WAIT_S))
    client = await under_way(cluster, "running", request="r1")
    await both_joined(cluster)
    thawed = asyncio.Event()
    if stands:
        mailbox = cluster.router.mailbox
        answer = mailbox._answer

        async def late_answer(*arguments: Any) -> None:
            await thawed.wait()
            await answer(*arguments)

        mailbox._answer = late_answer
    else:
        await cluster.close_router()
    await cluster.kill("p0")
    joined = cluster.add(Prefiller, "p1").links[1].joined
    await asyncio.wait_for(joined.wait(), WAIT_S)
    yield second
    thawed.set()
    tokens, end = await client
    assert not stands or tokens == await monolithic(PROMPT, GREEDY), end
    await quiet(cluster)
    await second.close()


async def test_request_without_router_and_prefiller_holds_no_pages_and_goes_on_with_the_next(cluster: Cluster) -> None:
    async with router_and_prefiller_gone(cluster) as second:
        large = prompt_of(LAYOUT.pages * LAYOUT.page_tokens - GREEDY.max_tokens, seed=2)
        tokens, end = await second.complete(large, GREEDY)
        assert tokens == await monolithic(large, GREEDY), end
        router = cluster.add_router("router-again")
        await until(lambda: (found := router.adopted("r1")) and found.end, "it ends")
        assert router.adopted("r1").tokens == await monolithic(PROMPT, GREEDY), router.adopted("r1").end


async def test_request_without_router_and_prefiller_ends_when_no_router_comes(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(to_router, "_ROUTER_GONE_S", 2.0)
    async with router_and_prefiller_gone(cluster):
        serving = cluster.nodes["d0"]._servings["r1"]
        await until(lambda: serving.end, "it ends")
        assert serving.end.detail.startswith("no router for 2 s after its prefiller was lost: ")
        await until(lambda: not cluster.nodes["d0"]._servings, "nothing is kept of it")


async def test_request_whose_router_stands_still_holds_no_pages_without_a_prefiller(cluster: Cluster) -> None:
    async with router_and_prefiller_gone(cluster, stands=True) as second:
        large = prompt_of(LAYOUT.pages * LAYOUT.page_tokens - GREEDY.max_tokens, seed=2)
        tokens, end = await second.complete(large, GREEDY)
        assert tokens == await monolithic(large, GREEDY), end


async def test_request_whose_router_stands_still_asks_the_one_that_takes_its_place(cluster: Cluster) -> None:
    """Which has no word of the first one's: that still lives, and may go on one day."""
    cluster.router.options = replace(ROUTER, lease_s=0.5)
    first, client = cluster.router, await under_way(cluster, "running", request="r1")

    async def never(*_: Any) -> None:
        await asyncio.Event().wait()

    first.mailbox._answer = never
    await cluster.kill("p0")
    serving = cluster.nodes["d0"]._servings["r1"]
    await until(lambda: serving.reception is None, "it waits without pages")
    router = cluster.add_router("router-again")
    cluster.add(Prefiller, "p1")
    await until(lambda: (found := router.adopted("r1")) and found.end, "it ends")
    assert router.adopted("r1").tokens == await monolithic(PROMPT, GREEDY), router.adopted("r1").end
    await first.close()
    await client
    await assert_still_serves(cluster)


async def test_request_that_waits_for_the_word_of_a_router_that_is_gone_takes_no_place(cluster: Cluster) -> None:
    """Nor does it run beside as many as may, once it has the word of the next router."""
    cluster.node_options = replace(NODE, requests_max=1)
    async with router_and_prefiller_gone(cluster) as second:
        decoder = cluster.nodes["d0"]
        await until(lambda: decoder._servings["r1"].reception is None, "it has no pages")
        assert not decoder.load().requests and not decoder.load().queued_tokens
        long = m.Sampling(max_tokens=100, ignore_end=True)
        other = asyncio.ensure_future(second.complete(PROMPT[:50], long))
        await until(lambda: decoder.load().requests, "another runs in its place")
        router = cluster.add_router("router-again")
        await until(lambda: decoder.pages.lacking, "it is to go on")
        while not other.done():
            assert sum(serving.reception is not None for serving in decoder._servings.values()) <= 1
            await asyncio.sleep(0.002)
        assert (await other)[0] == await monolithic(PROMPT[:50], long)
        await until(lambda: (found := router.adopted("r1")) and found.end, "it ends")
        assert router.adopted("r1").tokens == await monolithic(PROMPT, GREEDY), router.adopted("r1").end


async def test_end_that_a_decoder_kept_no_longer_is_generated_anew(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for a router that stood still for more than a minute: it waits for what nobody will tell it."""
    monkeypatch.setattr(to_router, "_ROUTER_GONE_S", 0.5)
    cluster.router.options, cluster.router.roster.lease_s = replace(ROUTER, lease_s=0.5), WAIT_S
    client = await under_way(cluster, "running", request="r1")
    mailbox, decoder = cluster.router.mailbox, cluster.nodes["d0"]
    with monkeypatch.context() as away:
        away.setattr(mailbox, "_sort", lambda *_: None)
        await until(lambda: not decoder._servings, "it has ended, and nothing is kept of it")
        assert not decoder.links[0].joined.is_set()
    tokens, end = await asyncio.wait_for(client, WAIT_S)
    assert tokens == await monolithic(PROMPT, GREEDY), end
    assert cluster.router.counts["restarted"] == 1
    await assert_still_serves(cluster)


async def test_join_that_is_late_ends_nothing(cluster: Cluster) -> None:
    """It was sent before what runs now was placed."""
    await start(cluster, token_s=SLOW_S)
    decoder = cluster.nodes["d0"]
    client = asyncio.ensure_future(cluster.complete(PROMPT, GREEDY, request="r1"))
    await reach(cluster, "running")
    await decoder.mailbox.ask(
        cluster.router.mailbox.address, m.Join(decoder.record, decoder.load(), [], 1), m.Joined, WAIT_S
    )
    tokens, end = await client
    assert tokens == await monolithic(PROMPT, GREEDY), end
    assert not cluster.router.counts["restarted"]
    await quiet(cluster)


async def test_of_too_many_untold_ends_those_are_dropped_that_ended_first_and_have_no_router(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoder_module, "_UNTOLD_KEPT", 2)
    second = second_router(cluster)
    await start(cluster, token_s=SLOW_S)
    decoder = cluster.nodes["d0"]
    await both_joined(cluster)
    second.router.mailbox.handle(m.Tokens, never_taken)
    here = asyncio.ensure_future(second.complete(PROMPT[:50], GREEDY, request="told late"))
    await until(lambda: (found := decoder._servings.get("told late")) and found.end, "it has ended")
    names = ["long", "r2", "r3"]
    lengths = [m.Sampling(max_tokens=max_tokens, ignore_end=True) for max_tokens in (200, 8, 8)]
    clients = [
        asyncio.ensure_future(cluster.complete(PROMPT[:50], sampling, request=name))
        for name, sampling in zip(names, lengths, strict=True)
    ]
    await until(lambda: decoder._servings.keys() >= set(names), "all are there")
    await cluster.close_router()
    await asyncio.gather(*clients)
    await until(lambda: decoder._servings["long"].end, "the first one has ended last")
    await until(lambda: len(decoder._servings) == 2, "the others are dropped")
    assert decoder._servings.keys() == {"told late", "long"}
    here.cancel()
    await second.close()


async def never_taken(_: bytes, __: m.Tokens) -> m.Message:
    await asyncio.Event().wait()
    raise AssertionError

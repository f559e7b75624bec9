"""What a cluster has no room for, or does not know."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp
import numpy as np
import pytest

import crossrail as xr
from crossrail.kv import messages as m
from crossrail.kv.errors import DuplicateRequest, Overloaded, Unavailable, UnknownModel
from crossrail.kv.nodes.decoder import Decoder
from crossrail.kv.nodes.serving import Serving
from crossrail.kv.timeline import Timeline
from crossrail.kv.transfer.pages import PageState
from crossrail.kv.transfer.prefix import NO_NAMES
from crossrail.kv.transfer.reception import Reception
from tests.kv.asking import body
from tests.kv.conftest import quiet, start, until
from tests.kv.steps import GREEDY, PROMPT, SLOW_S, assert_still_serves, full_queue, prefiller
from tests.support.kv_cluster import LAYOUT, NODE, ROUTER, Cluster, monolithic, prompt_of
from tests.support.limits import WAIT_S


async def test_requests_over_the_limit_are_refused(cluster: Cluster) -> None:
    cluster.router.options = replace(ROUTER, requests_max=2)
    await start(cluster, token_s=SLOW_S)
    running = [asyncio.ensure_future(cluster.complete(prompt_of(50, seed=n), GREEDY)) for n in range(2)]
    await until(lambda: cluster.router.requests == 2, "two requests")
    with pytest.raises(Overloaded, match="at most 2 may be"):
        await cluster.complete(PROMPT, GREEDY)
    await asyncio.gather(*running)
    await assert_still_serves(cluster)


async def test_tokens_over_the_limit_are_refused(cluster: Cluster) -> None:
    cluster.router.options = replace(ROUTER, tokens_max=150)
    await start(cluster, token_s=SLOW_S)
    first = asyncio.ensure_future(cluster.complete(PROMPT, GREEDY))
    await until(lambda: cluster.router.requests == 1, "the first request")
    with pytest.raises(Overloaded, match="requests of 128 tokens are under way, at most 150 may be"):
        await cluster.complete(prompt_of(15), GREEDY)
    await asyncio.gather(first, cluster.complete(prompt_of(14), GREEDY))
    alone = prompt_of(200)
    assert (await cluster.complete(alone, GREEDY))[0] == await monolithic(alone, GREEDY)


async def test_what_a_busy_decoder_refuses_costs_no_known_pages(cluster: Cluster) -> None:
    await start(cluster)
    await cluster.complete(prompt_of(65), GREEDY)
    await quiet(cluster)
    decoder = cluster.nodes["d0"]
    known = decoder.pool.report().pages[PageState.CACHED]
    decoder.draining = True

    all_pages = m.Sampling(LAYOUT.pages * LAYOUT.page_tokens - 100)
    refused = m.Start("r2", m.pack_tokens(prompt_of(90, seed=5)), all_pages, WAIT_S, cluster.nodes["p0"].record.ref)
    answer = await cluster.router.mailbox.ask(decoder.mailbox.address, refused, m.StartRefused, WAIT_S)

    assert answer.busy and "is draining" in answer.reason
    assert decoder.pool.report().pages[PageState.CACHED] == known > 0


async def test_request_waits_for_pages_and_gets_them(cluster: Cluster) -> None:
    await start(cluster, token_s=SLOW_S / 4)
    prompts = [prompt_of(300, seed=n) for n in range(3)]  # 39 of 64 pages each: one at a time
    results = await asyncio.gather(*(cluster.complete(prompt, GREEDY) for prompt in prompts))
    for prompt, (tokens, _) in zip(prompts, results, strict=True):
        assert tokens == await monolithic(prompt, GREEDY)
    await quiet(cluster)


async def test_no_client_is_told_the_name_of_anothers_request(cluster: Cluster) -> None:
    """One that needs as much room as another that has just been refused is not even offered to the decoder."""
    await start(cluster, token_s=20 * SLOW_S)
    cluster.router.options = replace(ROUTER, queue_s=2.0)  # in which the decoder refuses the first of them
    running = asyncio.ensure_future(cluster.complete(prompt_of(300), GREEDY))
    await until(lambda: cluster.nodes["d0"].load().requests, "it has most of the pages")
    refused = await asyncio.gather(
        *(cluster.complete(prompt_of(290, seed=n), GREEDY, request=f"r{n}") for n in (2, 3, 4)), return_exceptions=True
    )
    for error in refused:
        assert isinstance(error, Overloaded)
        assert re.search(r"node 'd0': \d+ pages are needed beside 0 shared ones, 25 of 64 are free$", str(error))
    running.cancel()
    await assert_still_serves(cluster)


async def test_prompts_that_nobody_wants_keep_no_place_in_the_queue(cluster: Cluster) -> None:
    """While a long prompt is computed: a wave of clients that left would turn away those that come after it."""
    async with full_queue(cluster) as (first, *leaving):
        for client in leaving:
            client.cancel()
        await asyncio.wait(leaving)
        p0 = prefiller(cluster)
        await until(lambda: p0.load().requests == 1, "only the first one is left")
        assert p0.load().queued_tokens == len(PROMPT) - 1
        last = asyncio.ensure_future(cluster.complete(prompt_of(50, seed=4), GREEDY))
        await until(lambda: len(p0._queue) == 1, "another one has a place")
    assert (await first)[0] == await monolithic(PROMPT, GREEDY)
    assert (await last)[0] == await monolithic(prompt_of(50, seed=4), GREEDY)
    await assert_still_serves(cluster)


async def test_prompt_waits_for_room_in_a_full_queue_however_often_it_asks(cluster: Cluster) -> None:
    cluster.router.options = replace(ROUTER, attempts_max=1, queue_s=2 * WAIT_S)
    async with full_queue(cluster) as requests:
        late = asyncio.ensure_future(cluster.complete(prompt_of(50, seed=4), GREEDY))
        await until(lambda: cluster.router.counts["redispatched"] >= 2, "it has asked again, and again")
    for request in requests:
        assert (await request)[1].reason == "length"
    assert (await late)[0] == await monolithic(prompt_of(50, seed=4), GREEDY)
    await assert_still_serves(cluster)


async def test_prompt_without_a_prefiller_with_room_is_told_to_come_later(
    cluster: Cluster, url: str, client: aiohttp.ClientSession
) -> None:
    cluster.router.options = replace(ROUTER, queue_s=0.5)
    async with full_queue(cluster) as requests:
        async with client.post(url + "/v1/completions", json=body()) as response:
            assert response.status == 429 and response.headers["Retry-After"] == "1"
            error = (await response.json())["error"]
            assert (
                "no prefiller had room within 0.5 s" in error["message"]
                and "2 requests in its queue" in error["message"]
            )
        async with client.post(url + "/v1/completions", json=body(stream=True)) as response:
            assert response.status == 429
    await asyncio.gather(*requests)
    await assert_still_serves(cluster)


async def test_prompt_holds_no_pages_while_no_prefiller_has_room(cluster: Cluster) -> None:
    async with full_queue(cluster) as requests:
        decoder = cluster.nodes["d0"]
        held = decoder.pool.report().pages[PageState.FILLING]
        late = asyncio.ensure_future(cluster.complete(prompt_of(250, seed=4), GREEDY))
        await until(lambda: cluster.router.counts["redispatched"], "it was refused")
        all_others = m.Sampling((LAYOUT.pages - held) * LAYOUT.page_tokens - 1, ignore_end=True)
        one = prompt_of(1)  # which needs no prefiller
        assert (await cluster.complete(one, all_others))[0] == await monolithic(one, all_others)
        assert not late.done()
    for request in requests:
        assert (await request)[1].reason == "length"
    assert (await late)[0] == await monolithic(prompt_of(250, seed=4), GREEDY)
    await assert_still_serves(cluster)


@asynccontextmanager
async def without_pages(
    cluster: Cluster, name: str = "late", **options: float
) -> AsyncIterator[asyncio.Future[tuple[list[int], m.End]]]:
    """A prompt of 250 tokens that gave its pages back, and needs some again, which another request of d0 has until this
    context ends.
    """
    async with full_queue(cluster, queue_max=2, **options) as requests:
        late = asyncio.ensure_future(cluster.complete(prompt_of(250, seed=4), GREEDY, request=name))
        await until(lambda: cluster.router.counts["redispatched"], "it was refused")
        decoder, goes_on = cluster.nodes["d0"], asyncio.Event()
        run = decoder.model.step

        async def held_step(*arguments: Any) -> Any:
            if arguments[2] >= 200:  # position
                await goes_on.wait()
            return await run(*arguments)

        decoder.model.step = held_step
        other = asyncio.ensure_future(cluster.complete(prompt_of(1), m.Sampling(250, ignore_end=True)))
        await until(lambda: any(len(s.tokens) >= 200 for s in decoder._servings.values()), "pages are out")
    await until(lambda: decoder.pages.lacking, "there are no pages for it")
    yield late
    goes_on.set()
    await asyncio.gather(other, *requests)


async def test_prompt_that_gave_its_pages_back_has_some_again_before_what_is_new(cluster: Cluster) -> None:
    """Else small requests, which always fit, would keep it out."""
    async with without_pages(cluster) as late:
        small = asyncio.ensure_future(cluster.complete(prompt_of(1, seed=5), GREEDY))
        await until(
            lambda: any(room.said for room in cluster.router._waiting._rooms.values()), "the new one is refused"
        )
        assert not small.done()
    assert (await late)[0] == await monolithic(prompt_of(250, seed=4), GREEDY)
    assert (await small)[0] == await monolithic(prompt_of(1, seed=5), GREEDY)
    await assert_still_serves(cluster)


async def test_nothing_new_comes_between_two_requests_that_need_pages_again(cluster: Cluster) -> None:
    await start(cluster)
    decoder, loop = cluster.nodes["d0"], asyncio.get_running_loop()
    assert isinstance(decoder, Decoder)
    everything = decoder.receiver.reserve("everything", LAYOUT.pages * LAYOUT.page_tokens)
    waiting = []
    for name in ("r1", "r2"):
        serving = Serving(name, decoder.links[0], b"", 1, prompt_of(9), GREEDY, Timeline(loop.time), None, NO_NAMES)
        waiting.append(asyncio.ensure_future(decoder.pages.of(serving)))
    await until(decoder.pages._turn.locked, "they wait")
    reserve, said = decoder.pages.reserve, list[str]()

    def reserve_and_look(*arguments: Any) -> Reception:
        reception = reserve(*arguments)
        loop.call_soon(lambda: said.append(decoder._too_busy()))  # before the next one knows that it is its turn
        return reception

    decoder.pages.reserve = reserve_and_look  # type: ignore[method-assign]
    everything.release()
    decoder.pages.report_room()
    for reception in await asyncio.gather(*waiting):
        reception.release()
    assert "has requests that wait for pages" in said[0]
    decoder.pages.reserve = reserve  # type: ignore[method-assign]
    await assert_still_serves(cluster)


async def test_pages_that_are_had_again_have_a_name_that_no_client_has(cluster: Cluster) -> None:
    longest = "é" * 128  # as many bytes as a name of pages may have
    async with without_pages(cluster, longest) as late:
        decoder, names = cluster.nodes["d0"], []
        assert isinstance(decoder, Decoder)
        reserve = decoder.pages.reserve

        def watched(name: str, *arguments: Any) -> Reception:
            names.append(name)
            return reserve(name, *arguments)

        decoder.pages.reserve = watched  # type: ignore[method-assign]
    assert (await late)[0] == await monolithic(prompt_of(250, seed=4), GREEDY)
    assert names and all(len(name) > 128 for name in names) and len(set(names)) == len(names)
    await assert_still_serves(cluster)


async def test_pages_of_what_is_not_delivered_yet_are_there_for_others(cluster: Cluster) -> None:
    held = asyncio.Event()
    async with without_pages(cluster) as late:
        decoder = cluster.nodes["d0"]
        assert isinstance(decoder, Decoder)
        await until(lambda: len(decoder._servings) == 2, "only the one that has its pages is left")
        offer = decoder._to_router._offer

        async def slow_offer(serving: Serving) -> bool:
            is_taken = await offer(serving)
            if serving.end_taken:
                await held.wait()
            return is_taken

        decoder._to_router._offer = slow_offer  # type: ignore[method-assign]
    assert (await asyncio.wait_for(late, WAIT_S))[0] == await monolithic(prompt_of(250, seed=4), GREEDY)
    held.set()
    await assert_still_serves(cluster)


async def test_prompt_without_pages_for_long_is_told_to_come_later(cluster: Cluster) -> None:
    async with without_pages(cluster, page_wait_s=3.0) as late:
        tokens, end = await late
        assert not tokens and end.reason == "overloaded"
        assert "node 'd0' had no pages for it again within 3 s" in end.detail
    await assert_still_serves(cluster)


async def test_client_that_leaves_while_its_request_waits_for_pages_leaves_none_behind(cluster: Cluster) -> None:
    async with without_pages(cluster) as late:
        late.cancel()
        await until(lambda: not cluster.nodes["d0"].pages.lacking, "nobody waits")
    await assert_still_serves(cluster)


async def test_prompts_of_many_tokens_fill_a_queue(cluster: Cluster, url: str, client: aiohttp.ClientSession) -> None:
    cluster.router.options = replace(ROUTER, queue_s=0.5)
    async with full_queue(cluster, queue_tokens_max=70) as requests:
        async with client.post(url + "/v1/completions", json=body()) as response:
            assert response.status == 429 and response.headers["Retry-After"] == "1"
            message = (await response.json())["error"]["message"]
            assert "no prefiller had room within 0.5 s" in message
            assert "node 'p0' has prompts of 78 tokens in its queue already" in message
    await asyncio.gather(*requests)
    await assert_still_serves(cluster)


async def test_prompt_of_more_tokens_than_a_queue_may_have_is_taken(cluster: Cluster) -> None:
    cluster.node_options = replace(NODE, queue_tokens_max=1)
    await start(cluster)
    assert (await cluster.complete(PROMPT, GREEDY))[0] == await monolithic(PROMPT, GREEDY)


async def test_prompts_of_a_dead_decoder_keep_no_place_in_the_queue(cluster: Cluster) -> None:
    async with full_queue(cluster) as requests:
        await cluster.kill("d0")
        cluster.add(Decoder, "d1")
        p0 = prefiller(cluster)
        await until(lambda: len(cluster.nodes["d1"]._servings) == 3, "another one has them")
        await until(lambda: {work.decoder for work in p0._queue} == {cluster.nodes["d1"].mailbox.address}, "they wait")
        await until(lambda: len(p0._queue) == 2, "again")
    for prompt, request in zip((PROMPT, prompt_of(40, seed=2), prompt_of(40, seed=3)), requests, strict=True):
        assert (await request)[0] == await monolithic(prompt, GREEDY)
    await assert_still_serves(cluster)


async def test_name_is_used_once(cluster: Cluster) -> None:
    await start(cluster)
    await cluster.complete(PROMPT, GREEDY, request="r1")
    with pytest.raises(DuplicateRequest, match="'r1' is or was under way"):
        await cluster.complete(PROMPT, GREEDY, request="r1")


async def test_no_nodes_is_unavailable(cluster: Cluster) -> None:
    cluster.router.options = replace(ROUTER, queue_s=0.1)
    with pytest.raises(Unavailable, match="no decoder has joined router 'router'"):
        await cluster.complete(PROMPT, GREEDY)
    cluster.add(Decoder, "d0")
    await asyncio.wait_for(cluster.joined(), WAIT_S)
    with pytest.raises(xr.CrossrailError, match="no prefiller for model"):
        await cluster.complete(PROMPT, GREEDY)


async def test_model_that_no_node_has_is_refused_at_once(cluster: Cluster) -> None:
    await start(cluster)
    cluster.router.options = replace(ROUTER, queue_s=0.01)
    await asyncio.sleep(0.02)  # the router is no newborn
    ours = cluster.models["d0"].name
    with pytest.raises(UnknownModel, match=rf"no node of router 'router' has model 'toy'; there are {ours}"):
        await anext(cluster.router.complete(PROMPT, GREEDY, model="toy"))
    cluster.router.options = ROUTER
    assert (await cluster.complete(PROMPT, GREEDY, model=ours))[0] == await monolithic(PROMPT, GREEDY)


async def test_model_of_a_node_that_just_went_is_waited_for(cluster: Cluster) -> None:
    await start(cluster)
    ours = cluster.models["d0"].name
    await cluster.kill("d0")
    await until(lambda: not cluster.router.roster.members("decoder"), "the decoder is missed")
    waiting = asyncio.ensure_future(cluster.complete(PROMPT, GREEDY, model=ours))
    await asyncio.sleep(0.1)
    cluster.add(Decoder, "d1")
    assert (await asyncio.wait_for(waiting, WAIT_S))[0] == await monolithic(PROMPT, GREEDY)


async def test_newborn_router_waits_for_nodes_of_any_model(cluster: Cluster) -> None:
    cluster.router.options = replace(ROUTER, queue_s=WAIT_S)  # so long is nothing unknown
    with pytest.raises(Unavailable, match=r"no decoder for model 'toy' has joined router 'router'$"):
        await anext(cluster.router.complete(PROMPT, GREEDY, model="toy", timeout_s=0.1))


async def test_empty_prompt_is_refused(cluster: Cluster) -> None:
    with pytest.raises(xr.UsageError, match="the prompt is empty"):
        await cluster.complete(np.zeros(0, np.int32), GREEDY)


async def test_short_prompts_do_not_wait_for_all_of_a_long_one(cluster: Cluster) -> None:
    await start(cluster, token_s=SLOW_S)  # 32 tokens a chunk
    long = asyncio.ensure_future(cluster.complete(prompt_of(400), GREEDY))
    await until(
        lambda: prefiller(cluster).load().requests and not prefiller(cluster)._queue, "the long one is computed"
    )
    shorts = [prompt_of(30, seed=n) for n in range(2, 6)]
    tokens = await asyncio.gather(*(cluster.complete(prompt, GREEDY) for prompt in shorts))
    assert not long.done(), "they have passed"
    await until(lambda: prefiller(cluster).load().requests <= 1, "and are over")
    assert [found for found, _ in tokens] == [await monolithic(prompt, GREEDY) for prompt in shorts]
    assert (await long)[0] == await monolithic(prompt_of(400), GREEDY)
    await assert_still_serves(cluster)


async def test_short_prompt_without_room_beside_a_long_one_comes_after_it(cluster: Cluster) -> None:
    await start(cluster, token_s=SLOW_S)
    cluster.add(Decoder, "d1")
    await asyncio.wait_for(cluster.joined(), WAIT_S)
    prompt = prompt_of(LAYOUT.pages * LAYOUT.page_tokens - 8)
    long = asyncio.ensure_future(cluster.complete(prompt, m.Sampling(8, ignore_end=True)))
    await until(lambda: prefiller(cluster).pool.available <= 1, "it has all pages")
    short = prompt_of(30, seed=2)
    assert (await cluster.complete(short, GREEDY))[0] == await monolithic(short, GREEDY)
    assert (await long)[0] == await monolithic(prompt, GREEDY)
    await quiet(cluster)

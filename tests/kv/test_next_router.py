"""Routers that are restarted while requests run."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from crossrail.kv import messages as m
from crossrail.kv.nodes import to_router
from crossrail.kv.nodes.serving import Serving
from crossrail.kv.router import adoptions as adoptions_module
from crossrail.kv.router.router import Router
from crossrail.kv.timeline import Timeline
from crossrail.kv.transfer.prefix import NO_NAMES
from tests.kv.conftest import quiet, start, until
from tests.kv.steps import (
    GREEDY,
    PROMPT,
    SLOW_S,
    STEPS,
    assert_still_serves,
    full_queue,
    prefiller,
    reach,
    under_way,
)
from tests.support.kv_cluster import NODE, ROUTER, Cluster, monolithic, prompt_of
from tests.support.limits import WAIT_S


async def next_router(cluster: Cluster) -> Router:
    """In the place of the one that there is."""
    await cluster.close_router()
    return cluster.add_router("router-again")


@pytest.mark.parametrize("step", [step for step in STEPS if step != "asked"])
async def test_router_restarted_at_a_step_running_requests_finish(cluster: Cluster, step: str) -> None:
    client = await under_way(cluster, step, request="r1")
    await cluster.close_router()
    _, end = await client
    assert end.detail == "the router is closing"
    router = cluster.add_router("router-again")
    await until(lambda: (found := router.adopted("r1")) and found.end, "the request ends")
    assert router.adopted("r1").tokens == await monolithic(PROMPT, GREEDY)
    await assert_still_serves(cluster)


async def test_end_of_what_was_silent_for_long_waits_for_the_next_router(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted from the end on, however long its router had heard nothing of it before."""
    monkeypatch.setattr(to_router, "_ROUTER_GONE_S", 1.0)
    await start(cluster)
    run, goes_on = prefiller(cluster).model.prefill, asyncio.Event()

    async def slow_run(*arguments: Any) -> bytes:
        await goes_on.wait()
        return await run(*arguments)

    prefiller(cluster).model.prefill = slow_run
    client = asyncio.ensure_future(cluster.complete(PROMPT, GREEDY, request="r1"))
    await reach(cluster, "running")
    await cluster.close_router()
    await client
    await asyncio.sleep(1.2)
    servings = cluster.nodes["d0"]._servings
    serving = servings["r1"]
    goes_on.set()
    await until(lambda: serving.end, "it ends")
    await asyncio.sleep(0.2)
    assert "r1" in servings
    await until(lambda: "r1" not in servings, "it is given up in the end")
    cluster.add_router("router-again")
    await assert_still_serves(cluster)


async def test_next_router_may_cancel_what_runs(cluster: Cluster) -> None:
    """From when it has heard of the request on, which is before the decoder hears that it has joined."""
    await start(cluster, token_s=20 * SLOW_S)
    client = asyncio.ensure_future(cluster.complete(PROMPT, GREEDY, request="r1"))
    await reach(cluster, "running")
    await cluster.close_router()
    await client
    router = cluster.add_router("router-again")
    decoder, heard = cluster.nodes["d0"], asyncio.get_running_loop().create_future()

    async def cancel_before_answering(sender: bytes, join: m.Join) -> m.Message:
        answer = await router._on_join(sender, join)
        if router.adopted("r1") and not heard.done():
            cancel = m.Cancel("r1", "test")
            heard.set_result(await router.mailbox.ask(decoder.mailbox.address, cancel, m.Taken, WAIT_S))
            assert not decoder.links[0].joined.is_set()
        return answer

    router.mailbox.handle(m.Join, cancel_before_answering)
    assert (await asyncio.wait_for(heard, WAIT_S)).wanted
    await until(lambda: router.adopted("r1").end, "the request ends")
    assert router.adopted("r1").end.reason == "cancelled"
    await quiet(cluster)


async def test_next_router_has_what_waits_for_a_full_prefiller_wait_on(cluster: Cluster) -> None:
    """However often it asks: a prefiller without room counts as none of those that were tried."""
    async with full_queue(cluster):
        late = prompt_of(50, seed=4)
        client = asyncio.ensure_future(cluster.complete(late, GREEDY, request="late"))
        await until(lambda: cluster.router.counts["redispatched"] >= 1, "it has asked again")
        cluster.router_options = replace(ROUTER, attempts_max=1, queue_s=2 * WAIT_S)
        router = await next_router(cluster)
        assert (await client)[1].detail == "the router is closing"
        await until(lambda: router.counts["redispatched"] >= 2, "it has asked the next one, twice")
    await until(lambda: (found := router.adopted("late")) and found.end, "it ends")
    assert router.adopted("late").tokens == await monolithic(late, GREEDY)
    await assert_still_serves(cluster)


async def test_next_router_has_nothing_wait_for_ever_for_a_full_prefiller(cluster: Cluster) -> None:
    async with full_queue(cluster):
        client = asyncio.ensure_future(cluster.complete(prompt_of(50, seed=4), GREEDY, request="late"))
        await until(lambda: cluster.router.counts["redispatched"] >= 1, "it has asked again")
        cluster.router_options = replace(ROUTER, queue_s=0.5)
        router = await next_router(cluster)
        await client
        await until(lambda: (found := router.adopted("late")) and found.end, "it ends")
        end = router.adopted("late").end
        assert end.reason == "overloaded" and "no prefiller had room within 0.5 s" in end.detail
    await quiet(cluster)
    await assert_still_serves(cluster)


async def test_next_router_learns_what_ended_just_before(cluster: Cluster) -> None:
    """The router has taken the end, and dies before its client has read it."""
    await start(cluster)
    tokens, _ = await cluster.complete(PROMPT, GREEDY, request="r1")
    await quiet(cluster)
    router = await next_router(cluster)
    await until(lambda: (found := router.adopted("r1")) and found.end, "it is told again")
    found = router.adopted("r1")
    assert found.tokens == tokens and found.end.reason == "length"
    await assert_still_serves(cluster)


async def test_next_router_learns_of_all_that_ended_just_before(cluster: Cluster) -> None:
    await start(cluster)
    cluster.nodes["d0"]._told._keep_s = 10 * WAIT_S  # "just before", however slow this machine is
    names = [f"r{index}" for index in range(150)]
    short = m.Sampling(max_tokens=1)
    for first in range(0, len(names), 5):  # few at once: how long others wait for room is not what this looks at
        batch = names[first : first + 5]
        await asyncio.gather(*(cluster.complete(prompt_of(9, int(name[1:])), short, request=name) for name in batch))
    await quiet(cluster)

    router = await next_router(cluster)

    await until(lambda: all((found := router.adopted(name)) and found.end for name in names), "they are told again")


async def test_what_runs_goes_on_however_much_ended_just_before(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next router remembers only so much of what has ended."""
    monkeypatch.setattr(adoptions_module, "_ADOPTIONS_KEPT", 3)
    await start(cluster, token_s=SLOW_S)
    for index in range(5):
        await cluster.complete(prompt_of(9, index), m.Sampling(max_tokens=1), request=f"short {index}")
    client = asyncio.ensure_future(cluster.complete(PROMPT, GREEDY, request="r1"))
    await reach(cluster, "running")

    router = await next_router(cluster)

    await client
    await until(lambda: (found := router.adopted("r1")) and found.end, "the request ends")
    assert router.adopted("r1").tokens == await monolithic(PROMPT, GREEDY), router.adopted("r1").end
    await assert_still_serves(cluster)


async def test_ends_that_are_kept_no_longer_hold_no_join_up(cluster: Cluster) -> None:
    """At some hundred requests a second there are some of the last 10 s that are, between a Join and its answer."""
    await start(cluster)
    names = [f"r{index}" for index in range(5)]
    for index, name in enumerate(names):
        await cluster.complete(prompt_of(9, index), m.Sampling(max_tokens=1), request=name)
    await quiet(cluster)
    decoder, joins = cluster.nodes["d0"], 0
    ask = decoder.mailbox.ask

    async def slow_ask(to: bytes, question: Any, *how: Any) -> Any:
        nonlocal joins
        answer = await ask(to, question, *how)
        if isinstance(question, m.Join):
            joins += 1
            if decoder._told._kept:
                decoder._told._kept.popleft()
        return answer

    decoder.mailbox.ask = slow_ask
    router = await next_router(cluster)

    await until(lambda: all((found := router.adopted(name)) and found.end for name in names), "they are told again")
    assert joins == 1


async def test_next_router_does_not_learn_what_was_cancelled(cluster: Cluster) -> None:
    client = await under_way(cluster, "running", request="r1")
    client.cancel()
    await quiet(cluster)
    router = await next_router(cluster)
    await assert_still_serves(cluster)
    assert router.adopted("r1") is None


async def test_next_router_does_not_learn_of_a_cancel_that_the_one_before_did_not_hear_the_end_of(
    cluster: Cluster,
) -> None:
    async def never(_: bytes, __: m.Tokens) -> m.Message:
        await asyncio.Event().wait()
        raise AssertionError

    client = await under_way(cluster, "running", request="r1")
    cluster.router.mailbox.handle(m.Tokens, never)
    client.cancel()
    await quiet(cluster)
    router = await next_router(cluster)
    await assert_still_serves(cluster)
    assert router.adopted("r1") is None
    await until(lambda: not cluster.nodes["d0"]._servings, "nothing is kept of it")


async def test_next_router_does_not_learn_what_the_one_before_did_not_want(cluster: Cluster) -> None:
    """As after a decoder stood still, and its router has answered the client without it."""

    async def unwanted(_: bytes, tokens: m.Tokens) -> m.Message:
        if tokens.end is not None:
            await asyncio.Event().wait()
        return m.Taken(wanted=False)

    client = await under_way(cluster, "running", request="r1")
    cluster.router.mailbox.handle(m.Tokens, unwanted)
    await until(lambda: not cluster.busy_pages(), "the decoder has given it up")
    router = await next_router(cluster)
    await client
    await assert_still_serves(cluster)
    assert router.adopted("r1") is None
    await until(lambda: not cluster.nodes["d0"]._servings, "nothing is kept of it")


async def test_all_who_deliver_one_request_end_once_its_end_is_taken() -> None:
    """As when its router was lost and found again before it had the end once more."""
    asked, goes_on = [], asyncio.Event()

    async def ask(_: bytes, tokens: m.Tokens, *__: object) -> m.Taken:
        asked.append(tokens)
        await goes_on.wait()
        return m.Taken()

    link: Any = SimpleNamespace(address=b"router")
    timeline = Timeline(asyncio.get_running_loop().time)
    serving = Serving("r1", link, b"router", 1, np.zeros(1, np.int32), GREEDY, timeline, None, NO_NAMES)
    serving.add(7)
    serving.finish(m.End("length"))
    mailbox: Any = SimpleNamespace(ask=ask, spawn=lambda work, _: asyncio.ensure_future(work))
    teller = to_router.ToRouter(mailbox, NODE, lambda _: None)
    delivering = [asyncio.ensure_future(teller.deliver(serving)) for _ in range(3)]
    await until(lambda: asked, "one of them has offered it")
    goes_on.set()
    await asyncio.wait_for(asyncio.gather(*delivering), WAIT_S)
    assert len(asked) == 1 and serving.end_taken

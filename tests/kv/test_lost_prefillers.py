"""Prefillers that die, fail or fall silent at every step: another one does it, and no token is wrong."""

import asyncio
from typing import Any

import pytest

import crossrail as xr
from crossrail.kv import messages as m
from crossrail.kv.job import SendJob
from crossrail.kv.prefiller import Prefiller
from tests.kv.conftest import quiet, start, until
from tests.kv.steps import GREEDY, PROMPT, SLOW_S, STEPS, assert_still_serves, prefiller, reach, under_way
from tests.support.kv_cluster import NODE, Cluster, monolithic, prompt_of
from tests.support.kv_doubts import lose_writes, note_fences
from tests.support.limits import WAIT_S


@pytest.mark.parametrize("step", [step for step in STEPS if step != "asked"])
async def test_prefiller_that_dies_at_a_step_is_replaced(cluster: Cluster, step: str) -> None:
    client = await under_way(cluster, step)
    await cluster.kill("p0")
    cluster.add(Prefiller, "p1", SLOW_S)
    tokens, end = await asyncio.wait_for(client, WAIT_S)
    assert tokens == await monolithic(PROMPT, GREEDY), end
    await assert_still_serves(cluster)


async def test_model_that_fails_at_one_prefiller_runs_at_another(cluster: Cluster) -> None:
    await start(cluster, prefillers=2)

    async def broken(*_: object) -> bytes:
        raise RuntimeError("out of luck")

    prefiller(cluster, "p0").model.prefill = broken
    for seed in range(4):
        prompt = prompt_of(60, seed)
        assert (await cluster.complete(prompt, GREEDY))[0] == await monolithic(prompt, GREEDY)
    assert cluster.router.counts["redispatched"] >= 1
    prefiller(cluster, "p1").model.prefill = broken
    _, end = await cluster.complete(PROMPT, GREEDY)
    assert end.reason == "error" and "out of luck" in end.detail and "8 prefillers were tried" in end.detail
    await quiet(cluster)


async def test_writes_of_a_failed_request_that_do_not_end_keep_nobody_waiting(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those to a decoder that stands still: the prefiller goes on with the next request."""
    await start(cluster, token_s=SLOW_S)
    thaws, cancel = asyncio.Event(), SendJob.cancel

    async def cancel_late(job: SendJob, *arguments: Any) -> None:
        if job.request.startswith("r1#"):
            await thaws.wait()
        await cancel(job, *arguments)

    monkeypatch.setattr(SendJob, "cancel", cancel_late)
    client = asyncio.ensure_future(cluster.complete(PROMPT, GREEDY, request="r1"))
    await reach(cluster, "first layer posted")
    client.cancel()
    await asyncio.gather(client, return_exceptions=True)
    prompt = prompt_of(30, seed=9)
    assert (await cluster.complete(prompt, GREEDY, deadline_s=0.9 * NODE.silent_s))[0] == await monolithic(
        prompt, GREEDY
    )
    thaws.set()
    await assert_still_serves(cluster)


async def test_prefiller_that_had_given_its_decoder_up_is_fenced_off(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decoder that was frozen finds bytes in its kernel that were sent before: nobody can confirm that none land."""
    await start(cluster)
    lose_writes(monkeypatch, "r1#1")
    fenced = note_fences(monkeypatch)
    tokens, _ = await cluster.complete(PROMPT, GREEDY, request="r1")
    assert tokens == await monolithic(PROMPT, GREEDY) and cluster.router.counts["redispatched"] == 1
    mailbox = cluster.nodes["d0"].mailbox
    assert fenced == [mailbox.wire.identity(cluster.nodes["p0"].mailbox.address).hex()]
    await assert_still_serves(cluster)


async def test_model_that_fails_at_the_decoder_ends_it_in_words(cluster: Cluster) -> None:
    await start(cluster)
    right = cluster.nodes["d0"].model.step

    async def broken(*_: object) -> None:
        raise RuntimeError("no step")

    cluster.nodes["d0"].model.step = broken
    _, end = await cluster.complete(PROMPT, GREEDY)
    assert (end.reason, end.detail) == ("error", "RuntimeError: no step")
    cluster.nodes["d0"].model.step = right
    await assert_still_serves(cluster)


async def test_question_that_cannot_be_asked_costs_no_pages(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that is longer than messages may be: a million tokens, in pages of one."""
    await start(cluster)
    mailbox = cluster.nodes["d0"].mailbox
    ask, words = mailbox.ask, "message has 9 bytes, at most 8 are sent"

    async def ask_what_is_short(to: bytes, question: m.Message, *how: Any) -> Any:
        if isinstance(question, m.Dispatch):
            raise xr.UsageError(words)
        return await ask(to, question, *how)

    monkeypatch.setattr(mailbox, "ask", ask_what_is_short)
    _, end = await cluster.complete(PROMPT, GREEDY)
    assert (end.reason, end.detail) == ("error", words)
    monkeypatch.setattr(mailbox, "ask", ask)
    await assert_still_serves(cluster)


async def test_prefiller_that_is_silent_is_fenced_off_and_harmless_when_it_speaks_again(cluster: Cluster) -> None:
    client = await under_way(cluster, "first layer posted")
    # It stands still after the current chunk, and neither hears nor says anything.
    frozen = prefiller(cluster)
    heard, run, thawed = frozen.mailbox._sort, frozen.model.prefill, asyncio.Event()

    async def frozen_run(*arguments: Any) -> bytes:
        await thawed.wait()
        return await run(*arguments)

    frozen.mailbox._sort = lambda *_: None
    frozen.model.prefill = frozen_run
    cluster.add(Prefiller, "p1")
    tokens, _ = await asyncio.wait_for(client, WAIT_S)
    assert tokens == await monolithic(PROMPT, GREEDY)
    await until(lambda: "d0" not in cluster.busy_pages(), "the decoder's pages are free before it thaws")
    frozen.mailbox._sort = heard
    thawed.set()
    await assert_still_serves(cluster)


async def test_request_is_cancelled_while_its_decoder_waits_for_a_router_that_says_nothing(cluster: Cluster) -> None:
    client = await under_way(cluster, "running")
    asked = asyncio.Event()

    async def says_nothing(*_: object) -> m.Message:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError("it waits for ever")

    assert cluster.router is not None
    cluster.router.mailbox.handle(m.PrefillerLost, says_nothing)
    await cluster.kill("p0")
    await asyncio.wait_for(asked.wait(), WAIT_S)

    client.cancel()

    await quiet(cluster)
    await until(lambda: not cluster.nodes["d0"].load().requests, "the decoder has ended it")

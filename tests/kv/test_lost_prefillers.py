"""Prefillers that die, fail or fall silent at every step: another one does it, and no token is wrong."""

import asyncio
import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import crossrail as xr
from crossrail.kv import messages as m
from crossrail.kv.nodes.decoder import Decoder
from crossrail.kv.nodes.prefiller import Prefiller
from crossrail.kv.router.membership import Roster
from crossrail.kv.transfer import receiver as receiver_module
from crossrail.kv.transfer.job import SendJob
from tests.kv.conftest import quiet, start, until
from tests.kv.steps import GREEDY, PROMPT, SLOW_S, STEPS, assert_still_serves, prefiller, reach, under_way
from tests.support.kv_cluster import NODE, Cluster, monolithic, prompt_of
from tests.support.kv_copies import Held
from tests.support.kv_doubts import lose_writes, note_fences
from tests.support.limits import WAIT_S

# Nobody else is given up, however busy the machine is.
PATIENT = replace(NODE, prefiller_timeout_s=WAIT_S, answer_timeout_s=WAIT_S)


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
    assert end.reason == "error" and "out of luck" in end.detail
    assert "8 attempts failed (prefillers that were tried: 2)" in end.detail
    await quiet(cluster)


async def test_model_that_misses_a_layer_fails_that_request_alone(cluster: Cluster) -> None:
    await start(cluster)
    cluster.router.options = replace(cluster.router.options, attempts_max=1)
    p0 = prefiller(cluster)
    run, announcers = p0.model.prefill, []

    async def forgetful(cache: Any, tokens: Any, begin: int, pages: Any, layer_done: Callable[[], None]) -> bytes:
        calls = itertools.count()
        announcers.append(layer_done)
        return await run(cache, tokens, begin, pages, lambda: None if next(calls) == 1 else layer_done())

    async def run_that_meets_a_late_word(*arguments: Any) -> bytes:
        with pytest.raises(xr.UsageError, match="of a step that is over"):
            announcers[0]()
        return await run(*arguments)

    p0.model.prefill = forgetful
    _, end = await cluster.complete(PROMPT, GREEDY)
    assert end.reason == "error" and "the model announced 3 of 4 layers" in end.detail
    p0.model.prefill = run_that_meets_a_late_word
    await assert_still_serves(cluster)


async def test_writes_of_a_failed_request_that_do_not_end_keep_nobody_waiting(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those to a decoder that stands still: the prefiller goes on with the next request."""
    cluster.node_options = PATIENT
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
    tokens, _ = await cluster.complete(prompt, GREEDY, timeout_s=0.9 * PATIENT.prefiller_timeout_s)
    assert tokens == await monolithic(prompt, GREEDY)
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


async def test_prefiller_whose_model_hangs_is_replaced_and_takes_nothing_until_it_goes_on(cluster: Cluster) -> None:
    """Also for what waits in its queue, and what would come. It answers all the time."""
    cluster.node_options = replace(NODE, model_timeout_s=0.6)
    await start(cluster)
    p0, hangs, goes_on = prefiller(cluster), asyncio.Event(), asyncio.Event()
    run = p0.model.prefill

    async def hanging_run(*arguments: Any) -> bytes:
        hangs.set()
        await goes_on.wait()
        return await run(*arguments)

    p0.model.prefill = hanging_run
    prompts = [prompt_of(40, seed=n) for n in range(5)]
    clients = [asyncio.ensure_future(cluster.complete(prompt, GREEDY)) for prompt in prompts[:3]]
    await asyncio.wait_for(hangs.wait(), WAIT_S)
    cluster.add(Prefiller, "p1")
    clients += [asyncio.ensure_future(cluster.complete(prompt, GREEDY)) for prompt in prompts[3:]]

    for prompt, client in zip(prompts, clients, strict=True):
        assert (await asyncio.wait_for(client, WAIT_S))[0] == await monolithic(prompt, GREEDY)

    await until(lambda: "d0" not in cluster.busy_pages(), "the decoder's pages are free before it goes on")
    sender = cluster.nodes["d0"].mailbox
    question = m.Dispatch("new", 1, m.pack_tokens(PROMPT), {}, 9.0)
    refusal = await sender.ask(p0.mailbox.address, question, (m.Dispatched, m.DispatchRefused), WAIT_S)
    assert isinstance(refusal, m.DispatchRefused) and "the model of node 'p0' hangs" in refusal.reason and refusal.busy
    (told,) = [member for member in cluster.router.roster.members("prefiller") if member.name == "p0"]
    await until(lambda: told.load.hangs, "the router has heard of it")
    await cluster.kill("p1")
    goes_on.set()
    await until(lambda: not told.load.hangs, "and that it goes on")
    await assert_still_serves(cluster)


async def test_router_hears_at_once_that_a_prefillers_model_hangs(cluster: Cluster) -> None:
    cluster.node_options = replace(PATIENT, model_timeout_s=0.3)
    cluster.router.options = replace(cluster.router.options, heartbeat_s=2 * WAIT_S)
    assert isinstance(cluster.router.roster, Roster)
    cluster.router.roster.lease_s = 4 * WAIT_S
    await start(cluster)
    (told,) = cluster.router.roster.members("prefiller")
    p0, goes_on = prefiller(cluster), asyncio.Event()
    run = p0.model.prefill

    async def hanging_run(*arguments: Any) -> bytes:
        await goes_on.wait()
        return await run(*arguments)

    p0.model.prefill = hanging_run
    client = asyncio.ensure_future(cluster.complete(PROMPT, GREEDY))
    await until(lambda: told.load.hangs, "the router has heard of it")
    client.cancel()
    goes_on.set()


async def test_end_of_a_short_answer_does_not_wait_for_a_prefiller_that_falls_silent_after_its_last_write(
    cluster: Cluster,
) -> None:
    cluster.node_options = PATIENT
    await start(cluster)

    async def says_nothing(*_: object) -> m.Message:
        await asyncio.Event().wait()
        raise AssertionError("it waits for ever")

    prefiller(cluster).mailbox.handle(m.Probe, says_nothing)
    begun_s = time.monotonic()
    tokens, _ = await cluster.complete(PROMPT, m.Sampling(max_tokens=1, ignore_end=True))
    assert time.monotonic() - begun_s < PATIENT.answer_timeout_s / 2
    assert tokens == await monolithic(PROMPT, m.Sampling(max_tokens=1, ignore_end=True))


async def test_model_that_is_slow_and_announces_its_layers_is_waited_for(cluster: Cluster) -> None:
    cluster.node_options = replace(NODE, model_timeout_s=0.6, probe_s=0.02, chunk_tokens=256)
    await start(cluster, token_s=2 * SLOW_S)  # 120 tokens: 5 looks in each layer
    p0, now_s = prefiller(cluster), 0.0
    run = p0.model.prefill

    async def slow_run(cache: Any, tokens: Any, begin: int, pages: Any, layer_done: Callable[[], None]) -> bytes:
        """As the watch sees it: each layer takes less than may be, all of them more."""

        def announce() -> None:
            nonlocal now_s
            layer_done()
            now_s += 0.4

        return await run(cache, tokens, begin, pages, announce)

    p0._model_watch._now_s = lambda: now_s
    p0.model.prefill = slow_run
    tokens, _ = await cluster.complete(PROMPT, GREEDY)
    assert tokens == await monolithic(PROMPT, GREEDY)
    assert not cluster.router.counts["redispatched"]


async def test_decoder_whose_prefiller_stands_still_in_a_copy_closes_all_else(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver_module, "_SHUT_S", 0.3)
    await start(cluster)
    await cluster.complete(PROMPT, GREEDY)
    d0 = cluster.nodes["d0"]
    assert isinstance(d0, Decoder)
    (access,) = d0.receiver._accesses.values()
    held = Held(access)

    with pytest.raises(xr.WaitTimeout, match="in the middle of a copy"):
        await d0.close()

    assert d0.receiver._tails is not None and d0.receiver._tails.region.closed
    held.end()


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

"""Nodes that die, clients that leave, messages that are lost - at every step. No page leaks, no token is wrong."""

import asyncio
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import crossrail as xr
from crossrail.kv import decoder as decoder_module
from crossrail.kv import messages as m
from crossrail.kv.decoder import Decoder
from crossrail.kv.errors import DuplicateRequest
from crossrail.kv.job import SendJob
from crossrail.kv.membership import Roster
from crossrail.kv.pages import PageState
from crossrail.kv.prefiller import Prefiller
from crossrail.kv.router_requests import Overloaded, Unavailable, UnknownModel
from crossrail.kv.serving import Serving
from tests.kv.conftest import quiet, start, until
from tests.support.kv_cluster import LAYOUT, NODE, ROUTER, Cluster, monolithic, prompt_of
from tests.support.kv_net import BadWire
from tests.support.limits import WAIT_S
from tests.support.seeds import Seed

GREEDY = m.Sampling(max_tokens=8, ignore_end=True)
SLOW_S = 0.0004  # a layer, each token: 4 layers of 120 tokens take 0.2 s
PROMPT = prompt_of(120)


def prefiller(cluster: Cluster, name: str = "p0") -> Prefiller:
    node = cluster.nodes[name]
    assert isinstance(node, Prefiller)
    return node


def jobs(cluster: Cluster) -> list:
    return [work.job for node in cluster.nodes.values() if isinstance(node, Prefiller) for work in node._works.values()]


def posted(cluster: Cluster) -> int:
    """Layers that were posted for what is under way."""
    return sum(len(job.posted) for job in jobs(cluster) if job is not None)


# Steps of a request as the cluster shows them: each becomes true in this order.
STEPS = {
    "asked": lambda cluster: cluster.router.requests,
    "dispatched": lambda cluster: jobs(cluster),
    "running": lambda cluster: any(job is not None for job in jobs(cluster)),
    "first layer posted": lambda cluster: posted(cluster) >= 1,
    "second chunk": lambda cluster: posted(cluster) >= 5,
    "last chunk": lambda cluster: posted(cluster) >= 13,
    "decoding": lambda cluster: any(s.tokens for s in cluster.nodes["d0"]._servings.values()),
}


async def reach(cluster: Cluster, step: str) -> None:
    await until(lambda: STEPS[step](cluster), f"step {step!r}")


async def assert_still_serves(cluster: Cluster) -> None:
    await quiet(cluster)
    prompt = prompt_of(30, seed=9)
    tokens, _ = await asyncio.wait_for(cluster.complete(prompt, GREEDY), WAIT_S)
    assert tokens == await monolithic(prompt, GREEDY)
    await quiet(cluster)


# --- clients that leave ---


@pytest.mark.parametrize("step", STEPS)
async def test_client_that_leaves_at_a_step_frees_everything(cluster: Cluster, step: str) -> None:
    await start(cluster, token_s=SLOW_S)
    client = asyncio.ensure_future(cluster.complete(PROMPT, GREEDY))
    await reach(cluster, step)
    client.cancel()
    with pytest.raises(asyncio.CancelledError):
        await client
    assert cluster.router.requests == 0
    await assert_still_serves(cluster)


async def test_many_clients_that_leave_at_any_moment(cluster: Cluster, seed: Seed) -> None:
    await start(cluster, prefillers=2, decoders=2, token_s=SLOW_S / 10)
    draw = random.Random(seed.number())

    async def leave_early(index: int) -> None:
        client = asyncio.ensure_future(cluster.complete(prompt_of(40 + index, seed=index), GREEDY))
        await asyncio.wait([client], timeout=draw.uniform(0, 0.4))
        client.cancel()
        await asyncio.gather(client, return_exceptions=True)

    await asyncio.gather(*(leave_early(index) for index in range(24)))
    await assert_still_serves(cluster)


async def test_cancel_twice_and_of_what_is_unknown(cluster: Cluster) -> None:
    await start(cluster, token_s=SLOW_S)
    client = asyncio.ensure_future(cluster.complete(PROMPT, GREEDY, request="r1"))
    await reach(cluster, "first layer posted")
    ask = cluster.router.mailbox.ask
    address = cluster.nodes["d0"].mailbox.address
    # At once: one that is asked after the other was answered may find that the request has ended.
    answers = await asyncio.gather(*(ask(address, m.Cancel("r1", "test"), m.Taken, WAIT_S) for _ in range(2)))
    assert [answer.wanted for answer in answers] == [True, True]
    tokens, end = await client
    assert (tokens, end.reason, end.detail) == ([], "cancelled", "test")
    assert not (await ask(address, m.Cancel("r2", "test"), m.Taken, WAIT_S)).wanted
    # Its start comes after its cancel: it is not begun.
    with pytest.raises(xr.CrossrailError, match="is or was under way"):
        await cluster.complete(PROMPT, GREEDY, request="r2")
    await assert_still_serves(cluster)


@pytest.mark.parametrize("deadline_s", [0.3, 0.0])
async def test_deadline_ends_it_at_all_nodes(cluster: Cluster, deadline_s: float) -> None:
    await start(cluster, token_s=10 * SLOW_S)
    _, end = await cluster.complete(PROMPT, GREEDY, deadline_s=deadline_s)
    assert end.reason == "deadline"
    await quiet(cluster)


# --- prefillers that die or fail ---


@pytest.mark.parametrize("step", [step for step in STEPS if step != "asked"])
async def test_prefiller_that_dies_at_a_step_is_replaced(cluster: Cluster, step: str) -> None:
    await start(cluster, token_s=SLOW_S)
    client = asyncio.ensure_future(cluster.complete(PROMPT, GREEDY))
    await reach(cluster, step)
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
    await start(cluster, token_s=SLOW_S)
    client = asyncio.ensure_future(cluster.complete(PROMPT, GREEDY))
    await reach(cluster, "first layer posted")
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


# --- decoders that die ---


SAMPLINGS = [m.Sampling(24, ignore_end=True), m.Sampling(24, temperature=0.8, top_p=0.9, seed=7, ignore_end=True)]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "seeded"])
@pytest.mark.parametrize("step", [step for step in STEPS if step != "asked"])
async def test_another_decoder_goes_on_where_one_died(cluster: Cluster, step: str, sampling: m.Sampling) -> None:
    await start(cluster, token_s=SLOW_S)
    client = asyncio.ensure_future(cluster.complete(PROMPT, sampling))
    await reach(cluster, step)
    await cluster.kill("d0")
    cluster.add(Decoder, "d1", SLOW_S)
    tokens, end = await asyncio.wait_for(client, WAIT_S)
    assert (tokens, end.reason) == (await monolithic(PROMPT, sampling), "length"), end
    assert cluster.router.counts["restarted"] == 1
    await assert_still_serves(cluster)


@pytest.mark.parametrize("step", ["dispatched", "running", "decoding"])
async def test_decoder_that_was_given_up_and_comes_back_goes_on_with_what_it_had(cluster: Cluster, step: str) -> None:
    await start(cluster, token_s=SLOW_S)
    client = asyncio.ensure_future(cluster.complete(PROMPT, SAMPLINGS[1]))
    await reach(cluster, step)
    roster = cluster.router.roster
    assert isinstance(roster, Roster)
    roster.remove(roster.members("decoder")[0], "node 'd0' was not heard of")  # it stood still, and goes on
    tokens, end = await asyncio.wait_for(client, WAIT_S)
    assert (tokens, end.reason) == (await monolithic(PROMPT, SAMPLINGS[1]), "length"), end
    assert cluster.router.counts["restarted"] == 1
    await assert_still_serves(cluster)


async def test_start_of_an_earlier_placement_that_comes_late_disturbs_nobody(cluster: Cluster) -> None:
    await start(cluster, token_s=SLOW_S)
    layout = cluster.nodes["p0"].record.ref
    ask, address = cluster.router.mailbox.ask, cluster.nodes["d0"].mailbox.address
    later, earlier = (m.Start("r1", m.pack_tokens(PROMPT), GREEDY, 10.0, layout, placement=n) for n in (3, 2))
    await ask(address, later, m.Started, WAIT_S)
    answer = await ask(address, earlier, m.StartRefused, WAIT_S)
    assert "'r1' is or was under way" in answer.reason and not answer.busy
    assert cluster.nodes["d0"]._servings["r1"]._stop is None
    await ask(address, m.Cancel("r1", "test", 3), m.Taken, WAIT_S)
    await assert_still_serves(cluster)


async def test_stream_goes_on_behind_what_the_client_has(cluster: Cluster) -> None:
    await start(cluster, token_s=20 * SLOW_S)
    sampling = SAMPLINGS[1]
    got: list[int] = []
    async for chunk in cluster.router.complete(prompt_of(20), sampling):
        got += chunk.tokens
        if len(got) >= 5 and "d1" not in cluster.nodes:
            cluster.add(Decoder, "d1")
            await cluster.nodes["d1"].links[0].joined.wait()
            await cluster.kill("d0")
    assert got == await monolithic(prompt_of(20), sampling)
    assert cluster.router.counts["restarted"] == 1
    await assert_still_serves(cluster)


@pytest.mark.parametrize("generated", [6, 9])
async def test_more_generated_tokens_than_there_are_is_refused(cluster: Cluster, generated: int) -> None:
    await start(cluster)
    layout = cluster.nodes["p0"].record.ref
    question = m.Start("r1", m.pack_tokens(prompt_of(6)), GREEDY, 10.0, layout, placement=3, generated=generated)
    address = cluster.nodes["d0"].mailbox.address
    answer = await cluster.router.mailbox.ask(address, question, m.StartRefused, WAIT_S)
    assert f"{generated} of 6 tokens cannot be generated ones, of at most 8" in answer.reason and not answer.busy
    await quiet(cluster)


async def test_end_that_a_dead_decoder_had_not_told_is_told_by_another(cluster: Cluster) -> None:
    whole = await monolithic(PROMPT, m.Sampling(24, ignore_end=True))
    await start(cluster)

    async def keep_to_yourself(serving: Serving) -> bool:
        """All tokens are passed on, the end never."""
        if serving.taken == len(serving.tokens):
            await asyncio.Event().wait()
        end, serving.end = serving.end, None
        told = await tell(serving)
        serving.end = serving.end or end
        return told

    decoder = cluster.nodes["d0"]
    assert isinstance(decoder, Decoder)
    tell, decoder._offer = decoder._offer, keep_to_yourself
    for node in cluster.nodes.values():
        node.model.end_tokens = frozenset({whole[12]})
    client = asyncio.ensure_future(cluster.complete(PROMPT, m.Sampling(24)))
    await until(lambda: any(len(r.tokens) == 13 for r in cluster.router._running.values()), "all tokens are told")
    await cluster.kill("d0")
    cluster.add(Decoder, "d1").model.end_tokens = frozenset({whole[12]})
    tokens, end = await asyncio.wait_for(client, WAIT_S)
    assert (tokens, end.reason) == (whole[:13], "stop")
    await assert_still_serves(cluster)


async def test_request_whose_decoders_keep_dying_ends_in_words(cluster: Cluster) -> None:
    await start(cluster, token_s=10 * SLOW_S)
    client = asyncio.ensure_future(cluster.complete(PROMPT, GREEDY))
    for index in range(3):
        await until(lambda: any(work.job is not None for work in prefiller(cluster)._works.values()), "it is prefilled")
        await until(lambda name=f"d{index}": cluster.nodes[name].load().requests, "a decoder has it")
        if index < 2:
            cluster.add(Decoder, f"d{index + 1}")
            await cluster.nodes[f"d{index + 1}"].links[0].joined.wait()
        await cluster.kill(f"d{index}")
    _, end = await asyncio.wait_for(client, WAIT_S)
    assert end.reason == "error"
    # d2 may die before it has told the router that it has the request.
    known, unknown = (
        "node 'd2' died or closed; so were 2 before",
        "node 'd1' died or closed; nobody else goes on with it",
    )
    assert f"its decoder is gone: {known}" in end.detail or (
        f"its decoder is gone: {unknown}" in end.detail and "'d2'" in end.detail
    )


async def test_decoder_that_closes_hands_its_requests_on(cluster: Cluster) -> None:
    await start(cluster, token_s=SLOW_S)
    client = asyncio.ensure_future(cluster.complete(PROMPT, GREEDY))
    await reach(cluster, "decoding")
    cluster.add(Decoder, "d1")
    await cluster.nodes["d1"].links[0].joined.wait()
    await cluster.nodes["d0"].close()
    tokens, end = await asyncio.wait_for(client, WAIT_S)
    assert (tokens, end.reason) == (await monolithic(PROMPT, GREEDY), "length")
    assert cluster.router.counts["restarted"] == 1
    await quiet(cluster)


async def test_decoder_that_dies_alone_ends_it_in_words(cluster: Cluster) -> None:
    cluster.router.options = replace(ROUTER, queue_s=0.3)
    await start(cluster, token_s=SLOW_S)
    client = asyncio.ensure_future(cluster.complete(PROMPT, GREEDY))
    await reach(cluster, "running")
    await cluster.kill("d0")
    _, end = await asyncio.wait_for(client, WAIT_S)
    assert end.reason == "error"
    assert "its decoder is gone: node 'd0' died or closed; nobody else goes on with it: no decoder" in end.detail


# --- routers ---


@pytest.mark.parametrize("step", [step for step in STEPS if step != "asked"])
async def test_router_restarted_at_a_step_running_requests_finish(cluster: Cluster, step: str) -> None:
    await start(cluster, token_s=SLOW_S)
    client = asyncio.ensure_future(cluster.complete(PROMPT, GREEDY, request="r1"))
    await reach(cluster, step)
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
    monkeypatch.setattr(decoder_module, "_ROUTER_GONE_S", 1.0)
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


async def test_next_router_learns_what_ended_just_before(cluster: Cluster) -> None:
    """The router has taken the end, and dies before its client has read it."""
    await start(cluster)
    tokens, _ = await cluster.complete(PROMPT, GREEDY, request="r1")
    await quiet(cluster)
    await cluster.close_router()
    router = cluster.add_router("router-again")
    await until(lambda: (found := router.adopted("r1")) and found.end, "it is told again")
    found = router.adopted("r1")
    assert found.tokens == tokens and found.end.reason == "length"
    await assert_still_serves(cluster)


async def test_next_router_does_not_learn_what_was_cancelled(cluster: Cluster) -> None:
    await start(cluster, token_s=SLOW_S)
    client = asyncio.ensure_future(cluster.complete(PROMPT, GREEDY, request="r1"))
    await reach(cluster, "running")
    client.cancel()
    await quiet(cluster)
    await cluster.close_router()
    router = cluster.add_router("router-again")
    await assert_still_serves(cluster)
    assert router.adopted("r1") is None


async def test_next_router_does_not_learn_of_a_cancel_that_the_one_before_did_not_hear_the_end_of(
    cluster: Cluster,
) -> None:
    async def never(_: bytes, __: m.Tokens) -> m.Message:
        await asyncio.Event().wait()
        raise AssertionError

    await start(cluster, token_s=SLOW_S)
    client = asyncio.ensure_future(cluster.complete(PROMPT, GREEDY, request="r1"))
    await reach(cluster, "running")
    cluster.router.mailbox.handle(m.Tokens, never)
    client.cancel()
    await quiet(cluster)
    await cluster.close_router()
    router = cluster.add_router("router-again")
    await assert_still_serves(cluster)
    assert router.adopted("r1") is None
    await until(lambda: not cluster.nodes["d0"].load().requests, "it takes no place any more")


async def test_two_routers_share_nodes(cluster: Cluster) -> None:
    second = Cluster()
    second.add_router("router-2")
    cluster.also = [second.where]
    await start(cluster, token_s=SLOW_S / 10)
    await asyncio.wait_for(cluster.nodes["d0"].links[1].joined.wait(), WAIT_S)
    await asyncio.wait_for(cluster.nodes["p0"].links[1].joined.wait(), WAIT_S)
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
    second = Cluster()
    second.add_router("router-2")
    cluster.also = [second.where]
    await start(cluster, token_s=SLOW_S)
    for node in cluster.nodes.values():
        await asyncio.wait_for(node.links[1].joined.wait(), WAIT_S)
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


# --- nodes that come and go ---


async def test_nodes_drain_and_join_while_requests_run(cluster: Cluster) -> None:
    await start(cluster, token_s=SLOW_S)
    first = asyncio.ensure_future(cluster.complete(PROMPT, GREEDY))
    await reach(cluster, "first layer posted")
    leaving = [cluster.nodes[name] for name in ("p0", "d0")]
    for node in leaving:
        node.draining = True
        node.links[0].report_soon()
    cluster.add(Prefiller, "p1")
    cluster.add(Decoder, "d1")
    await until(lambda: all(x.load.draining for x in cluster.router.roster.members("decoder")[:1]), "d0 drains")
    other = prompt_of(90, seed=5)
    assert (await cluster.complete(other, GREEDY))[0] == await monolithic(other, GREEDY)
    assert all(await asyncio.gather(*(node.drain(WAIT_S) for node in leaving)))
    assert (await first)[0] == await monolithic(PROMPT, GREEDY)
    assert [member.name for member in cluster.router.roster.members("decoder")] == ["d1"]
    await asyncio.sleep(0.5)  # several heartbeats: those that left do not come back
    assert len(cluster.router.roster.members("prefiller")) == 1
    await quiet(cluster)


# --- limits ---


async def test_requests_over_the_limit_are_refused(cluster: Cluster) -> None:
    cluster.router.options = replace(ROUTER, requests_max=2)
    await start(cluster, token_s=SLOW_S)
    running = [asyncio.ensure_future(cluster.complete(prompt_of(50, seed=n), GREEDY)) for n in range(2)]
    await until(lambda: cluster.router.requests == 2, "two requests")
    with pytest.raises(Overloaded, match="at most 2 may be"):
        await cluster.complete(PROMPT, GREEDY)
    await asyncio.gather(*running)
    await assert_still_serves(cluster)


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
        await anext(cluster.router.complete(PROMPT, GREEDY, model="toy", deadline_s=0.1))


async def test_empty_prompt_is_refused(cluster: Cluster) -> None:
    with pytest.raises(xr.UsageError, match="the prompt is empty"):
        await cluster.complete(np.zeros(0, np.int32), GREEDY)


# --- a bad network for control messages ---


@pytest.mark.parametrize(
    ("loss", "repeat", "late_s"), [(0.3, 0.0, 0.0), (0.0, 0.5, 0.0), (0.0, 0.2, 0.2), (0.2, 0.2, 0.1)]
)
async def test_control_messages_lost_repeated_and_late(
    nothing_leaks: None, seed: Seed, loss: float, repeat: float, late_s: float
) -> None:
    draw = random.Random(seed.number())
    cluster = Cluster(spoil=lambda wire: BadWire(wire, draw, loss, repeat, late_s))
    cluster.add_router()
    await start(cluster, prefillers=2, decoders=2)
    prompts = [prompt_of(30 + 11 * n, seed=n) for n in range(8)]
    results = await asyncio.wait_for(asyncio.gather(*(cluster.complete(p, GREEDY) for p in prompts)), 2 * WAIT_S)
    for prompt, (tokens, end) in zip(prompts, results, strict=True):
        assert tokens == await monolithic(prompt, GREEDY), end
    await quiet(cluster)
    await cluster.close()

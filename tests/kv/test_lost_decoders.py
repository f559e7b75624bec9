"""Decoders that die, freeze or close at every step: another one goes on, and no token comes twice."""

import asyncio
import re
from dataclasses import replace
from typing import Any

import pytest

from crossrail.errors import CrossrailError
from crossrail.kv import messages as m
from crossrail.kv.models.steps import until_over
from crossrail.kv.nodes.decoder import Decoder
from crossrail.kv.nodes.prefiller import Prefiller
from crossrail.kv.nodes.serving import Serving
from crossrail.kv.router.membership import Roster
from tests.kv.conftest import quiet, start, until
from tests.kv.steps import GREEDY, PROMPT, SLOW_S, STEPS, assert_still_serves, prefiller, under_way
from tests.support.kv_cluster import NODE, ROUTER, Cluster, monolithic, prompt_of
from tests.support.limits import WAIT_S

SAMPLINGS = [m.Sampling(24, ignore_end=True), m.Sampling(24, temperature=0.8, top_p=0.9, seed=7, ignore_end=True)]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "seeded"])
@pytest.mark.parametrize("step", [step for step in STEPS if step != "asked"])
async def test_another_decoder_goes_on_where_one_died(cluster: Cluster, step: str, sampling: m.Sampling) -> None:
    client = await under_way(cluster, step, sampling)
    await cluster.kill("d0")
    cluster.add(Decoder, "d1", SLOW_S)
    tokens, end = await asyncio.wait_for(client, WAIT_S)
    assert (tokens, end.reason) == (await monolithic(PROMPT, sampling), "length"), end
    assert cluster.router.counts["restarted"] == 1
    await assert_still_serves(cluster)


@pytest.mark.parametrize("step", ["dispatched", "running", "decoding"])
async def test_decoder_that_was_given_up_and_comes_back_goes_on_with_what_it_had(cluster: Cluster, step: str) -> None:
    client = await under_way(cluster, step, SAMPLINGS[1])
    roster = cluster.router.roster
    assert isinstance(roster, Roster)
    roster.remove(roster.members("decoder")[0], "node 'd0' was not heard from")  # it stood still, and goes on
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
    tell, decoder._to_router._offer = decoder._to_router._offer, keep_to_yourself
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
    # Each may die before it has told the router that it has the request: then it is none of those that died of it.
    ends = {"so were 2 before": "error", "no other decoder continues it: .+": "unavailable"}
    gone = "its decoder is gone: node 'd\\d' died or closed; "
    assert [end.reason] == [reason for words, reason in ends.items() if re.fullmatch(gone + words, end.detail)]
    assert "'d2'" in end.detail


async def test_decoder_that_closes_hands_its_requests_on(cluster: Cluster) -> None:
    client = await under_way(cluster, "decoding")
    cluster.add(Decoder, "d1")
    await cluster.nodes["d1"].links[0].joined.wait()
    await cluster.nodes["d0"].close()
    tokens, end = await asyncio.wait_for(client, WAIT_S)
    assert (tokens, end.reason) == (await monolithic(PROMPT, GREEDY), "length")
    assert cluster.router.counts["restarted"] == 1
    await quiet(cluster)


async def test_request_goes_on_however_many_decoders_leave(cluster: Cluster) -> None:
    """As when all are restarted one after the other; only those that die may have died of it."""
    await start(cluster, token_s=SLOW_S)
    client = asyncio.ensure_future(cluster.complete(PROMPT, GREEDY))
    for index in range(4):
        await until(lambda name=f"d{index}": cluster.nodes[name].load().requests, "a decoder has it")
        cluster.add(Decoder, f"d{index + 1}")
        await cluster.nodes[f"d{index + 1}"].links[0].joined.wait()
        await cluster.nodes[f"d{index}"].close()
    tokens, end = await asyncio.wait_for(client, WAIT_S)
    assert (tokens, end.reason) == (await monolithic(PROMPT, GREEDY), "length")
    assert cluster.router.counts["restarted"] == 4
    await quiet(cluster)


async def test_decoder_that_dies_alone_ends_it_in_words(cluster: Cluster) -> None:
    cluster.router.options = replace(ROUTER, queue_s=0.3)
    client = await under_way(cluster, "running")
    await until(lambda: any(one.is_charged for one in cluster.router._running.values()), "the router knows who has it")
    await cluster.kill("d0")
    _, end = await asyncio.wait_for(client, WAIT_S)
    assert end.reason == "unavailable"
    assert "its decoder is gone: node 'd0' died or closed; no other decoder continues it: no decoder" in end.detail


class Hanging:
    """The model of this decoder, whose next steps wait until they may go on."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.goes_on = asyncio.Event()
        self.hangs = asyncio.Event()
        self.fails: Exception | None = None  # the first step that goes on
        self._model = cluster.nodes[name].model
        self._step = self._model.step
        self._model.step = self.step  # type: ignore[method-assign]

    async def step(self, *arguments: Any) -> Any:
        self.hangs.set()
        await self.goes_on.wait()
        fails, self.fails = self.fails, None
        if fails is not None:
            raise fails
        return await self._step(*arguments)


async def test_requests_of_a_decoder_whose_model_hangs_go_on_elsewhere_behind_what_was_told(cluster: Cluster) -> None:
    """It answers all the time. Until the model lets go it takes nothing new, and what it had keeps its pages."""
    cluster.node_options = replace(NODE, model_timeout_s=0.6)
    await start(cluster, token_s=SLOW_S)
    d0 = cluster.nodes["d0"]
    prompts = [prompt_of(40, seed=n) for n in range(3)]
    long = m.Sampling(max_tokens=40, ignore_end=True)
    clients = [asyncio.ensure_future(cluster.complete(prompt, long)) for prompt in prompts]
    running = cluster.router._running
    await until(
        lambda: len(running) == len(prompts) and all(len(each.tokens) > 2 for each in running.values()), "tokens come"
    )
    model = Hanging(cluster, "d0")
    await asyncio.wait_for(model.hangs.wait(), WAIT_S)
    handed_over = len(d0._servings)  # on a slow machine the first is done before the last has begun
    await until(lambda: not d0._servings, "it has handed its requests over")
    assert cluster.busy_pages()["d0"]
    cluster.add(Decoder, "d1")

    for prompt, client in zip(prompts, clients, strict=True):
        tokens, end = await asyncio.wait_for(client, WAIT_S)
        assert (tokens, end.reason) == (await monolithic(prompt, long), "length")
    assert cluster.router.counts["restarted"] == handed_over
    await cluster.kill("d1")
    question = m.Start("new", m.pack_tokens(PROMPT[:1]), GREEDY, 9.0, None)
    refusal = await cluster.router.mailbox.ask(d0.mailbox.address, question, (m.Started, m.StartRefused), WAIT_S)
    assert isinstance(refusal, m.StartRefused) and refusal.busy
    assert "the model of node 'd0' hangs: it has computed no token for" in refusal.reason
    (told,) = [member for member in cluster.router.roster.members("decoder") if member.name == "d0"]
    await until(lambda: told.load.hangs, "the router has heard of it")
    model.goes_on.set()
    await until(lambda: "d0" not in cluster.busy_pages(), "its pages are free")
    await until(lambda: not told.load.hangs, "the router has heard that it goes on")
    await assert_still_serves(cluster)


async def test_request_that_waits_for_pages_of_a_decoder_whose_model_hangs_goes_on_elsewhere(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.add(Prefiller, "p0")
    cluster.node_options = replace(NODE, model_timeout_s=0.6, page_wait_s=2 * WAIT_S)
    d0 = cluster.add(Decoder, "d0")
    assert isinstance(d0, Decoder)
    await asyncio.wait_for(cluster.joined(), WAIT_S)
    monkeypatch.setattr(prefiller(cluster), "_too_busy", lambda: "it is full")
    reserve_again, lacks_pages = d0.pages._reserve_again, asyncio.Event()

    async def watched(serving: Serving) -> None:
        lacks_pages.set()
        await reserve_again(serving)

    monkeypatch.setattr(d0.pages, "_reserve_again", watched)
    long, late_prompt, prompt = m.Sampling(max_tokens=300, ignore_end=True), prompt_of(250), prompt_of(1)
    late = asyncio.ensure_future(cluster.complete(late_prompt, GREEDY))
    await until(lambda: cluster.router.counts["redispatched"], "it was refused, and gave its pages back")
    lacks_pages.clear()  # it may have had them at once
    model = Hanging(cluster, "d0")
    other = asyncio.ensure_future(cluster.complete(prompt, long))
    await asyncio.wait_for(model.hangs.wait(), WAIT_S)
    await asyncio.wait_for(lacks_pages.wait(), WAIT_S)
    monkeypatch.undo()
    await until(lambda: not d0._servings, "it has handed both over")
    cluster.add(Decoder, "d1")

    assert (await asyncio.wait_for(late, WAIT_S))[0] == await monolithic(late_prompt, GREEDY)
    assert (await asyncio.wait_for(other, WAIT_S))[0] == await monolithic(prompt, long)
    assert cluster.router.counts["restarted"] == 2
    model.goes_on.set()
    await assert_still_serves(cluster)


async def test_request_whose_decoders_all_hang_ends_and_says_so(cluster: Cluster) -> None:
    cluster.node_options = replace(NODE, model_timeout_s=0.3)
    await start(cluster, token_s=SLOW_S)
    cluster.router.options = replace(ROUTER, restarts_max=1)
    cluster.add(Decoder, "d1")
    models = [Hanging(cluster, name) for name in ("d0", "d1")]
    _, end = await asyncio.wait_for(cluster.complete(PROMPT, GREEDY), WAIT_S)
    assert end.reason == "error"
    assert re.fullmatch(
        r"its decoder is gone: the model of node 'd.' hangs: it has computed no token for [\d.]+ s; so were 1 before",
        end.detail,
    )
    for model in models:
        model.goes_on.set()


async def test_decoder_closes_while_its_model_hangs(cluster: Cluster) -> None:
    """It ends the call by cancelling it."""
    cluster.node_options = replace(NODE, model_timeout_s=0.3)
    await start(cluster)
    d0, model = cluster.nodes["d0"], Hanging(cluster, "d0")
    client = asyncio.ensure_future(cluster.complete(PROMPT, GREEDY))
    await asyncio.wait_for(model.hangs.wait(), WAIT_S)
    await until(lambda: len(d0._held_by_model) == 1, "it has handed it over")
    await asyncio.wait_for(d0.close(), WAIT_S)
    assert "d0" not in cluster.busy_pages()
    cluster.add(Decoder, "d1")
    assert (await asyncio.wait_for(client, WAIT_S))[0] == await monolithic(PROMPT, GREEDY)


@pytest.mark.parametrize("kind", [RuntimeError, CrossrailError])
async def test_what_a_model_that_hung_raises_is_logged(
    cluster: Cluster, caplog: pytest.LogCaptureFixture, kind: type[Exception]
) -> None:
    cluster.node_options = replace(NODE, model_timeout_s=0.3)
    await start(cluster)
    d0, model = cluster.nodes["d0"], Hanging(cluster, "d0")
    client = asyncio.ensure_future(cluster.complete(PROMPT, GREEDY))
    await asyncio.wait_for(model.hangs.wait(), WAIT_S)
    await until(lambda: len(d0._held_by_model) == 1, "it has handed it over")
    model.fails = kind("out of luck")
    model.goes_on.set()
    await until(lambda: not d0._held_by_model, "it has let go")
    (failed,) = [record for record in caplog.records if "which was handed over, failed: out of luck" in record.message]
    assert bool(failed.exc_info) == (kind is RuntimeError)
    assert "the model of node 'd0' has let go of all requests that were handed over" in caplog.text
    assert (await asyncio.wait_for(client, WAIT_S))[0] == await monolithic(PROMPT, GREEDY)


async def test_steps_that_take_turns_are_no_hang(cluster: Cluster) -> None:
    """A request whose own step waits for others is not given up while these go on."""
    cluster.node_options = replace(NODE, model_timeout_s=1.5)  # a busy machine, too, makes a step in that time
    await start(cluster, token_s=SLOW_S)
    model = cluster.nodes["d0"].model
    step, turn = model.step, asyncio.Lock()

    async def one_at_a_time(*arguments: Any) -> Any:
        async with turn:
            await asyncio.sleep(0.4)
            return await step(*arguments)

    model.step = one_at_a_time
    short = m.Sampling(max_tokens=2, ignore_end=True)
    clients = [cluster.complete(prompt_of(40, seed=n), short) for n in range(5)]
    assert all(end.reason == "length" for _, end in await asyncio.gather(*clients))
    assert not cluster.router.counts["restarted"]


@pytest.mark.parametrize("handed_over", [True, False])
async def test_decoder_that_closes_waits_until_the_model_lets_go_of_its_pages(
    cluster: Cluster, handed_over: bool
) -> None:
    """A model's thread computes on, however often the call is cancelled."""
    cluster.node_options = replace(NODE, model_timeout_s=0.3 if handed_over else WAIT_S, prefiller_timeout_s=0.1)
    await start(cluster)
    d0 = cluster.nodes["d0"]
    step, begun, over = d0.model.step, asyncio.Event(), asyncio.Event()

    async def in_a_thread(*arguments: Any) -> Any:
        begun.set()
        asyncio.get_running_loop().call_later(1.5, over.set)
        await until_over(over)
        return await step(*arguments)

    d0.model.step = in_a_thread
    client = asyncio.ensure_future(cluster.complete(PROMPT, GREEDY))
    await asyncio.wait_for(begun.wait(), WAIT_S)
    if handed_over:
        await until(lambda: len(d0._held_by_model) == 1, "it has handed it over")
    await asyncio.wait_for(d0.close(), WAIT_S)
    assert over.is_set()
    assert "d0" not in cluster.busy_pages()
    cluster.add(Decoder, "d1")
    assert (await asyncio.wait_for(client, WAIT_S))[0] == await monolithic(PROMPT, GREEDY)


async def test_request_that_was_to_end_anyway_ends_when_the_model_hangs_and_goes_nowhere(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.node_options = replace(NODE, model_timeout_s=0.4)
    await start(cluster)
    d0, model = cluster.nodes["d0"], Hanging(cluster, "d0")
    client = asyncio.ensure_future(cluster.complete(PROMPT, GREEDY))
    await asyncio.wait_for(model.hangs.wait(), WAIT_S)
    client.cancel()
    await until(lambda: not d0._servings, "it has ended")
    assert len(d0._held_by_model) == 1
    assert not cluster.router.counts["restarted"]
    assert "are to continue elsewhere" not in caplog.text
    model.goes_on.set()
    await assert_still_serves(cluster)

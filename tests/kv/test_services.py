"""Router, prefillers and decoders together, over real engines: the tokens are those of one node alone."""

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from msgspec import structs

import crossrail as xr
from crossrail.kv import messages as m
from crossrail.kv.errors import NodeRefused
from crossrail.kv.model import Cache, Logits, Pages, Tokens
from crossrail.kv.nodes.decoder import Decoder
from crossrail.kv.nodes.prefiller import Prefiller
from crossrail.kv.toy import ToyModel
from tests.kv.conftest import quiet, start, until
from tests.kv.steps import PROMPT, under_way
from tests.support.kv_cluster import LAYOUT, ROUTER, Cluster, monolithic, prompt_of
from tests.support.kv_net import BadWire
from tests.support.limits import NEVER_S, WAIT_S
from tests.support.seeds import Seed

GREEDY = m.Sampling(max_tokens=10, ignore_end=True)
SEEDED = m.Sampling(max_tokens=10, temperature=0.8, top_p=0.9, seed=7, ignore_end=True)


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("length", [1, 2, 8, 9, 33, 150])
async def test_tokens_are_those_of_one_node(cluster: Cluster, length: int, sampling: m.Sampling) -> None:
    await start(cluster)
    tokens, end = await cluster.complete(prompt_of(length), sampling)
    assert (tokens, end.reason) == (await monolithic(prompt_of(length), sampling), "length")
    await quiet(cluster)


async def test_timeline_has_every_layer_of_every_chunk(cluster: Cluster) -> None:
    await start(cluster)
    _, end = await cluster.complete(prompt_of(100), GREEDY)
    layers = [span for span in end.timeline if span.name.startswith("prefiller: layer ")]
    assert sorted(span.name for span in layers) == sorted(f"prefiller: layer {n}" for n in range(4) for _ in range(4))
    assert len([span for span in end.timeline if span.name.startswith("prefiller: prefill ")]) == 4
    assert all(span.length_s >= 0 for span in end.timeline)
    names = [span.name for span in end.timeline]
    assert names.index("dispatch") < names.index("transfer") < names.index("first token")


async def test_prefiller_keeps_timelines_of_the_latest_requests(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("crossrail.kv.nodes.prefiller._TIMELINES_KEPT", 2)
    await start(cluster)
    for seed in range(4):
        _, end = await cluster.complete(prompt_of(20, seed), m.Sampling(2))
        assert any(span.name.startswith("prefiller: ") for span in end.timeline)
    prefiller = cluster.nodes["p0"]
    assert isinstance(prefiller, Prefiller)
    kept = [(progress.state, bool(progress.timeline)) for progress in prefiller._book.ended.values()]
    assert kept == [("written", False)] * 2 + [("written", True)] * 2


async def test_many_at_once_over_several_nodes(cluster: Cluster) -> None:
    await start(cluster, prefillers=2, decoders=3)
    prompts = [prompt_of(20 + 7 * n, seed=n) for n in range(16)]
    results = await asyncio.gather(*(cluster.complete(prompt, GREEDY) for prompt in prompts))
    for prompt, (tokens, end) in zip(prompts, results, strict=True):
        assert tokens == await monolithic(prompt, GREEDY), end
    await quiet(cluster)


@pytest.mark.parametrize("changes", [{"order": "NHD"}, {"page_tokens": 4, "pages": 128}, {"tp": 2}, {"tp": 8}], ids=str)
async def test_nodes_that_keep_kv_otherwise(cluster: Cluster, changes: dict[str, object]) -> None:
    cluster.add(Prefiller, "p0", **changes)
    cluster.add(Decoder, "d0", tp=4)
    await asyncio.wait_for(cluster.joined(), WAIT_S)
    tokens, end = await cluster.complete(prompt_of(77), GREEDY)
    assert tokens == await monolithic(prompt_of(77), GREEDY), end


async def test_known_prefix_is_not_sent_again(cluster: Cluster) -> None:
    await start(cluster)
    written: list[int] = []
    for _ in range(2):
        before = cluster.engines["p0"].stats()["bytes_written"]
        tokens, _ = await cluster.complete(prompt_of(65), GREEDY)
        assert tokens == await monolithic(prompt_of(65), GREEDY)
        await quiet(cluster)
        written.append(cluster.engines["p0"].stats()["bytes_written"] - before)
    # 8 pages in 4 layers the first time; then the tail and some words to others.
    assert written[0] > 4 * 2 * 8 * LAYOUT.block_bytes
    assert written[1] < 4 * 2 * LAYOUT.block_bytes


class TaillessModel(ToyModel):
    """The same tokens, from KV alone. A prefill ends when it may, some time after its last layer."""

    tail_bytes = 0

    def __init__(self) -> None:
        super().__init__(LAYOUT)
        self.prefills, self.may_end = 0, asyncio.Event()

    async def prefill(
        self, cache: Cache, tokens: Tokens, start: int, pages: Pages, layer_done: Callable[[], None]
    ) -> bytes:
        self.prefills += 1
        await super().prefill(cache, tokens, start, pages, layer_done)
        await self.may_end.wait()
        return b""

    async def step(self, cache: Cache, token: int, position: int, pages: Pages, tail: bytes) -> tuple[Logits, bytes]:
        logits, _ = await super().step(cache, token, position, pages, self._tail_after(cache, position, pages))
        return logits, tail


async def test_without_a_tail_decoders_go_on_when_the_last_layer_is_there(cluster: Cluster) -> None:
    prefiller = TaillessModel()
    cluster.host(Prefiller, "p0", prefiller)
    cluster.host(Decoder, "d0", TaillessModel())
    await asyncio.wait_for(cluster.joined(), WAIT_S)
    for length, prefills in ((33, 1), (33, 1), (32, 2), (2, 3), (1, 3)):  # a prompt that is wholly known needs none
        tokens, end = await asyncio.wait_for(cluster.complete(prompt_of(length), GREEDY), WAIT_S)
        assert tokens == await monolithic(prompt_of(length), GREEDY), end
        assert prefiller.prefills == prefills
        prefiller.may_end.set()
        await quiet(cluster)
        prefiller.may_end.clear()


async def test_end_token_ends_it(cluster: Cluster) -> None:
    await start(cluster)
    sampling = m.Sampling(max_tokens=40)
    prompt = prompt_of(30)
    whole = await monolithic(prompt, m.Sampling(max_tokens=40, ignore_end=True))
    for node in cluster.nodes.values():
        node.model.end_tokens = frozenset({whole[12]})
    tokens, end = await cluster.complete(prompt, sampling)
    assert tokens == whole[: whole.index(whole[12]) + 1] and end.reason == "stop"


async def test_nodes_drain_and_join_while_requests_run(cluster: Cluster) -> None:
    first = await under_way(cluster, "first layer posted", GREEDY)
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


async def test_more_tokens_than_pages_is_refused_in_words(cluster: Cluster) -> None:
    await start(cluster)
    with pytest.raises(xr.UsageError, match=r"500 \+ 100 tokens take 75 pages, node 'd0' has 64"):
        await cluster.complete(prompt_of(500), m.Sampling(max_tokens=100))
    with pytest.raises(
        xr.UsageError, match=r"the 600 tokens of the prompt take 75 pages at prefiller 'p0', which has 64"
    ):
        await cluster.complete(prompt_of(600), GREEDY)
    assert (await cluster.complete(prompt_of(10), GREEDY))[1].reason == "length"


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"dtype": "float32"}, "dtype"), ({"kv_heads": 2}, "kv_heads"), ({"layers": 5}, "layers")],
    ids=["dtype", "heads", "layers"],
)
async def test_layout_that_does_not_match_is_refused_at_join(
    cluster: Cluster, changes: dict[str, object], words: str
) -> None:
    await start(cluster)
    odd = cluster.add(Decoder, "odd", **changes)
    odd.model.name = cluster.nodes["p0"].model.name
    odd.record = structs.replace(odd.record, model=odd.model.name)
    with pytest.raises(NodeRefused, match=f"{words}: ours .*, theirs "):
        await asyncio.wait_for(odd.refused, WAIT_S)


async def test_router_that_cannot_be_found_for_a_reason_without_words_is_told(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    async def find() -> bytes:
        raise asyncio.TimeoutError

    cluster.also = [find]
    cluster.add(Decoder, "d0")
    told = "node d0 has not joined its router, and keeps trying: TimeoutError"
    await until(lambda: told in caplog.text, "it is told")


async def test_trouble_whose_numbers_alone_change_is_told_once(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    asked = 0

    async def find() -> bytes:
        nonlocal asked
        asked += 1
        raise xr.CrossrailError(f"send of {190 + asked} bytes failed")

    cluster.also = [find]
    cluster.add(Decoder, "d0")
    await until(lambda: asked >= 4, "it is tried again")
    assert caplog.text.count("node d0 has not joined its router") == 1 and "send of 191 bytes failed" in caplog.text


async def test_wrong_secret_never_joins(cluster: Cluster) -> None:
    await start(cluster)
    stranger = cluster.add(Decoder, "stranger", secret=b"guessed")
    assert cluster.router is not None
    mailbox = cluster.router.mailbox
    await until(lambda: mailbox.dropped["secret"] > 0, "it has asked")
    await asyncio.sleep(NEVER_S)
    assert not stranger.links[0].joined.is_set()


async def test_prefix_is_computed_once_for_requests_that_come_together(cluster: Cluster) -> None:
    await start(cluster, decoders=2)
    p0, computed = cluster.nodes["p0"], []
    run = p0.model.prefill

    async def noted_run(cache: Cache, tokens: Tokens, start: int, *more: Any) -> bytes:
        computed.append(len(tokens) - start)
        return await run(cache, tokens, start, *more)

    p0.model.prefill = noted_run
    shared = prompt_of(160, seed=77)
    prompts = [np.concatenate([shared, prompt_of(9, seed=n)]) for n in range(5)]
    answers = await asyncio.gather(*(cluster.complete(prompt, GREEDY) for prompt in prompts))
    assert [tokens for tokens, _ in answers] == [await monolithic(prompt, GREEDY) for prompt in prompts]
    assert sum(computed) == 168 + 4 * 8
    await quiet(cluster)


async def test_check_of_a_model_that_raises_is_told_and_logged_once(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    """At once: it is no node that does not answer, and another one would say the same."""
    await start(cluster, decoders=2)

    def check(prompt: Tokens, max_tokens: int) -> None:
        if len(prompt) == 14:
            raise ZeroDivisionError("14 is unlucky")

    for name in ("d0", "d1"):
        cluster.nodes[name].model.check = check
    words = r"check\(\) of model 'toy-.*' at node 'd[01]' raised ZeroDivisionError: 14 is unlucky$"
    with pytest.raises(xr.UsageError, match=words):
        await asyncio.wait_for(cluster.complete(prompt_of(14), GREEDY), ROUTER.queue_s / 2)
    assert caplog.text.count("Traceback") == caplog.text.count("ZeroDivisionError: 14") == 1
    assert (await cluster.complete(prompt_of(15), GREEDY))[1].reason == "length"
    await quiet(cluster)


@pytest.mark.parametrize("raised", [asyncio.CancelledError, GeneratorExit, SystemExit])
async def test_what_check_raises_that_is_no_exception_refuses_that_request_alone(
    cluster: Cluster, raised: type[BaseException]
) -> None:
    """check() awaits nothing: neither of these was meant for the decoder's task."""
    await start(cluster)

    def check(prompt: Tokens, max_tokens: int) -> None:
        if len(prompt) == 14:
            raise raised("14 is unlucky")

    cluster.nodes["d0"].model.check = check
    with pytest.raises(xr.UsageError, match=rf"raised RuntimeError: {raised.__name__}: 14 is unlucky$"):
        await asyncio.wait_for(cluster.complete(prompt_of(14), GREEDY), WAIT_S)
    assert (await cluster.complete(prompt_of(15), GREEDY))[1].reason == "length"
    await quiet(cluster)


class Panic(BaseException):
    """As extensions in Rust raise it."""


@pytest.mark.parametrize(
    ("raised", "words"),
    [
        (asyncio.CancelledError, "the model raised CancelledError, and nobody had cancelled it"),
        (Panic, "RuntimeError: Panic: index out of bounds"),
        (GeneratorExit, "RuntimeError: GeneratorExit: "),  # Python drops its words on the way from a thread
        (SystemExit, "RuntimeError: SystemExit: index out of bounds"),
    ],
    ids=["cancelled", "panic", "generator exit", "sys.exit"],
)
@pytest.mark.parametrize("in_thread", [False, True], ids=["itself", "in a thread"])
@pytest.mark.parametrize(("node", "call"), [("p0", "prefill"), ("d0", "step")])
async def test_what_a_model_raises_that_is_no_exception_fails_that_request_alone(
    cluster: Cluster, node: str, call: str, in_thread: bool, raised: type[BaseException], words: str
) -> None:
    """Cancelled: it awaited something that was, such as work of an executor that was shut down."""
    await start(cluster)
    cluster.router.options = replace(cluster.router.options, attempts_max=1)
    model = cluster.nodes[node].model
    run = getattr(model, call)

    def fail() -> None:
        raise raised("index out of bounds")

    async def failing(*_: object) -> None:
        if in_thread:
            await asyncio.get_running_loop().run_in_executor(None, fail)
        fail()

    setattr(model, call, failing)
    _, end = await asyncio.wait_for(cluster.complete(PROMPT, GREEDY), WAIT_S)
    assert end.reason == "error" and words in end.detail
    setattr(model, call, run)
    tokens, end = await asyncio.wait_for(cluster.complete(PROMPT, GREEDY), WAIT_S)
    assert tokens == await monolithic(PROMPT, GREEDY), end
    await quiet(cluster)

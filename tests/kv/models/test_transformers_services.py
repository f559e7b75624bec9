"""Router, prefillers and decoders with models of transformers: the tokens are those of one node alone."""

import asyncio

import numpy as np
import pytest

from crossrail.kv.messages import Sampling
from crossrail.kv.nodes.decoder import Decoder
from crossrail.kv.nodes.prefiller import Prefiller
from tests.kv.conftest import quiet
from tests.kv.models.conftest import OpenModel, alone
from tests.support.kv_cluster import Cluster, prompt_of
from tests.support.limits import WAIT_S

GREEDY = Sampling(8, ignore_end=True)
SEEDED = Sampling(8, temperature=0.8, top_p=0.9, seed=7, ignore_end=True)


async def start(
    cluster: Cluster, open_model: OpenModel, name: str, prefiller: dict[str, object], decoder: dict[str, object]
) -> None:
    cluster.host(Prefiller, "p0", open_model(name, **prefiller))
    cluster.host(Decoder, "d0", open_model(name, **decoder))
    await asyncio.wait_for(cluster.joined(), WAIT_S)


@pytest.mark.parametrize(
    ("name", "prefiller", "decoder"),
    [
        ("qwen3", {}, {"page_tokens": 32}),
        ("llama", {"tp": 2, "page_tokens": 8}, {"tp": 4, "order": "NHD"}),
        ("deepseek", {"page_tokens": 24}, {"tp": 2}),
    ],
    ids=["qwen3", "llama", "deepseek"],
)
async def test_tokens_are_those_of_one_node(
    cluster: Cluster, open_model: OpenModel, name: str, prefiller: dict[str, object], decoder: dict[str, object]
) -> None:
    await start(cluster, open_model, name, prefiller, decoder)
    one = open_model(name)
    for prompt, sampling in ((prompt_of(100), GREEDY), (prompt_of(33), SEEDED), (prompt_of(1), GREEDY)):
        tokens, end = await cluster.complete(prompt, sampling)
        assert tokens == await alone(one, prompt, sampling), end
    await quiet(cluster)


@pytest.mark.parametrize(
    ("name", "prefiller", "decoder"),
    [
        ("qwen3", {}, {"page_tokens": 32}),
        ("qwen3", {"tp": 8}, {"tp": 8, "page_tokens": 8}),
        ("llama", {"tp": 2, "page_tokens": 8}, {"tp": 4, "order": "NHD"}),
        ("deepseek", {"page_tokens": 24}, {"tp": 2}),
    ],
    ids=["qwen3", "qwen3-tp8", "llama", "deepseek"],
)
async def test_tokens_in_bfloat16_are_those_of_one_node(
    cluster: Cluster, open_model: OpenModel, name: str, prefiller: dict[str, object], decoder: dict[str, object]
) -> None:
    """To the bit, if one request is decoded at a time; they may come together, and be computed in any order."""
    halves: dict[str, object] = {"dtype": "bfloat16", "batch": 1}
    await start(cluster, open_model, name, prefiller | halves, decoder | halves)
    assert {node.model.layout.dtype for node in cluster.nodes.values()} == {"bfloat16"}
    one = open_model(name, **halves)
    asked = [
        (prompt_of(length, seed=length), sampling)
        for length, sampling in ((100, GREEDY), (65, SEEDED), (33, GREEDY), (32, SEEDED), (2, GREEDY), (1, SEEDED))
    ]
    results = await asyncio.gather(*(cluster.complete(prompt, sampling) for prompt, sampling in asked))
    for (prompt, sampling), (tokens, end) in zip(asked, results, strict=True):
        assert tokens == await alone(one, prompt, sampling), end
    await quiet(cluster)


async def test_known_prefix_is_neither_computed_nor_sent_again(cluster: Cluster, open_model: OpenModel) -> None:
    await start(cluster, open_model, "qwen3", {}, {"page_tokens": 8})
    one = open_model("qwen3")
    written = []
    for prompt in (prompt_of(81), np.concatenate([prompt_of(81)[:70], prompt_of(20, seed=2)])):
        before = cluster.engines["p0"].stats()["bytes_written"]
        tokens, end = await cluster.complete(prompt, GREEDY)
        assert tokens == await alone(one, prompt, GREEDY), end
        written.append(cluster.engines["p0"].stats()["bytes_written"] - before)
        await quiet(cluster)
    token_bytes = 3 * 2 * 2 * 32 * 4  # layers, K and V, heads, elements, float32
    assert 80 * token_bytes <= written[0] and 24 * token_bytes <= written[1] < 40 * token_bytes
    prefills = [span.name for span in end.timeline if span.name.startswith("prefiller: prefill")]
    assert prefills == ["prefiller: prefill 89"]  # from token 64 on


async def test_requests_that_decode_together(cluster: Cluster, open_model: OpenModel) -> None:
    await start(cluster, open_model, "llama", {}, {"batch": 4})
    one = open_model("llama")
    together: list[int] = []
    decoder = cluster.nodes["d0"].model
    decoder._model.register_forward_hook(lambda _m, _args, output: together.append(len(output.logits)))
    prompts = [prompt_of(20 + 9 * n, seed=n) for n in range(6)]
    sampling = Sampling(24, temperature=0.7, seed=3, ignore_end=True)
    results = await asyncio.gather(*(cluster.complete(prompt, sampling) for prompt in prompts))
    for prompt, (tokens, end) in zip(prompts, results, strict=True):
        assert tokens == await alone(one, prompt, sampling), end
    assert sum(together) == 6 * 24 and max(together) > 1
    await quiet(cluster)

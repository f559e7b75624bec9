"""The services over networks: what tests/kv/test_services*.py ask over shm, a few of it over each that is here."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from crossrail.kv import messages as m
from crossrail.kv.nodes.decoder import Decoder
from crossrail.kv.nodes.prefiller import Prefiller
from tests.contract.setups import REAL_TRANSPORTS
from tests.kv.conftest import quiet, start, until
from tests.support.kv_cluster import Cluster, monolithic, prompt_of
from tests.support.limits import WAIT_S

SEEDED = m.Sampling(max_tokens=12, temperature=0.8, top_p=0.9, seed=7, ignore_end=True)
PROMPT = prompt_of(120)
SLOW_S = 0.0004


@pytest.fixture(params=[transport for transport in REAL_TRANSPORTS if transport != "shm"])
async def cluster(nothing_leaks: None, request: pytest.FixtureRequest) -> AsyncIterator[Cluster]:
    made = Cluster(transport=request.param)
    made.add_router()
    yield made
    await made.close()


async def test_tokens_are_those_of_one_node_whatever_the_layouts(cluster: Cluster) -> None:
    cluster.add(Prefiller, "p0", tp=2)
    cluster.add(Decoder, "d0", page_tokens=4, pages=128)
    await asyncio.wait_for(cluster.joined(), WAIT_S)
    prompts = [prompt_of(20 + 30 * n, seed=n) for n in range(5)]
    results = await asyncio.wait_for(asyncio.gather(*(cluster.complete(p, SEEDED) for p in prompts)), 2 * WAIT_S)
    for prompt, (tokens, end) in zip(prompts, results, strict=True):
        assert tokens == await monolithic(prompt, SEEDED), end
    await quiet(cluster)


@pytest.mark.parametrize("dying", ["p0", "d0"])
async def test_node_that_dies_in_the_middle_is_replaced(cluster: Cluster, dying: str) -> None:
    await start(cluster, token_s=SLOW_S)
    client = asyncio.ensure_future(cluster.complete(PROMPT, SEEDED))
    await until(lambda: cluster.nodes["p0"].load().requests, "it is prefilled")
    kind = type(cluster.nodes[dying])
    await cluster.kill(dying)
    cluster.add(kind, f"{dying}-again", SLOW_S)
    tokens, end = await asyncio.wait_for(client, 2 * WAIT_S)
    assert tokens == await monolithic(PROMPT, SEEDED), end
    await quiet(cluster)

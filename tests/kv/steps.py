"""Steps of a request in a cluster: how tests reach each of them, and see that all is well afterwards."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from crossrail.kv import messages as m
from crossrail.kv.nodes.node import Node
from crossrail.kv.nodes.prefiller import Prefiller
from tests.kv.conftest import quiet, start, until
from tests.support.kv_cluster import NODE, Cluster, monolithic, prompt_of
from tests.support.limits import WAIT_S

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


async def under_way(
    cluster: Cluster, step: str, sampling: m.Sampling = GREEDY, **options: object
) -> asyncio.Future[tuple[list[int], m.End]]:
    """A request for PROMPT, at slow nodes p0 and d0, which has come to this step."""
    await start(cluster, token_s=SLOW_S)
    client = asyncio.ensure_future(cluster.complete(PROMPT, sampling, **options))
    await reach(cluster, step)
    return client


@asynccontextmanager
async def full_queue(
    cluster: Cluster, **options: float
) -> AsyncIterator[list[asyncio.Future[tuple[list[int], m.End]]]]:
    """Of p0: two requests wait, the last of these, while the first one is computed, until this context ends.

    options: of nodes, among them a limit that two prompts of 40 tokens reach. A prefiller that is full is not one that
    is lost: however slow the machine is, it answers in time.
    """
    cluster.node_options = replace(
        NODE, prefiller_timeout_s=WAIT_S, answer_timeout_s=WAIT_S, **options or {"queue_max": 2}
    )
    await start(cluster)
    p0, goes_on = prefiller(cluster), asyncio.Event()
    run = p0.model.prefill

    async def held_run(*arguments: Any) -> bytes:
        await goes_on.wait()
        return await run(*arguments)

    p0.model.prefill = held_run
    first = asyncio.ensure_future(cluster.complete(PROMPT, GREEDY))
    await until(lambda: p0._works and not p0._queue, "the first one is computed")
    waiting = [asyncio.ensure_future(cluster.complete(prompt_of(40, seed=n), GREEDY)) for n in (2, 3)]
    await until(lambda: len(p0._queue) == 2, "the queue is full")
    yield [first, *waiting]
    goes_on.set()


def hold(decoder: Node, after: int = 0) -> asyncio.Event:
    """Its model computes no more than so many tokens until this event."""
    run, goes_on, left = decoder.model.step, asyncio.Event(), itertools.count(after, -1)

    async def held_step(*arguments: Any) -> Any:
        if next(left) <= 0:
            await goes_on.wait()
        return await run(*arguments)

    decoder.model.step = held_step
    return goes_on


async def assert_still_serves(cluster: Cluster) -> None:
    await quiet(cluster)
    prompt = prompt_of(30, seed=9)
    tokens, _ = await asyncio.wait_for(cluster.complete(prompt, GREEDY), WAIT_S)
    assert tokens == await monolithic(prompt, GREEDY)
    await quiet(cluster)

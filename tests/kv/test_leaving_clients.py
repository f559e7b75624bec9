"""Clients that leave, or whose time is up, at every step: no page leaks."""

import asyncio
import random

import pytest

import crossrail as xr
from crossrail.kv import messages as m
from tests.kv.conftest import quiet, start
from tests.kv.steps import GREEDY, PROMPT, SLOW_S, STEPS, assert_still_serves, under_way
from tests.support.kv_cluster import Cluster, prompt_of
from tests.support.limits import WAIT_S
from tests.support.seeds import Seed


@pytest.mark.parametrize("step", STEPS)
async def test_client_that_leaves_at_a_step_frees_everything(cluster: Cluster, step: str) -> None:
    client = await under_way(cluster, step)
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
    client = await under_way(cluster, "first layer posted", request="r1")
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


@pytest.mark.parametrize("timeout_s", [0.3, 0.0])
async def test_deadline_ends_it_at_all_nodes(cluster: Cluster, timeout_s: float) -> None:
    await start(cluster, token_s=10 * SLOW_S)
    _, end = await cluster.complete(PROMPT, GREEDY, timeout_s=timeout_s)
    assert end.reason == "deadline"
    await quiet(cluster)

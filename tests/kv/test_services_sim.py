"""Router, prefillers and decoders on the simulator, with nodes killed, frozen and added while requests run.

Every request ends once: with the tokens of one node alone, or with words that say why. No page stays in use.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest

import crossrail as xr
from crossrail import sim
from crossrail.kv import messages as m
from crossrail.kv.decoder import Decoder
from crossrail.kv.prefiller import Prefiller
from tests.support.kv_cluster import Cluster, monolithic, prompt_of
from tests.support.seeds import Seed

GREEDY = m.Sampling(max_tokens=6, ignore_end=True)
REQUESTS = 40
TOKEN_S = 0.0005
REASONS = ("its decoder is gone", "prefillers were tried", "no other prefiller within", "no node took the request")


class Town:
    """A cluster in a world; what happens is drawn from the seed."""

    def __init__(self, world: sim.World, seed: int) -> None:
        self.world = world
        self.draw = random.Random(seed)
        self.cluster = Cluster(transport="sim")
        self.ends: Counter[str] = Counter()
        self._added = 0

    async def run(self, trouble: Callable[["Town"], Awaitable[None]]) -> None:
        self.cluster.add_router()
        for _ in range(4):
            self.add(Prefiller)
        for _ in range(6):
            self.add(Decoder)
        await self.cluster.joined()
        troubling = asyncio.ensure_future(self._trouble(trouble))
        await asyncio.gather(*(self._request(index) for index in range(REQUESTS)), troubling)
        for _ in range(600):
            if not self.cluster.busy_pages():
                break
            await asyncio.sleep(0.1)
        assert self.cluster.busy_pages() == {}
        assert sum(self.ends.values()) == REQUESTS and self.ends["right"] >= REQUESTS / 2, self.ends
        await self.cluster.close()

    def add(self, kind: type) -> None:
        self._added += 1
        self.cluster.add(kind, f"{kind.role}-{self._added}", TOKEN_S)

    def any_node(self) -> str:
        return self.draw.choice(sorted(self.cluster.nodes))

    async def _trouble(self, trouble: Callable[["Town"], Awaitable[None]]) -> None:
        for _ in range(5):
            await asyncio.sleep(self.draw.uniform(0.2, 0.8))
            await trouble(self)

    async def _request(self, index: int) -> None:
        await asyncio.sleep(self.draw.uniform(0, 3))
        prompt = prompt_of(self.draw.randrange(2, 220), seed=index)
        try:
            tokens, end = await self.cluster.complete(prompt, GREEDY)
        except xr.CrossrailError as error:
            assert any(reason in str(error) for reason in REASONS), error
            self.ends["refused"] += 1
            return
        if end.reason == "error":
            assert any(reason in end.detail for reason in REASONS), end
            self.ends["failed"] += 1
        else:
            assert (end.reason, tokens) == ("length", await monolithic(prompt, GREEDY))
            self.ends["right"] += 1


async def kill_and_replace(town: Town) -> None:
    name = town.any_node()
    node = town.cluster.nodes.pop(name)
    town.world.kill(town.cluster.engines[name])
    await node.mailbox.close()
    town.add(type(node))


async def freeze(town: Town) -> None:
    """For longer than a lease, and than decoders wait for prefillers."""
    town.world.freeze(town.cluster.engines[town.any_node()], for_s=town.draw.uniform(0.1, 6.0))


async def kill_or_freeze(town: Town) -> None:
    await town.draw.choice([kill_and_replace, freeze])(town)


def run(seed: int, trouble: Callable[[Town], Awaitable[None]]) -> tuple[str, Counter[str]]:
    with sim.World(seed=seed) as world:
        town = Town(world, seed)
        sim.run(lambda _: town.run(trouble), world=world, limit_s=600)
        return world.log_digest, town.ends


@pytest.mark.parametrize("trouble", [kill_and_replace, freeze, kill_or_freeze])
@pytest.mark.parametrize("index", range(2))
def test_every_request_ends_right_or_in_words(
    trouble: Callable[[Town], Awaitable[None]], index: int, seed: Seed
) -> None:
    run(seed.number(index), trouble)


def test_same_seed_same_story(seed: Seed) -> None:
    assert run(seed.number(), kill_or_freeze) == run(seed.number(), kill_or_freeze)

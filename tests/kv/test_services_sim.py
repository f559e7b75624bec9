"""Router, prefillers and decoders on the simulator, with nodes killed, frozen and added while requests run."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from crossrail import sim
from crossrail.kv.nodes.prefiller import Prefiller
from crossrail.kv.transfer.access import Access
from crossrail.sim.scenarios import Scenario
from crossrail.sim.scenarios import play as play_scenario
from tests.kv.town import (
    GREEDY,
    THOUSAND,
    Plan,
    Town,
    freeze,
    freeze_busy_prefiller,
    kill_and_replace,
    kill_or_freeze,
    play,
)
from tests.support.kv_cluster import monolithic, prompt_of
from tests.support.seeds import Seed

Trouble = Callable[[Town], Awaitable[None]]
SMALL = Plan()
AWAY_S = 25.0  # engines give peers up after 10 s
# Pages serve one request after another, and a prefiller stands still in the middle of every sixth or so.
CROWDED = Plan(prefillers=3, decoders=2, requests=60, begin_s=12.0, every_s=(0.5, 1.5), troubles_max=8, pages=48)


def run(seed: int, trouble: Trouble, plan: Plan = SMALL) -> tuple[str, Counter[str], list[str]]:
    """The world's digest, how requests ended, and what was wrong."""
    with sim.World(seed=seed) as world:
        town = Town(world, plan)

        async def main(_: sim.World) -> list[str]:
            await town.run(trouble)
            problems = town.problems()
            await town.cluster.close()
            return problems

        problems = sim.run(main, world=world, limit_s=600)
        return world.log_digest, town.ends, problems


@pytest.mark.parametrize("trouble", [kill_and_replace, freeze, kill_or_freeze])
@pytest.mark.parametrize("index", range(2))
def test_every_request_ends_right_or_in_words(trouble: Trouble, index: int, seed: Seed) -> None:
    _, ends, problems = run(seed.number(index), trouble)
    assert not problems and ends["right"] >= SMALL.requests * 3 / 4, (ends, problems)


def test_late_writes_of_frozen_prefillers_hit_no_page_that_serves_another(seed: Seed) -> None:
    _, _, problems = run(seed.number(), freeze_busy_prefiller, CROWDED)
    assert not problems


def test_without_fences_late_writes_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Access, "close", lambda access, timeout_s=0.0: None)  # registrations stay open
    problems = (problem for number in range(10) for problem in run(number, freeze_busy_prefiller, CROWDED)[2])
    assert any("was written to" in problem for problem in problems)


def test_hundred_requests_in_flight_while_nodes_die_and_join(seed: Seed) -> None:
    plan = replace(
        THOUSAND, prefillers=8, decoders=24, requests=100, every_s=(0.3, 0.3), troubles_min=20, token_s=0.004
    )
    outcome = play_scenario(Scenario("hundred", "", lambda run: play(run, plan)), seed.number())
    assert outcome.ok, (outcome.failures, outcome.traceback)


async def kill_prefillers(town: Town) -> None:
    for name in [name for name, node in town.cluster.nodes.items() if isinstance(node, Prefiller)]:
        await town.kill(name)


def test_end_of_a_request_for_which_no_prefiller_is_left_is_in_words(seed: Seed) -> None:
    plan = replace(SMALL, prefillers=1, decoders=1, requests=1, begin_s=0.0, every_s=(0.2, 0.2), troubles_max=1)
    _, ends, problems = run(seed.number(), kill_prefillers, replace(plan, tokens_min=200))
    assert (ends, problems) == (Counter(failed=1), [])


def test_same_seed_same_story(seed: Seed) -> None:
    assert run(seed.number(), kill_or_freeze) == run(seed.number(), kill_or_freeze)


def test_same_story_whatever_the_wall_clock_says(monkeypatch: pytest.MonkeyPatch, seed: Seed) -> None:
    told = run(seed.number(), kill_or_freeze)
    day_s = 86400.0
    draw = random.Random(1)
    monkeypatch.setattr(time, "time", lambda: draw.uniform(0.0, 20_000 * day_s))
    monkeypatch.setattr(time, "time_ns", lambda: draw.randrange(1 << 60))
    assert run(seed.number(), kill_or_freeze) == told


@pytest.mark.parametrize("who", ["router", "prefiller-1", "decoder-2"])
@pytest.mark.parametrize("fault", ["frozen", "cut off"])
def test_who_was_away_until_engines_gave_it_up_is_found_again(who: str, fault: str, seed: Seed) -> None:
    """Longer than peer_timeout_s: nobody starts it anew, and so nobody but the services can try it again."""
    with sim.World(seed=seed.number()) as world:
        town = Town(world, replace(SMALL, prefillers=1, decoders=1, requests=1, troubles_max=0))

        async def main(_: sim.World) -> None:
            cluster = town.cluster
            await town.run(freeze)
            engine = cluster.engines[who]
            under_way = asyncio.ensure_future(cluster.complete(prompt_of(200), GREEDY))
            await asyncio.sleep(0.2)  # half of its prompt is computed
            if fault == "frozen":
                world.freeze(engine, for_s=AWAY_S)
            else:
                own = [host for host in world.hosts if engine in host.engines]
                world.partition(own, [host for host in world.hosts if host not in own], for_s=AWAY_S)
            await asyncio.sleep(2 * AWAY_S)
            assert under_way.done()
            for seed in range(3):
                prompt = prompt_of(100, seed)
                assert (await cluster.complete(prompt, GREEDY))[0] == await monolithic(prompt, GREEDY)
            await asyncio.sleep(AWAY_S)
            found = [sentence for guard in town.guards.values() for sentence in guard.check()]
            assert not found and not cluster.busy_pages()
            await cluster.close()

        sim.run(main, world=world, limit_s=600)


def test_request_without_a_prefiller_waits_as_long_as_its_router_has_it_wait(seed: Seed) -> None:
    """Which may be longer than a decoder waits for a router that is gone."""
    with sim.World(seed=seed.number()) as world:
        town = Town(world, replace(SMALL, prefillers=1, decoders=1, requests=1, troubles_max=0))

        async def main(_: sim.World) -> None:
            cluster = town.cluster
            await town.run(freeze)
            assert cluster.router is not None
            cluster.router.options = replace(cluster.router.options, queue_s=120.0)
            prompt = prompt_of(200)
            under_way = asyncio.ensure_future(cluster.complete(prompt, GREEDY))
            await asyncio.sleep(0.2)  # half of it is computed
            await town.kill("prefiller-1")
            await asyncio.sleep(100.0)
            assert not under_way.done()
            town.add(Prefiller)
            tokens, end = await under_way
            assert tokens == await monolithic(prompt, GREEDY), end

            under_way = asyncio.ensure_future(cluster.complete(prompt_of(200, seed=2), GREEDY))
            await asyncio.sleep(0.2)
            await town.kill("prefiller-3")
            begun_s = world.now_s
            end = (await under_way)[1]
            assert "no other prefiller within 120 s" in end.detail and world.now_s - begun_s < 130
            await cluster.close()

        sim.run(main, world=world, limit_s=600)

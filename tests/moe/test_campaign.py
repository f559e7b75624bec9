"""What the campaign plays of MoE rounds (tests/moe/campaign.py): it holds, replays, and has every kind of group."""

from __future__ import annotations

import random

import pytest

from crossrail.sim.scenarios import Scenario, play
from tests.moe import campaign
from tests.support.seeds import Seed

SCENARIO = Scenario("tests.moe.campaign:rounds", "", campaign.rounds)


# 1219809918: datagrams of a handshake are lost for longer than the peer's patience without a path.
@pytest.mark.parametrize("seed", [*range(1, 9), 1219809918])
def test_a_fixed_seed_holds(seed: int) -> None:
    outcome = play(SCENARIO, seed)
    assert outcome.failures == []
    assert outcome.checks > 10


def test_a_fresh_seed_holds_and_replays_to_the_byte(seed: Seed) -> None:
    number = seed.number()
    first, second = play(SCENARIO, number), play(SCENARIO, number)
    assert first.failures == [], f"crossrail sim --scenario {SCENARIO.name} --seed {number}"
    assert (second.digest, second.virtual_s, second.stats) == (first.digest, first.virtual_s, first.stats)


def test_plans_are_of_every_kind() -> None:
    plans = [campaign.Plan.drawn(random.Random(number)) for number in range(1000)]

    def has(**wanted: object) -> bool:
        return any(
            all(getattr(plan, name, plan.config.get(name)) == value for name, value in wanted.items()) for plan in plans
        )

    assert all(has(fault=fault) for fault in campaign.FAULTS)
    assert all(has(size=4, node_size=size) for size in (1, 2, 4))
    assert has(fault="kill", on_lost="mask", node_size=1) and has(fault="kill", on_lost="mask", size=4, node_size=4)
    for nodes in ((0, 0, 0, 1), (0, 1, 1), (0, 0, 1, 0), (0, 0, 1, 1, 1, 1)):
        assert has(nodes=nodes, fault="hidden") and has(nodes=nodes, fault="kill", on_lost="raise")
    assert has(nodes=(0, 0, 0, 1), on_lost="mask") and has(nodes=(0, 1, 1, 1), node_sums=True)
    assert has(fault="kill", on_lost="raise", dp_size=2) and has(fault="kill", on_lost="mask", dp_size=2)
    assert has(fault="kill", node_sums=True) and has(fault="hidden", node_sums=True)
    assert has(fault="broken", private_tokens=0, is_overlapped=True) and has(layout="masked")

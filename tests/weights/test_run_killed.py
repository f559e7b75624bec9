"""Processes that are killed around an update."""

from __future__ import annotations

import asyncio

import pytest

from crossrail._options import SECRET_VARIABLE
from crossrail.cli.weights.players import Player, Players
from crossrail.weights.inventory.holdings import Role
from crossrail.weights.toy import ToyModel
from tests.weights.conftest import MakeFleet
from tests.weights.fleet import PATIENCE_S, SECRET

pytestmark = pytest.mark.no_sanitizer  # starts interpreters

MODEL = ToyModel(layers=1, hidden=128, intermediate=128, experts=2, vocabulary=256)
UPDATES = 5


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("role", ["trainer", "target"])
async def test_who_is_killed_the_moment_before_an_update_does_not_fail_it(
    make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch, role: Role, transport: str
) -> None:
    """Before the controller's engine can know. Trainer 0 holds everything, so nobody misses the others."""
    monkeypatch.setenv(SECRET_VARIABLE, SECRET.decode())
    fleet = make_fleet(transport, trainer_count=0)
    controller = await fleet.start(targets=[])
    address = controller.address.hex()
    players = Players(SECRET.decode())
    counts = {"trainer": 1, "target": 1, role: UPDATES}
    cast = [
        Player(each, rank, MODEL, address, UPDATES, transport=transport)
        for each, count in counts.items()
        for rank in range(count)
    ]
    try:
        await asyncio.gather(*(players.start(player) for player in cast))
        await controller.update(1, PATIENCE_S)
        for victim in range(1, UPDATES):
            version = victim + 1
            players._processes[f"{role}-{victim}"].kill()  # not waited for
            report = await controller.update(version, PATIENCE_S)
            assert victim not in controller.ranks(role)
            assert report.plan_s > 0
        seen = [await players.said("target-0", "version", PATIENCE_S) for _ in range(UPDATES)]
        assert [(each["version"], each["wrong"]) for each in seen] == [(n, []) for n in range(1, UPDATES + 1)]
    finally:
        await players.close()

"""The barrier of torch.distributed between trainers of other processes, over gloo."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

import crossrail as xr
from crossrail.cli.weights.players import Player, Players
from crossrail.weights.services.controller import WeightController
from crossrail.weights.step.torch_barrier import TorchBarrier
from crossrail.weights.toy import ToyModel
from tests.weights.conftest import MakeFleet
from tests.weights.fleet import PATIENCE_S, SECRET

pytestmark = pytest.mark.no_sanitizer  # starts interpreters, of which two import torch

MODEL = ToyModel(layers=1, hidden=128, intermediate=128, experts=2, vocabulary=256)
TRAINERS = 2
START_S = 100.0


@dataclass(frozen=True)
class GlooTrainer:
    rank: int
    controller: str
    store: str

    @property
    def name(self) -> str:
        return f"trainer-{self.rank}"

    def command(self) -> list[str]:
        spec = asdict(self) | {"count": TRAINERS, "model": asdict(MODEL)}
        return ["-m", "tests.weights.gloo_trainer", json.dumps(spec)]


@dataclass
class Cast:
    players: Players
    controller: WeightController

    async def tell(self, rank: int, **order: float) -> None:
        await self.players.tell(f"trainer-{rank}", **order)

    async def said(self, rank: int, word: str) -> str:
        return str((await self.players.said(f"trainer-{rank}", word, PATIENCE_S))[word])


@pytest.fixture
async def cast(make_fleet: MakeFleet, tmp_path: Path) -> AsyncIterator[Cast]:
    """Two trainers who share a gloo group, an inference rank that compares, and the controller here."""
    fleet = make_fleet(trainer_count=0)
    controller = await fleet.start(targets=[])
    address = controller.address.hex()
    players = Players(SECRET.decode())
    target = Player("target", 0, MODEL, address, 1, kind="fp8", transport="shm")
    trainers = [GlooTrainer(rank, address, str(tmp_path / "store")) for rank in range(TRAINERS)]
    try:
        await asyncio.wait_for(asyncio.gather(*(players.start(one) for one in (*trainers, target))), START_S)
        yield Cast(players, controller)
    finally:
        await players.close()


@pytest.mark.timeout(240)
async def test_barrier_of_gloo(cast: Cast) -> None:
    """It holds until all are there, an update passes it, it ends in time, and with a peer that dies."""
    await cast.tell(0, barrier=PATIENCE_S)
    said = asyncio.ensure_future(cast.said(0, "done"))
    assert not (await asyncio.wait([said], timeout=0.5))[0]
    await cast.tell(1, barrier=PATIENCE_S)
    await said
    await cast.said(1, "done")

    for rank in range(TRAINERS):
        await cast.tell(rank, publish=1)
    report = await cast.controller.update(1, PATIENCE_S)
    for rank in range(TRAINERS):
        await cast.said(rank, "done")
    looked = await cast.players.said("target-0", "version", PATIENCE_S)
    assert (looked["version"], looked["wrong"]) == (1, [])
    assert set(report.steps) == set(range(TRAINERS))

    await cast.tell(0, barrier=0.5)
    assert (await cast.said(0, "failed")).startswith("WaitTimeout: barrier over gloo: ")

    await cast.tell(0, barrier=PATIENCE_S)
    await cast.players.kill("trainer-1")
    assert (await cast.said(0, "failed")).startswith("WaitTimeout: barrier over gloo: ")


@pytest.mark.parametrize("left_s", [0.0, -0.001, 0.0004])
async def test_barrier_without_time_is_not_entered(left_s: float) -> None:
    """Of -1 ms torch makes its default, half an hour. There is no group here: entering fails otherwise."""
    with pytest.raises(xr.WaitTimeout, match="it was not entered"):
        await TorchBarrier(None).wait(left_s)

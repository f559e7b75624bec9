"""The barrier of trainers over the store of their torch.distributed group."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
import torch

import crossrail as xr
from crossrail.cli.weights.players import Player, Players
from crossrail.weights.services.controller import WeightController
from crossrail.weights.step import torch_barrier
from crossrail.weights.step.torch_barrier import TorchBarrier
from crossrail.weights.toy import ToyModel
from tests.conftest import EngineFactory
from tests.weights.conftest import MakeFleet
from tests.weights.fleet import PATIENCE_S, SECRET

pytestmark = pytest.mark.no_sanitizer  # starts interpreters, of which two import torch

MODEL = ToyModel(layers=1, hidden=128, intermediate=128, experts=2, vocabulary=256)
TRAINERS = 2
START_S = 100.0
ALONE = "WaitTimeout: barrier over torch's store: 1 of 2 trainers have come in 0.2 s"


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
    """It holds until all are there, ends in time at each of them, also where one has died, and nothing is left of that
    when an update passes it.
    """
    await cast.tell(0, barrier=PATIENCE_S, imm=1)
    said = asyncio.ensure_future(cast.said(0, "done"))
    assert not (await asyncio.wait([said], timeout=0.5))[0]
    await cast.tell(1, barrier=PATIENCE_S, imm=1)
    await said
    await cast.said(1, "done")

    for rank, imm in ((1, 3), (1, 5), (0, 7)):  # not as often each
        await cast.tell(rank, barrier=0.2, imm=imm)
        assert await cast.said(rank, "failed") == ALONE

    for rank in range(TRAINERS):
        await cast.tell(rank, publish=1)
    report = await cast.controller.update(1, PATIENCE_S)
    for rank in range(TRAINERS):
        await cast.said(rank, "done")
    looked = await cast.players.said("target-0", "version", PATIENCE_S)
    assert (looked["version"], looked["wrong"]) == (1, [])
    assert set(report.steps) == set(range(TRAINERS))

    await cast.tell(0, barrier=0.2, imm=9)
    await cast.players.kill("trainer-1")
    assert await cast.said(0, "failed") == ALONE


class Trainers:
    """Who meet over a store in this process. Each call is an attempt's barriers, of all of them."""

    def __init__(self, count: int) -> None:
        self.store = torch.distributed.HashStore()
        self._used: list[list[str]] = [[] for _ in range(count)]

    def barriers(self, imm: int) -> list[TorchBarrier]:
        return [TorchBarrier(lambda: self.store, len(self._used), imm, used) for used in self._used]


async def entered(barrier: TorchBarrier) -> asyncio.Future[None]:
    waiting = asyncio.ensure_future(barrier.wait(PATIENCE_S))
    await asyncio.sleep(0.1)
    return waiting


async def test_each_holds_until_all_have_come_as_often() -> None:
    barriers = Trainers(3).barriers(1)
    for _ in range(3):
        waiting = [await entered(barriers[rank]) for rank in (2, 0)]
        assert not any(each.done() for each in waiting)
        await asyncio.gather(*waiting, barriers[1].wait(PATIENCE_S))


async def test_what_is_left_of_a_failed_attempt_is_nothing_to_the_next() -> None:
    trainers = Trainers(2)
    first, second = trainers.barriers(1)
    await asyncio.gather(first.wait(PATIENCE_S), second.wait(PATIENCE_S))
    for _ in range(2):  # the other does not come as often
        with pytest.raises(xr.WaitTimeout, match=r"1 of 2 trainers have come in 0\.02 s"):
            await second.wait(0.02)
    for imm in (3, 5):
        first, second = trainers.barriers(imm)
        waiting = await entered(first)
        assert not waiting.done()
        await asyncio.gather(waiting, second.wait(PATIENCE_S))


async def test_keys_of_attempts_before_are_taken_out_of_the_store() -> None:
    trainers = Trainers(2)
    for imm in range(1, 21, 2):
        barriers = trainers.barriers(imm)
        for _ in range(3):
            await asyncio.gather(*(barrier.wait(PATIENCE_S) for barrier in barriers))
        assert trainers.store.num_keys() == 2 * 3


@pytest.mark.parametrize("left_s", [0.0, -0.001, 0.0004])
async def test_who_has_no_time_left_has_come_all_the_same(left_s: float) -> None:
    first, second = Trainers(2).barriers(1)
    with pytest.raises(xr.WaitTimeout, match="1 of 2 trainers"):
        await first.wait(left_s)
    await second.wait(left_s)


async def test_trainers_of_two_controllers_that_share_what_makes_barriers_keep_their_keys_apart(
    open_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, make = torch.distributed.HashStore(), TorchBarrier.of(None)
    monkeypatch.setattr(torch_barrier, "_store_of", lambda _group: store)
    actor, critic = open_engine("actor"), open_engine("critic")

    first = make(actor, [critic.address], 1)  # the other trainer is of another process
    waiting = asyncio.ensure_future(first.wait(PATIENCE_S))
    while not store.check(["crossrail/barrier/1/1"]):
        await asyncio.sleep(0.005)
    await make(critic, [], 2).wait(PATIENCE_S)

    await TorchBarrier(lambda: store, 2, 1, []).wait(PATIENCE_S)
    await waiting


async def test_closed_barrier_keeps_no_thread(nothing_leaks: None) -> None:
    barrier = Trainers(2).barriers(1)[0]
    waiting = await entered(barrier)
    waiting.cancel()
    barrier.close()
    await asyncio.gather(waiting, return_exceptions=True)


async def test_store_that_is_gone_is_said() -> None:
    class Gone:
        def add(self, _key: str, _amount: int) -> int:
            raise RuntimeError("Broken pipe\nat some place of C++")

    with pytest.raises(xr.CrossrailError, match=r"^barrier over torch's store: Broken pipe$"):
        await TorchBarrier(Gone, 2, 1, []).wait(PATIENCE_S)

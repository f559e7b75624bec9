"""An inference rank that is frozen while it is written to."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest

from crossrail._options import SECRET_VARIABLE
from crossrail.cli.weights.players import Player, Players
from crossrail.weights.services import messages as m
from crossrail.weights.toy import ToyModel
from tests.weights.conftest import MakeFleet
from tests.weights.fleet import PATIENCE_S, SECRET

pytestmark = pytest.mark.no_sanitizer  # starts interpreters

MODEL = ToyModel(layers=1, hidden=128, intermediate=128, experts=2, vocabulary=256)


def stands_still(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


async def test_all_writes_end_while_the_inference_rank_is_stopped(
    make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From its answer to Open until trainers say that they have sent all: no thread of it runs in between. Only what a
    trainer writes first to a rank, in the first update, waits for the rank's engine, as the two have to connect.
    """
    monkeypatch.setenv(SECRET_VARIABLE, SECRET.decode())
    controller = await make_fleet("shm", trainer_count=0).start(targets=[])
    players, stage = Players(SECRET.decode()), controller._stage
    sent: list[Any] = []
    is_connected = False

    async def stage_without_the_rank(members: Any, question: Any, answer: Any, timeout_s: float) -> Any:
        if answer is not m.Sent or not is_connected:
            return await stage(members, question, answer, timeout_s)
        process = players._processes["target-0"]
        process.send_signal(signal.SIGSTOP)
        try:
            while not stands_still(process.pid):
                await asyncio.sleep(0.001)
            sent.extend(told := await stage(members, question, answer, timeout_s))
            assert stands_still(process.pid)
        finally:
            process.send_signal(signal.SIGCONT)
        return told

    monkeypatch.setattr(controller, "_stage", stage_without_the_rank)
    cast = [Player(role, 0, MODEL, controller.address.hex(), 3, transport="shm") for role in ("trainer", "target")]
    try:
        await asyncio.gather(*(players.start(player) for player in cast))
        for version in (1, 2, 3):
            report = await controller.update(version, PATIENCE_S)
            seen = await players.said("target-0", "version", PATIENCE_S)
            assert (seen["version"], seen["wrong"]) == (version, [])
            assert report.written_bytes == int(controller.plan.writes["nbytes"].sum()) > 0
            is_connected = True
        assert len(sent) == 2
    finally:
        await players.close()

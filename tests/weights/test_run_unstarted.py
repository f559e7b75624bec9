"""A mailbox that nobody has started hears nothing: whoever has it is told at once."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

import crossrail as xr
from crossrail.control.wire import EngineWire
from crossrail.weights.inventory.holdings import Role
from crossrail.weights.inventory.memory import WeightMemory
from crossrail.weights.services.controller import WeightController
from crossrail.weights.services.messages import mailbox
from crossrail.weights.services.receiver import WeightReceiver
from crossrail.weights.services.trainer import WeightTrainer
from tests.conftest import EngineFactory
from tests.weights.conftest import MakeFleet
from tests.weights.fleet import PATIENCE_S, SECRET


@pytest.mark.parametrize("role", ["trainer", "target"])
async def test_join_with_a_mailbox_that_was_not_started(make_fleet: MakeFleet, role: Role) -> None:
    fleet = make_fleet(trainer_count=1)
    controller = await fleet.start(targets=[0])
    engine = fleet.engines["silent"] = xr.Engine("silent", transport="shm")
    fleet.wires.append(EngineWire(engine))
    box = fleet.mailboxes["silent"] = mailbox(fleet.wires[-1], SECRET)
    memory = WeightMemory(engine, role, 7)
    memory.add("norm", np.zeros(48, np.uint16), dtype="bfloat16")
    member = WeightTrainer(box, memory) if role == "trainer" else WeightReceiver(box, memory)

    with pytest.raises(xr.UsageError, match=r"this mailbox was not started, .* Next: start\(\) it"):
        await member.join(controller.address, PATIENCE_S)

    box.start()
    await member.join(controller.address, PATIENCE_S)
    assert controller.ranks(role) == [0, 7]
    await member.close()
    memory.close()


async def test_controller_whose_mailbox_was_not_started(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    engine = fleet.engines["silent"] = xr.Engine("silent", transport="shm")
    fleet.wires.append(EngineWire(engine))
    box = fleet.mailboxes["silent"] = mailbox(fleet.wires[-1], SECRET)
    controller = WeightController(box)

    with pytest.raises(xr.UsageError, match="this mailbox was not started"):
        await controller.ready([0], [0], PATIENCE_S)
    with pytest.raises(xr.UsageError, match="this mailbox was not started"):
        await controller.update(1, PATIENCE_S)


def test_join_in_another_event_loop_than_the_mailboxs(open_engine: EngineFactory) -> None:
    """As of asyncio.run() for each call: what the first one began ends with it."""
    engine = open_engine()
    wire = EngineWire(engine)
    box = mailbox(wire, SECRET)
    memory = WeightMemory(engine, "trainer", 0)
    memory.add("norm", np.zeros(48, np.uint16), dtype="bfloat16")
    trainer = WeightTrainer(box, memory)

    async def start() -> None:
        box.start()

    asyncio.run(start())
    with pytest.raises(xr.UsageError, match=r"an event loop that is closed, .* Next: one event loop for all"):
        asyncio.run(trainer.join(box.address))

    asyncio.run(trainer.close())
    memory.close()
    wire.close()


def test_receiver_outside_of_a_running_event_loop(open_engine: EngineFactory) -> None:
    engine = open_engine()
    with EngineWire(engine) as wire, WeightMemory(engine, "target", 0) as memory:
        with pytest.raises(xr.UsageError, match=r"WeightReceiver\(\) outside of a coroutine"):
            WeightReceiver(mailbox(wire, SECRET), memory)

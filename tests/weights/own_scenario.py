"""A scenario of a user's with weights: `crossrail sim --scenario tests.weights.own_scenario:updates`.

Arrays are ordinary ones of NumPy, wherever its allocator puts them; a trainer is killed in the middle.
"""

from __future__ import annotations

import asyncio

import numpy as np

import crossrail as xr
from crossrail.control.mailbox import Mailbox
from crossrail.control.wire import EngineWire
from crossrail.sim.scenarios import Run
from crossrail.weights import UpdateFailed, WeightController, WeightMemory, WeightReceiver, WeightTrainer, messages

_SHAPE = (96, 64)
_NAMES = [f"w{number}" for number in range(6)]
_junk: list[np.ndarray] = []


def _box(engine: xr.Engine) -> Mailbox:
    box = messages.mailbox(EngineWire(engine), b"all of them share it")
    box.start()
    return box


async def updates(run: Run) -> None:
    """Three updates; the second one loses a trainer, which comes back."""
    _junk.extend(np.zeros(_SHAPE, np.float32) for _ in range(len(_junk) + 5))
    del _junk[::2]  # so that in each run of this process the allocator does something else
    controller = WeightController(_box(run.host("c").engine("c", peer_timeout_s=2)))
    homes = [run.host(f"t{rank}") for rank in range(2)]
    arrays = {name: np.zeros(_SHAPE, np.float32) for name in _NAMES}
    receiving = await _receiver(run.host("i").engine("i", peer_timeout_s=2), controller, arrays)
    trainers = [await _trainer(homes[rank].engine(f"t{rank}"), controller, rank) for rank in range(2)]
    for version in (1, 2, 3):
        if version == 2:
            run.world.kill(homes[1].engines[0], at_s=run.world.now_s + 4e-6)
        offers = [asyncio.create_task(trainer.publish(version, 20)) for trainer in trainers]
        try:
            await controller.update(version, 10)
        except UpdateFailed:
            run.check.equal("the version that fails", version, 2)
            await asyncio.gather(*offers, return_exceptions=True)
            trainers[1] = await _trainer(homes[1].engine("t1.2"), controller, 1)
            offers = [asyncio.create_task(trainer.publish(version, 20)) for trainer in trainers]
            await controller.update(version, 20)
        await asyncio.gather(*offers, return_exceptions=True)
        run.check.equal("the version", receiving.version, version)
    for number, array in enumerate(arrays.values()):
        run.check.that(bool((array == number).all()), f"w{number} is not what the trainers had")


async def _receiver(engine: xr.Engine, controller: WeightController, arrays: dict[str, np.ndarray]) -> WeightReceiver:
    memory = WeightMemory(engine, "target", 0)
    for name, array in arrays.items():
        memory.add(name, array)
    receiver = WeightReceiver(_box(engine), memory)
    await receiver.join(controller.address)
    return receiver


async def _trainer(engine: xr.Engine, controller: WeightController, rank: int) -> WeightTrainer:
    memory, rows = WeightMemory(engine, "trainer", rank), _SHAPE[0] // 2
    for number, name in enumerate(_NAMES):
        half = np.full((rows, _SHAPE[1]), number, np.float32)
        memory.add(name, half, shape=_SHAPE, box=((rank * rows, (rank + 1) * rows), (0, _SHAPE[1])))
    trainer = WeightTrainer(_box(engine), memory)
    await trainer.join(controller.address)
    return trainer

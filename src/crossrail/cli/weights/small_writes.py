"""The cost of a scheduled transfer in Python: steps of many small writes, each a task of its own, in this process."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import crossrail as xr
from crossrail.control.wire import EngineWire
from crossrail.weights import PlanOptions, WeightController, WeightMemory, WeightReceiver, WeightTrainer, messages
from crossrail.weights.step.ready import ready_tasks

_SHAPE = (8, 64)
_PATIENCE_S = 600.0
KINDS: dict[str, tuple[int, Any, str]] = {  # trainers, how numpy keeps theirs, its dtype
    "direct": (1, np.uint16, "bfloat16"),
    "cast": (1, np.float32, "float32"),
    "fp8": (1, np.uint16, "bfloat16"),
    "gather": (2, np.uint16, "bfloat16"),
}


class SmallWrites(NamedTuple):
    """Of one kind. plan_s: the first update's, planning and preparing tasks. ready_us: the latter alone, processor time
    per task. update_s: of a later update. loop_us: processor time of the event loop's thread per write, of all members
    together; all_us: of the process, with conversions, the engines' copies and everything else its threads do. Medians.
    """

    writes: int
    plan_s: float
    ready_us: float
    update_s: float
    loop_us: float
    all_us: float


async def measure(kind: str, params: int, rounds: int, transport: str = "shm") -> SmallWrites:
    """Trainers, one inference rank and the controller in this process. kind: of KINDS; fp8 has two writes of each."""
    closes: list[Callable[[], Any]] = []
    try:
        return await _measure(kind, params, rounds, transport, closes)
    finally:
        for close in reversed(closes):
            if asyncio.iscoroutine(closing := close()):
                await closing


async def _measure(kind: str, params: int, rounds: int, transport: str, closes: list[Callable[[], Any]]) -> SmallWrites:
    def open_box(name: str) -> tuple[xr.Engine, Any]:
        engine = xr.Engine(name, transport=transport)
        wire = EngineWire(engine)
        box = messages.mailbox(wire, b"of this benchmark")
        box.start()
        closes.extend([engine.close, wire.close, box.close])
        return engine, box

    options = PlanOptions(gather="full" if kind == "gather" else "needed", write_bytes_min=1)
    controller = WeightController(open_box("controller")[1], options)
    count = KINDS[kind][0]
    trainers = []
    for rank in range(count):
        engine, box = open_box(f"trainer-{rank}")
        trainer = WeightTrainer(box, _source(engine, rank, kind, params), 64 << 20)
        closes.extend([trainer.memory.close, trainer.close])
        trainers.append(trainer)
    engine, box = open_box("inference")
    receiver = WeightReceiver(box, _target(engine, kind, params))
    closes.extend([receiver.memory.close, receiver.close])
    for trainer in trainers:
        await trainer.join(controller.address, _PATIENCE_S)
    await receiver.join(controller.address, _PATIENCE_S)

    took: list[tuple[float, float, float]] = []
    plan_s = 0.0
    for version in range(rounds + 1):
        began = time.thread_time(), time.process_time()
        published = [asyncio.ensure_future(trainer.publish(version, _PATIENCE_S)) for trainer in trainers]
        report = await controller.update(version, _PATIENCE_S)
        await asyncio.gather(*published)
        plan_s += report.plan_s
        if version:
            took.append((report.transfer_s, time.thread_time() - began[0], time.process_time() - began[1]))
    assert controller.plan is not None
    part = controller.plan.of_trainer(0)
    began_s = time.thread_time()
    ready_us = len(list(ready_tasks(part, 0))) and (time.thread_time() - began_s) / len(part.tasks) * 1e6
    writes = len(controller.plan.writes)
    update_s, loop_s, all_s = (statistics.median(column) for column in zip(*took, strict=True))
    return SmallWrites(writes, plan_s, ready_us, update_s, loop_s / writes * 1e6, all_s / writes * 1e6)


class _Pieces:
    """Memory of an engine's own, piece by piece."""

    def __init__(self, engine: xr.Engine, nbytes: int) -> None:
        self.region = engine.alloc(nbytes)
        self._bytes = self.region.array()
        self._end = 0

    def take(self, shape: tuple[int, ...], kind: Any) -> Any:
        nbytes = int(np.prod(shape)) * np.dtype(kind).itemsize
        at, self._end = self._end, self._end + nbytes + 64  # apart: neighbours would be one write
        return self._bytes[at : at + nbytes].view(kind).reshape(shape)


def _source(engine: xr.Engine, rank: int, kind: str, params: int) -> WeightMemory:
    count, kept, dtype = KINDS[kind]
    rows = _SHAPE[0] // count
    pieces = _Pieces(engine, params * (rows * _SHAPE[1] * np.dtype(kept).itemsize + 64))
    memory = WeightMemory(engine, "trainer", rank, [pieces.region])
    box = ((rank * rows, (rank + 1) * rows), (0, _SHAPE[1]))
    for index in range(params):
        array = pieces.take((rows, _SHAPE[1]), kept)
        memory.add(f"p{index}", array, shape=_SHAPE, box=box, dtype=dtype, mesh="fsdp")
    return memory


def _target(engine: xr.Engine, kind: str, params: int) -> WeightMemory:
    pieces = _Pieces(engine, params * (_SHAPE[0] * _SHAPE[1] * 2 + 128))
    memory = WeightMemory(engine, "target", 0, [pieces.region])
    for index in range(params):
        name = f"p{index}"
        if kind == "fp8":
            memory.add(name, pieces.take(_SHAPE, np.uint8), dtype="float8_e4m3fn")
            memory.add(f"{name}_s", pieces.take((1, 1), np.float32), scale_of=name, block=(128, 128))
        else:
            memory.add(name, pieces.take(_SHAPE, np.uint16), dtype="bfloat16")
    return memory

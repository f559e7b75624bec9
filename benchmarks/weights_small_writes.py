"""What a scheduled transfer costs in Python: `./dev run python benchmarks/weights_small_writes.py [--writes 100000]`.

A step with so many writes of 1 KiB, each a task of its own, the most that a step can have to do for its bytes: trainer,
inference rank and controller in this process, over shm. "direct": the bytes lie ready. "cast": float32 to bfloat16.
"fp8": bfloat16 to fp8 with a scale, two writes of a task. "gather": two trainers with half of each parameter, of which
each sends half of them, whole.

plan: the first update's, planning and making tasks ready. ready: the latter alone, processor time for each task. loop:
processor time of the event loop's thread in a later update for each write, of all members together; all: of the
process, with conversions, the engines' copies and whatever else its threads do. Medians.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import crossrail as xr
from crossrail.control.wire import EngineWire
from crossrail.weights import PlanOptions, WeightController, WeightMemory, WeightReceiver, WeightTrainer, messages
from crossrail.weights.step.ready import ready_tasks

SHAPE = (8, 64)
PATIENCE_S = 600.0
KINDS: dict[str, tuple[int, Any, str]] = {  # trainers, how numpy keeps theirs, its dtype
    "direct": (1, np.uint16, "bfloat16"),
    "cast": (1, np.float32, "float32"),
    "fp8": (1, np.uint16, "bfloat16"),
    "gather": (2, np.uint16, "bfloat16"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--writes", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    args = parser.parse_args()
    table = Table("", "writes", "plan s", "ready us/task", "update s", "loop us/write", "all us/write")
    for kind in args.kinds:
        table.add_row(kind, *asyncio.run(measure(kind, args.writes // (2 if kind == "fp8" else 1), args.rounds)))
    Console().print(table)


async def measure(kind: str, params: int, rounds: int) -> list[str]:
    closes: list[Callable[[], Any]] = []

    def open_box(name: str) -> tuple[xr.Engine, Any]:
        engine = xr.Engine(name, transport="shm")
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
        trainers.append(WeightTrainer(box, source(engine, rank, kind, params), 64 << 20))
    engine, box = open_box("inference")
    receiver = WeightReceiver(box, target(engine, kind, params))
    for member in (*trainers, receiver):
        await member.join(controller.address, PATIENCE_S)

    took: list[tuple[float, float, float]] = []
    plan_s = 0.0
    for version in range(rounds + 1):
        began = time.thread_time(), time.process_time()
        published = [asyncio.ensure_future(trainer.publish(version, PATIENCE_S)) for trainer in trainers]
        report = await controller.update(version, PATIENCE_S)
        await asyncio.gather(*published)
        plan_s += report.plan_s
        if version:
            took.append((report.transfer_s, time.thread_time() - began[0], time.process_time() - began[1]))
    assert controller.plan is not None
    part = controller.plan.of_trainer(0)
    began_s = time.thread_time()
    ready_us = len(list(ready_tasks(part, 0))) and (time.thread_time() - began_s) / len(part.tasks) * 1e6
    writes = len(controller.plan.writes)
    for trainer in trainers:
        await trainer.close()
        trainer.memory.close()
    await receiver.close()
    receiver.memory.close()
    for close in reversed(closes):
        if asyncio.iscoroutine(closing := close()):
            await closing
    update_s, loop_s, all_s = (statistics.median(column) for column in zip(*took, strict=True))
    figures = [plan_s, ready_us, update_s, loop_s / writes * 1e6, all_s / writes * 1e6]
    return [f"{writes:,}", *(f"{figure:.2f}" for figure in figures)]


class Pieces:
    """Memory of an engine's own, piece by piece."""

    def __init__(self, engine: xr.Engine, nbytes: int) -> None:
        self.region = engine.alloc(nbytes)
        self._bytes = self.region.array()
        self._end = 0

    def take(self, shape: tuple[int, ...], kind: Any) -> Any:
        nbytes = int(np.prod(shape)) * np.dtype(kind).itemsize
        at, self._end = self._end, self._end + nbytes + 64  # apart: neighbours would be one write
        return self._bytes[at : at + nbytes].view(kind).reshape(shape)


def source(engine: xr.Engine, rank: int, kind: str, params: int) -> WeightMemory:
    count, kept, dtype = KINDS[kind]
    rows = SHAPE[0] // count
    pieces = Pieces(engine, params * (rows * SHAPE[1] * np.dtype(kept).itemsize + 64))
    memory = WeightMemory(engine, "trainer", rank, [pieces.region])
    box = ((rank * rows, (rank + 1) * rows), (0, SHAPE[1]))
    for index in range(params):
        array = pieces.take((rows, SHAPE[1]), kept)
        memory.add(f"p{index}", array, shape=SHAPE, box=box, dtype=dtype, mesh="fsdp")
    return memory


def target(engine: xr.Engine, kind: str, params: int) -> WeightMemory:
    pieces = Pieces(engine, params * (SHAPE[0] * SHAPE[1] * 2 + 128))
    memory = WeightMemory(engine, "target", 0, [pieces.region])
    for index in range(params):
        name = f"p{index}"
        if kind == "fp8":
            memory.add(name, pieces.take(SHAPE, np.uint8), dtype="float8_e4m3fn")
            memory.add(f"{name}_s", pieces.take((1, 1), np.float32), scale_of=name, block=(128, 128))
        else:
            memory.add(name, pieces.take(SHAPE, np.uint16), dtype="bfloat16")
    return memory


if __name__ == "__main__":
    main()

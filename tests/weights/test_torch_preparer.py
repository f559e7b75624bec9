"""Tasks prepared by torch give what numpy gives, byte for byte: the code that runs on a GPU, on the CPU."""

from __future__ import annotations

import gc
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given

import crossrail as xr
from crossrail.weights.errors import NotFinite
from crossrail.weights.inventory.memory import WeightMemory
from crossrail.weights.planning.planner import PlanOptions, make_plan
from crossrail.weights.step import torch_preparer
from crossrail.weights.step.preparer import NumpyPreparer, Preparer
from crossrail.weights.step.ready import ready_tasks
from crossrail.weights.step.task import ReadyTask, View
from crossrail.weights.step.torch_preparer import TorchPreparer
from tests.conftest import EngineFactory
from tests.weights.allocations import no_engine_memory, python_bytes
from tests.weights.conftest import MakeFleet
from tests.weights.memory import fill_trainers
from tests.weights.replay import Plain, run_task
from tests.weights.small_model import MODEL, Target, Trainer, plain, weights_of
from tests.weights.worlds import World, worlds


@given(worlds(matrix_blocks=True))
def test_any_plan_as_numpy_does_it(world: World) -> None:
    """Uneven shards, gaps, several meshes, boxes of any place, blocks of any size."""
    fill_trainers(world.trainers, world.whole)
    plan = make_plan(*world.inventories, world.options)
    memories = {one.inventory.rank: [one.memory] for one in world.trainers}

    def written(preparer: Preparer, far: Collection[int] = ()) -> dict[int, bytes]:
        received = {one.inventory.rank: [one.memory.copy()] for one in world.targets}
        for rank in memories:
            for task in ready_tasks(plan.of_trainer(rank), rank, far):
                run_task(task, memories[rank], memories, received, preparer)
        return {rank: memory.tobytes() for rank, (memory,) in received.items()}

    wanted = written(NumpyPreparer())
    assert written(TorchPreparer("cpu")) == wanted
    assert written(TorchPreparer("cpu"), far=[0]) == wanted


def test_values_where_their_type_cannot_be_read_are_refused(open_engine: EngineFactory) -> None:
    engine = open_engine(transport="null")
    memory = np.zeros(4 * 16 + 1, np.uint8)
    values = np.ndarray((16,), np.float32, memory, offset=1)
    with WeightMemory(engine, "trainer", 0) as source, WeightMemory(engine, "target", 0) as target:
        source.add("w", values)
        target.add("w", np.zeros(16, np.float16))
        plan = make_plan([source.inventory()], [target.inventory()])
        (task,) = ready_tasks(plan, 0)
        arena: Any = Plain(np.zeros(task.piece_bytes, np.uint8))
        preparer = TorchPreparer("cpu")
        preparer.open(source.regions, arena)
        with pytest.raises(xr.UsageError, match=r"weights of torch\.float32 lie 1 bytes beside where"):
            preparer.prepare([(task, 0)])
        preparer.close()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize(("dtype", "gather"), [("bfloat16", "needed"), ("float32", "full")])
async def test_updates_prepared_by_torch(make_fleet: MakeFleet, transport: str, dtype: str, gather: Any) -> None:
    fleet = make_fleet(
        transport, dtype=dtype, plan_options=PlanOptions(gather=gather), make_preparer=lambda: TorchPreparer("cpu")
    )
    await fleet.start()
    for version in (1, 2):
        report = await fleet.update(version)
        await fleet.assert_holds(version)
        assert sum(step.prepare_s for step in report.steps.values()) > 0


async def test_trainers_that_prepare_by_either(make_fleet: MakeFleet) -> None:
    made: list[Preparer] = []

    def make() -> Preparer:
        made.append(TorchPreparer("cpu") if len(made) % 2 else NumpyPreparer())
        return made[-1]

    fleet = make_fleet(make_preparer=make, plan_options=PlanOptions(gather="full"))
    await fleet.start()
    await fleet.update(1)
    await fleet.assert_holds(1)


async def test_watermark_is_honoured(make_fleet: MakeFleet) -> None:
    options = PlanOptions(gather="full")
    roomy = make_fleet(plan_options=options, make_preparer=lambda: TorchPreparer("cpu"))
    await roomy.start()
    await roomy.update(1)
    limit = max(task.piece_bytes for trainer in roomy.trainers.values() for task in trainer._assigned.tasks)
    fleet = make_fleet(
        plan_options=options, make_preparer=lambda: TorchPreparer("cpu"), trainer_options={"tmp_bytes_max": limit}
    )
    await fleet.start()
    report = await fleet.update(1)
    await fleet.assert_holds(1)
    assert max(step.peak_bytes for step in report.steps.values()) == limit


async def test_nan_is_named_and_the_next_version_comes_through(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(make_preparer=lambda: TorchPreparer("cpu"))
    await fleet.start()
    with fleet.loading_nan(2):
        assert "5] is nan" in await fleet.failing_update(1)
    await fleet.update(2)
    await fleet.assert_holds(2)


async def test_torch_without_memory_fails_the_update_and_the_next_comes_through(
    make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = make_fleet(trainer_count=2, make_preparer=lambda: TorchPreparer("cpu"))
    await fleet.start()

    def no_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nSee its documentation.")

    with monkeypatch.context() as patch:
        patch.setattr(torch_preparer, "quantise", no_memory)
        why = await fleet.failing_update(1)
    assert "preparing on cpu: OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB." in why
    assert "documentation" not in why
    await fleet.update(2)
    await fleet.assert_holds(2)


def test_same_refusal_of_the_same_task(open_engine: EngineFactory) -> None:
    """The first of several elements, in the first of several matrices, as numpy comes to them."""
    engine = open_engine(transport="null")
    names = [name for name, (shape, _) in MODEL.items() if len(shape) == 2]
    with WeightMemory(engine, "trainer", 0) as source, WeightMemory(engine, "target", 2) as target:
        trainer = Trainer(source, 1, plain, "bfloat16")
        Target(target, plain)
        trainer.load(weights_of(1))
        for name in names[2:4]:
            trainer.shards[name][1][-1, -1] = trainer.shards[name][1][7, 9] = 0xFF80
        plan = make_plan([source.inventory()], [target.inventory()])
        tasks = [task for task in ready_tasks(plan, 0) if not task.is_direct]
        told = []
        for preparer in (TorchPreparer("cpu"), NumpyPreparer()):
            bases = np.cumsum([0, *(task.piece_bytes for task in tasks)]).tolist()
            arena: Any = Plain(np.zeros(bases[-1], np.uint8))
            preparer.open(source.regions, arena)
            with pytest.raises(NotFinite) as raised:
                preparer.prepare(list(zip(tasks, bases, strict=False)))
            told.append(str(raised.value))
            preparer.close()
        assert told[0] == told[1] and "is -inf" in told[0]


def buffers() -> dict[int, int]:
    """Bytes of all tensors that are there, by where they are."""
    gc.collect()
    storages = [one.untyped_storage() for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


async def test_torch_keeps_nothing_of_a_step_after_the_first(
    make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    preparer = TorchPreparer("cpu")
    fleet = make_fleet(trainer_count=1, dtype="float32", make_preparer=lambda: preparer)
    await fleet.start()
    await fleet.update(1)
    arena, before = fleet.trainers[0]._arena, buffers()
    with no_engine_memory(monkeypatch):
        left, _ = await python_bytes(fleet, range(3, 6))
    assert left < 16 << 10
    assert fleet.trainers[0]._arena is arena
    assert buffers() == before


class Cuda:
    """Of torch.cuda, what loads take; the CPU makes the copies at once. notes: which half was waited for, or taken."""

    def __init__(self) -> None:
        self.notes: list[tuple[str, int]] = []
        self._made = 0

    def stream(self, _: object) -> AbstractContextManager[None]:
        return nullcontext()

    def Event(self, blocking: bool) -> Any:  # noqa: N802 (torch's name)
        assert blocking
        notes, number = self.notes, self._made
        self._made += 1

        class Event:
            def record(self, _: object) -> None:
                notes.append(("recorded", number))

            def synchronize(self) -> None:
                notes.append(("waited for", number))

        return Event()


def test_loads_of_memory_that_is_not_pinned_take_turns_in_two_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, empty = Cuda(), torch.empty
    monkeypatch.setattr(torch_preparer, "_STAGING_BYTES", 4096)
    values = np.arange(64 * 80, dtype=np.uint16).reshape(64, 80)
    here, there = values[:, :60], np.zeros((64, 60), np.uint16)
    loads = ((0, View(0, here.shape, here.strides, here.dtype), View(0, there.shape, there.strides, there.dtype)),)
    task = ReadyTask("w", 0, None, 0, there.nbytes, (), (), (), 0, 0, loads)
    preparer = TorchPreparer("cpu")
    monkeypatch.setattr(preparer, "_load_stream", object())
    regions: Any = [Plain(each.reshape(-1).view(np.uint8)) for each in (values, there)]
    preparer.open(regions[:1], regions[1])
    with monkeypatch.context() as patch:
        patch.setattr(torch, "cuda", cuda)
        patch.setattr(torch, "empty", lambda *size, pin_memory, **more: empty(*size, **more))
        preparer.load([(task, 0)])
    assert np.array_equal(there, here)
    # Of 7680 bytes, in pieces of 3840, each fills a half. The third event is that of the whole load.
    assert cuda.notes == [("recorded", 0), ("waited for", 1), ("recorded", 2), ("waited for", 2)]

"""What lies side by side at trainer and target is one task and one write, and brings the same bytes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import crossrail as xr
from crossrail.weights import PlanError, check_plan
from crossrail.weights.inventory.memory import WeightMemory
from crossrail.weights.planning import joining
from crossrail.weights.planning.plan import Plan
from crossrail.weights.planning.planner import PlanOptions, make_plan
from crossrail.weights.step.ready import ready_tasks
from tests.conftest import EngineFactory
from tests.support.seeds import Seed
from tests.weights.replay import run_task

WIDE = 16
ROWS = {"q": 24, "k": 8, "v": 8}


def fused(
    memory: WeightMemory, order: str, gap: int = 0, half: int | None = None, heads: dict[str, int] = ROWS
) -> np.ndarray:
    """An array with these parameters one behind the other, rows of a gap between; half: of each, that half of rows."""
    parts = 1 if half is None else 2
    array = np.zeros((sum(heads[name] // parts + gap for name in order), WIDE), np.float32)
    end = 0
    for name in order:
        count = heads[name] // parts
        begin = (half or 0) * count
        box = ((begin, begin + count), (0, WIDE))
        memory.add(name, array[end : end + count], shape=(heads[name], WIDE), box=box)
        end += count + gap
    return array


def replayed(plan: Plan, source: WeightMemory, targets: list[WeightMemory]) -> None:
    regions = [region.array() for region in source.regions]
    received = {target.rank: [region.array() for region in target.regions] for target in targets}
    for task in ready_tasks(plan, 0):
        run_task(task, regions, {0: regions}, received)


@pytest.fixture
def engine(open_engine: EngineFactory) -> xr.Engine:
    return open_engine(transport="null")


def test_neighbours_on_both_sides_are_one_write(engine: xr.Engine) -> None:
    with WeightMemory(engine, "trainer", 0) as source, WeightMemory(engine, "target", 0) as target:
        given, taken = fused(source, "qkv"), fused(target, "qkv")
        given[...] = np.arange(given.size).reshape(given.shape)
        plan = make_plan([source.inventory()], [target.inventory()])
        assert (len(plan.tasks), len(plan.parts), len(plan.writes)) == (1, 3, 1)
        assert plan.expected(0) == 1
        (task,) = ready_tasks(plan, 0)
        assert (task.name, task.write_count, task.write_bytes) == ("q, k, v", 1, given.nbytes)
        replayed(plan, source, [target])
        assert np.array_equal(taken, given)


@pytest.mark.parametrize(
    ("table", "field"), [("tasks", "offset"), ("gathers", "offset"), ("outputs", "offset"), ("writes", "source")]
)
def test_joined_rows_are_proved(engine: xr.Engine, table: str, field: str) -> None:
    with WeightMemory(engine, "trainer", 0) as source, WeightMemory(engine, "target", 0) as target:
        fused(source, "qkv")
        fused(target, "qkv")
        sides = [source.inventory()], [target.inventory()]
        plan = make_plan(*sides)
        for row in range(len(getattr(plan, table))):
            changed = getattr(plan, table).copy()
            changed[field][row] += 4
            with pytest.raises(PlanError):
                check_plan(replace(plan, **{table: changed}), *sides)


@pytest.mark.parametrize(
    ("there", "here", "writes"),
    [
        (("qkv", 0), ("kqv", 0), 3),  # other neighbours
        (("qkv", 0), ("qkv", 1), 3),  # gaps at the target
        (("qkv", 1), ("qkv", 0), 3),  # at the trainer
        (("qkv", 0), ("vqk", 0), 2),  # q and k are neighbours on both sides
    ],
)
def test_others_stay_apart(engine: xr.Engine, there: tuple[str, int], here: tuple[str, int], writes: int) -> None:
    with WeightMemory(engine, "trainer", 0) as source, WeightMemory(engine, "target", 0) as target:
        given, taken = fused(source, *there), fused(target, *here)
        given[...] = np.arange(given.size).reshape(given.shape)
        plan = make_plan([source.inventory()], [target.inventory()])
        assert len(plan.writes) == len(plan.tasks) == writes
        replayed(plan, source, [target])
        for name in "qkv":
            at = {}
            for array, (order, gap) in ((given, there), (taken, here)):
                begin = sum(ROWS[other] + gap for other in order[: order.index(name)])
                at[id(array)] = array[begin : begin + ROWS[name]]
            assert np.array_equal(at[id(given)], at[id(taken)])


def test_halves_of_tensor_parallel_ranks(engine: xr.Engine) -> None:
    """Of the trainer's tensor each rank wants pieces that are no neighbours there; of a half, all of them."""
    with (
        WeightMemory(engine, "trainer", 0) as whole,
        WeightMemory(engine, "trainer", 0) as half,
        WeightMemory(engine, "trainer", 1) as other,
        WeightMemory(engine, "target", 0) as one,
        WeightMemory(engine, "target", 1) as two,
    ):
        fused(whole, "qkv")
        for memory, index in ((half, 0), (other, 1), (one, 0), (two, 1)):
            fused(memory, "qkv", half=index)
        targets = [one.inventory(), two.inventory()]
        assert len(make_plan([whole.inventory()], targets).writes) == 6
        plan = make_plan([half.inventory(), other.inventory()], targets, PlanOptions(write_bytes_min=64))
        assert plan.writes[["target", "nbytes"]].tolist() == [(0, 20 * WIDE * 4), (1, 20 * WIDE * 4)]


def test_joined_tasks_do_not_grow_without_end(engine: xr.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {chr(ord("a") + i): 4 for i in range(12)}
    order = "".join(rows)
    monkeypatch.setattr(joining, "_JOINED_BYTES_MAX", 5 * 4 * WIDE * 4)
    with WeightMemory(engine, "trainer", 0) as source, WeightMemory(engine, "target", 0) as target:
        given, taken = fused(source, order, heads=rows), fused(target, order, heads=rows)
        given[...] = np.arange(given.size).reshape(given.shape)
        plan = make_plan([source.inventory()], [target.inventory()])
        assert plan.writes["nbytes"].tolist() == [5 * 256, 5 * 256, 2 * 256]
        replayed(plan, source, [target])
        assert np.array_equal(taken, given)


def test_any_order_and_gaps(engine: xr.Engine, seed: Seed) -> None:
    """Plans prove themselves; here the bytes, and that nothing that could be joined is not."""
    rng = seed.rng()
    rows = {name: int(rng.integers(1, 5)) * 2 for name in "abcdefgh"}
    for _ in range(20):
        orders = ["".join(rng.permutation(list(rows))) if rng.random() < 0.5 else "".join(rows) for _ in range(2)]
        gaps = [int(rng.random() < 0.3) for _ in range(2)]
        with WeightMemory(engine, "trainer", 0) as source, WeightMemory(engine, "target", 0) as target:
            given = fused(source, orders[0], gaps[0], heads=rows)
            taken = fused(target, orders[1], gaps[1], heads=rows)
            given[...] = rng.random(given.shape)
            plan = make_plan([source.inventory()], [target.inventory()])
            replayed(plan, source, [target])
            lies = [dict(zip(order, pieces_of(array, order, gap, rows), strict=True)) for array, order, gap in
                    ((given, orders[0], gaps[0]), (taken, orders[1], gaps[1]))]  # fmt: skip
            for name in rows:
                assert np.array_equal(lies[0][name], lies[1][name])
            joins = sum(pair in orders[1] for pair in map("".join, zip(orders[0], orders[0][1:], strict=False)))
            assert len(plan.writes) == len(rows) - (0 if any(gaps) else joins)


def pieces_of(array: np.ndarray, order: str, gap: int, rows: dict[str, int]) -> list[np.ndarray]:
    """Of what fused() made, in its order."""
    ends = np.cumsum([rows[name] + gap for name in order])
    return [array[end - gap - rows[name] : end - gap] for name, end in zip(order, ends, strict=True)]

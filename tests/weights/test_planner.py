"""Plans carried out on real memory: every byte of every target is what converting the whole parameter gives."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crossrail.weights import Holding, Inventory, Plan, PlanOptions, make_plan
from crossrail.weights.planning.planner import Gather
from tests.weights.memory import Process, carry_out, expected_memory, fill_trainers
from tests.weights.worlds import World, worlds


@pytest.mark.parametrize("partial", [False, True], ids=["whole", "replicas that lack pieces"])
@given(data=st.data())
@settings(max_examples=100)
def test_plan_carried_out_gives_the_converted_whole(partial: bool, data: st.DataObject) -> None:
    world = data.draw(worlds(partial=partial))
    trainers, targets = world.inventories
    fill_trainers(world.trainers, world.whole)

    plan = make_plan(trainers, targets, world.options)
    carry_out(plan, world.trainers, world.targets)

    for target in world.targets:
        wanted = expected_memory(target, world.whole, world.dtypes)
        np.testing.assert_array_equal(target.memory, wanted)
    assert sum(plan.expected(target) for target in plan.targets) == len(plan.writes)


@given(worlds())
@settings(max_examples=15)
def test_plan_of_inventories_that_lack_nothing_is_the_same_where_they_might(world: World) -> None:
    assert make_plan(*world.inventories, world.options) == make_plan(
        *world.inventories, replace(world.options, partial=True)
    )


@given(worlds())
@settings(max_examples=15)
def test_plan_of_the_same_inventories_is_the_same_in_any_order_of_processes(world: World) -> None:
    trainers, targets = world.inventories

    plan = make_plan(trainers, targets, world.options)
    again = make_plan(trainers[::-1], targets[::-1], world.options)

    assert plan == again
    assert plan.digest == again.digest


@given(worlds())
@settings(max_examples=15)
def test_trainers_parts_of_a_plan_are_the_plan(world: World) -> None:
    plan = make_plan(*world.inventories, world.options)
    fill_trainers(world.trainers, world.whole)

    for trainer in plan.trainers:
        carry_out(Plan.from_bytes(plan.of_trainer(trainer).to_bytes()), world.trainers, world.targets)

    for target in world.targets:
        np.testing.assert_array_equal(target.memory, expected_memory(target, world.whole, world.dtypes))


def replicated(trainers: int, targets: int, rows: int = 1024) -> tuple[list[Inventory], list[Inventory]]:
    whole = Holding.whole("w", "bfloat16", (rows, 64), 0, 0)
    return (
        [Process("trainer", rank, [whole], rows * 128).inventory for rank in range(trainers)],
        [Process("target", rank, [whole], rows * 128).inventory for rank in range(targets)],
    )


def sharded(dtype: str, shape: tuple[int, int], count: int) -> list[Inventory]:
    rows, columns = shape[0] // count, shape[1]
    boxes = [((rank * rows, (rank + 1) * rows), (0, columns)) for rank in range(count)]
    return [
        Process("trainer", rank, [Holding("w", dtype, shape, box, 0, 0)], rows * columns * 4).inventory
        for rank, box in enumerate(boxes)
    ]


def test_replicated_parameter_comes_from_all_holders_evenly() -> None:
    plan = make_plan(*replicated(trainers=4, targets=8))

    sender = plan.tasks["trainer"][plan.writes["task"]]
    sent = np.bincount(sender, weights=plan.writes["nbytes"])
    assert sent.tolist() == [2 * 1024 * 128] * 4


def test_bytes_that_lie_ready_are_not_prepared() -> None:
    plan = make_plan(*replicated(trainers=1, targets=2))

    assert plan.tasks["direct"].all()
    assert plan.tasks["tmp_bytes"].sum() == 0


def test_gather_needed_gathers_nothing_where_shards_hold_whole_blocks() -> None:
    trainers = sharded("bfloat16", (1024, 256), count=4)
    target = Process(
        "target",
        0,
        [
            Holding.whole("w", "float8_e4m3fn", (1024, 256), 0, 0),
            Holding.whole("s", "float32", (8, 2), 0, 1 << 18, scale_of="w", block=(128, 128)),
        ],
        1 << 19,
    )
    inventories = trainers, [target.inventory]

    needed = make_plan(*inventories, PlanOptions(write_bytes_min=1))
    full = make_plan(*inventories, PlanOptions(gather="full"))

    assert (needed.gathers["trainer"] == needed.tasks["trainer"][needed.gathers["part"]]).all()
    assert len(needed.tasks) == 4
    assert len(full.gathers) == 4
    assert len(full.tasks) == 1


@pytest.mark.parametrize("gather", ["needed", "full"])
@pytest.mark.parametrize("gone", [{0}, {1}, {2}, {0, 2}, {0, 1, 2}, {3}, {3, 4}])
def test_what_is_left_of_a_mesh_is_not_needed_where_another_has_it_whole(gone: set[int], gather: Gather) -> None:
    """Two replicas, of three and of two trainers, of which some are gone: at an edge, in the middle, all."""
    shape = (12, 8)
    thirds = [Holding("w", "float32", shape, ((a, a + 4), (0, 8)), 0, 0, mesh="a") for a in (0, 4, 8)]
    halves = [Holding("w", "float32", shape, ((a, a + 6), (0, 8)), 0, 0, mesh="b") for a in (0, 6)]
    trainers = [
        Process("trainer", rank, [held], 256) for rank, held in enumerate([*thirds, *halves]) if rank not in gone
    ]
    target = Process("target", 0, [Holding.whole("w", "bfloat16", shape, 0, 0)], 192)
    whole = {"w": np.arange(96, dtype=np.float32).reshape(shape)}
    fill_trainers(trainers, whole)

    options = PlanOptions(gather=gather, write_bytes_min=1)
    carry_out(make_plan([each.inventory for each in trainers], [target.inventory], options), trainers, [target])

    np.testing.assert_array_equal(target.memory, expected_memory(target, whole, {"w": "float32"}))


def test_neighbouring_slices_go_as_one_write() -> None:
    # Three trainers' rows, prepared by one of them: on both sides they follow each other.
    trainers = sharded("float32", (6, 8), count=3)
    halves = [
        Holding("w", "float32", (6, 8), ((0, 3), (0, 8)), 0, 0),
        Holding("w", "float32", (6, 8), ((3, 6), (0, 8)), 0, 96),
    ]
    target = Process("target", 0, halves, 192).inventory

    plan = make_plan(trainers, [target])

    assert plan.writes["nbytes"].tolist() == [192]


def test_gathered_pieces_come_from_the_holders_with_the_fewest_bytes() -> None:
    # The lower half of each parameter has two holders. To whoever sends the others', rank 4 is the next of the two.
    halves = [((0, 64), (0, 64)), ((64, 128), (0, 64))]
    names = [f"w{number}" for number in range(12)]
    trainers = []
    for rank in range(6):
        box = halves[rank >= 4]
        held = [Holding(name, "float32", (128, 64), box, 0, at << 14, mesh="m") for at, name in enumerate(names)]
        trainers.append(Process("trainer", rank, held, 12 << 14).inventory)
    wholes = [Holding.whole(name, "bfloat16", (128, 64), 0, at << 14) for at, name in enumerate(names)]
    targets = [Process("target", 0, wholes, 12 << 14).inventory]

    plan = make_plan(trainers, targets, PlanOptions(gather="full"))

    sender = plan.tasks["trainer"][plan.parts["task"][plan.gathers["part"]]]
    extent = plan.gathers["stop"] - plan.gathers["start"]
    fetched = np.bincount(plan.gathers["trainer"], extent.prod(axis=1) * (plan.gathers["trainer"] != sender), 6)
    assert fetched.tolist() == [4096.0] * 4 + [4 * 4096.0] * 2


def test_trainers_begin_with_different_targets() -> None:
    trainers = sharded("bfloat16", (1024, 64), count=4)
    targets = replicated(trainers=1, targets=4)[1]

    plan = make_plan(trainers, targets, PlanOptions(write_bytes_min=1))

    first = {int(plan.tasks["trainer"][write["task"]]): int(write["target"]) for write in plan.writes[::-1]}
    assert first == {0: 0, 1: 1, 2: 2, 3: 3}

"""Trainers that are slow: what an update shows of them, and what plans give them to do."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from crossrail.errors import UsageError
from crossrail.weights import Holding, Inventory, Plan, PlanOptions, make_plan
from crossrail.weights.planning.speeds import Pace, costs_of, measured, moved_bytes, written_bytes
from tests.weights.memory import Process, carry_out, expected_memory, fill_trainers

ROWS, COLUMNS = 512, 128


def replicated(trainers: int, targets: int) -> tuple[list[Inventory], list[Inventory]]:
    whole = Holding.whole("w", "bfloat16", (ROWS, COLUMNS), 0, 0)
    return (
        [Process("trainer", rank, [whole], ROWS * COLUMNS * 2).inventory for rank in range(trainers)],
        [Process("target", rank, [whole], ROWS * COLUMNS * 2).inventory for rank in range(targets)],
    )


def sharded(targets: int) -> tuple[list[Process], list[Process]]:
    """Four trainers with a quarter of the rows each, alone; targets want all of it in fp8."""
    rows = ROWS // 4
    boxes = [((rank * rows, (rank + 1) * rows), (0, COLUMNS)) for rank in range(4)]
    shape = ROWS, COLUMNS
    values = Holding.whole("w", "float8_e4m3fn", shape, 0, 0)
    scales = Holding.whole("s", "float32", (ROWS // 64, 1), 0, ROWS * COLUMNS, scale_of="w", block=(64, 128))
    return (
        [
            Process("trainer", rank, [Holding("w", "bfloat16", shape, box, 0, 0)], rows * COLUMNS * 2)
            for rank, box in enumerate(boxes)
        ],
        [Process("target", rank, [values, scales], ROWS * COLUMNS + 256) for rank in range(targets)],
    )


def plan_of(trainers: list[Process], targets: list[Process], **speeds: float) -> Plan:
    options = PlanOptions(write_bytes_min=1, speeds={int(rank[1:]): speed for rank, speed in speeds.items()})
    return make_plan([one.inventory for one in trainers], [one.inventory for one in targets], options)


# --- plans ---


def test_of_several_holders_the_slow_one_sends_as_much_less() -> None:
    plan = make_plan(*replicated(2, 12), PlanOptions(speeds={0: 0.5}))

    whole = ROWS * COLUMNS * 2
    assert written_bytes(plan) == {0: 4 * whole, 1: 8 * whole}


def test_speeds_that_are_all_the_same_change_nothing() -> None:
    sides = replicated(3, 7)

    assert make_plan(*sides, PlanOptions(speeds=dict.fromkeys(range(3), 0.3))) == make_plan(*sides)


def test_what_a_slow_trainer_alone_holds_is_fetched_once_and_sent_by_others() -> None:
    trainers, targets = sharded(targets=8)
    even, uneven = plan_of(trainers, targets), plan_of(trainers, targets, t0=0.2)

    assert moved_bytes(uneven)[0] < moved_bytes(even)[0] / 2
    away = uneven.gathers["trainer"] != uneven.tasks["trainer"][uneven.parts["task"][uneven.gathers["part"]]]
    fetched = uneven.gathers[away]
    assert set(fetched["trainer"].tolist()) == {0}
    elements = (fetched["stop"] - fetched["start"]).prod(axis=1).sum()
    assert elements <= ROWS // 4 * COLUMNS  # nothing twice


def test_relayed_weights_are_those_of_the_trainer_that_holds_them() -> None:
    trainers, targets = sharded(targets=5)
    whole = {"w": np.random.default_rng(5).integers(0, 200, (ROWS, COLUMNS)).astype(np.uint16)}
    fill_trainers(trainers, whole)

    carry_out(plan_of(trainers, targets, t0=0.1), trainers, targets)

    for target in targets:
        np.testing.assert_array_equal(target.memory, expected_memory(target, whole, {"w": "bfloat16"}))


@pytest.mark.parametrize("targets", [1, 2])
def test_nothing_is_fetched_where_that_is_no_less_for_the_slow_one(targets: int) -> None:
    plan = plan_of(*sharded(targets), t0=0.1)

    assert moved_bytes(plan) == written_bytes(plan)


def test_large_pieces_are_cut_to_tasks_of_a_size() -> None:
    plan = make_plan(*replicated(1, 2), PlanOptions(task_bytes_max=ROWS * COLUMNS // 2))

    extent = plan.parts["stop"] - plan.parts["start"]
    assert (extent.prod(axis=1) * 2 <= ROWS * COLUMNS // 2).all()
    assert sum(plan.writes["nbytes"]) == 2 * ROWS * COLUMNS * 2


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"speeds": {0: 0.0}}, "trainer 0 has 0.0"),
        ({"speeds": {1: float("nan")}}, "trainer 1 has nan"),
        ({"speeds": {7: 1.0}}, "there is no trainer 7"),
        ({"task_bytes_max": 0}, "task_bytes_max=0"),
    ],
)
def test_options_that_are_none_refused(options: dict[str, object], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        make_plan(*replicated(2, 1), replace(PlanOptions(), **options))  # type: ignore[arg-type]


def test_costs_are_whole_and_bounded() -> None:
    assert costs_of((3, 5, 9), {5: 0.5, 9: 1e-9}).tolist() == [64, 128, 64 * 64]


# --- what an update showed ---

EVEN = dict.fromkeys(range(5), 1000)


def test_trainer_that_is_late_for_its_bytes_is_slow() -> None:
    busy = {0: 4.0, 1: 1.0, 2: 1.1, 3: 0.9, 4: 1.0}

    assert measured(EVEN, busy, {}, 1.5) == {0: 0.25}


def test_trainer_that_is_late_because_it_has_more_to_do_is_not() -> None:
    busy = dict.fromkeys(EVEN, 1.0) | {0: 4.0}

    assert measured(EVEN | {0: 4000}, busy, {}, 1.5) == {}


def test_trainer_that_had_little_to_do_and_was_done_in_time_is_not() -> None:
    assert measured(EVEN | {0: 10}, dict.fromkeys(EVEN, 1.0), {}, 1.5) == {}


def test_known_one_stays_slow_when_it_is_in_time_and_noise_changes_nothing() -> None:
    busy = dict.fromkeys(EVEN, 1.0)

    assert measured(EVEN | {0: 270}, busy, {0: 0.25}, 1.5) == {0: 0.25}
    assert measured(EVEN | {0: 500}, busy, {0: 0.25}, 1.5) == {0: 0.5}


def test_known_one_that_is_fast_again_is_as_the_others() -> None:
    assert measured(EVEN | {0: 250}, dict.fromkeys(EVEN, 1.0) | {0: 0.25}, {0: 0.25}, 1.5) == {}


def test_trainer_without_work_is_as_it_was_and_one_that_is_gone_is_forgotten() -> None:
    busy = dict.fromkeys(EVEN, 1.0)

    assert measured(EVEN | {0: 0}, busy, {0: 0.25, 9: 0.5}, 1.5) == {0: 0.25}
    assert measured({}, busy, {0: 0.25}, 1.5) == {0: 0.25}


def test_given_speeds_stay_and_measured_ones_go_with_their_trainer() -> None:
    plan = make_plan(*replicated(3, 6))
    pace = Pace({1: 0.5}, 1.5)

    pace.note(plan, {0: 4.0, 1: 1.0, 2: 1.0})
    assert pace.of(range(3)) == {0: 0.25, 1: 0.5}
    assert pace.of([1, 2]) == {1: 0.5}
    pace.forget(0)
    assert pace.of(range(3)) == {1: 0.5}


def test_nothing_is_measured_unless_asked_for() -> None:
    pace = Pace({}, None)

    pace.note(make_plan(*replicated(3, 6)), {0: 40.0, 1: 1.0, 2: 1.0})

    assert pace.of(range(3)) == {}
    with pytest.raises(UsageError, match="straggler_ratio=1"):
        Pace({}, 1.0)

"""The checker finds what is wrong with a plan: each way to spoil one is refused, and says so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from crossrail.errors import UsageError
from crossrail.weights import Holding, Inventory, Plan, PlanError, PlanOptions, check_plan, make_plan
from crossrail.weights.planning.plan import TABLES
from tests.weights.memory import Process

INVENTORIES = tuple[list[Inventory], list[Inventory]]


@pytest.fixture
def inventories() -> INVENTORIES:
    """Two trainers with half of the rows each, a target with fp8, one with half of the columns."""

    def held(*rows: int) -> list[Holding]:
        return [Holding("w", "bfloat16", (64, 32), (rows, (0, 32)), 0, 0), Holding.whole("n", "float32", (8,), 0, 4096)]

    trainers = [Process("trainer", 0, held(0, 32), 8192), Process("trainer", 1, held(32, 64), 8192)]
    quantised = [
        Holding.whole("w", "float8_e4m3fn", (64, 32), 0, 0),
        Holding.whole("s", "float32", (4, 2), 0, 4000, scale_of="w", block=(16, 16)),
    ]
    halved = [
        Holding("w", "bfloat16", (64, 32), ((0, 64), (0, 16)), 0, 0),
        Holding.whole("n", "float32", (8,), 0, 4096),
    ]
    targets = [Process("target", 0, quantised, 8192), Process("target", 1, halved, 8192)]
    return [one.inventory for one in trainers], [one.inventory for one in targets]


def changed(
    plan: Plan, table: str, field: str, change: Callable[[np.ndarray], np.ndarray], row: int | slice = 0
) -> Plan:
    rows = getattr(plan, table).copy()
    rows[field][row] = change(rows[field][row])
    return replace(plan, **{table: rows})


def test_plan_that_was_just_made_passes(inventories: INVENTORIES) -> None:
    check_plan(make_plan(*inventories, PlanOptions(write_bytes_min=1)), *inventories)


def test_plan_of_more_tasks_than_2_to_the_20_passes(inventories: INVENTORIES) -> None:
    plan = make_plan(*inventories, PlanOptions(write_bytes_min=1))
    assert len(plan.tasks) > 1
    more = (1 << 20) - 1  # that do nothing, between the first and the second
    later = {
        table: changed(plan, table, "task", lambda task: np.where(task > 0, task + more, task), slice(None))
        for table in ("parts", "writes")
    }
    plan = replace(
        plan,
        tasks=np.insert(plan.tasks, 1, np.repeat(plan.tasks[:1], more)),
        **{table: getattr(changed_plan, table) for table, changed_plan in later.items()},
    )
    check_plan(plan, *inventories)


@pytest.mark.parametrize(
    ("table", "field", "change", "text"),
    [
        ("writes", "offset", lambda offset: offset + 1, "is not written|is written twice"),
        ("writes", "nbytes", lambda nbytes: nbytes - 1, "is not written"),
        ("writes", "nbytes", lambda nbytes: 0, "without bytes"),
        ("writes", "source", lambda source: source + 32, "other elements|outside a buffer"),
        ("writes", "source", lambda source: -1, "outside of its task's buffer"),
        ("writes", "region", lambda region: region + 1, "is not written"),
        ("outputs", "start", lambda start: start + 1, "outside of a part"),
        ("outputs", "nbytes", lambda nbytes: nbytes - 2, "too long"),
        ("outputs", "offset", lambda offset: offset + 64, "ends behind its buffer"),
        ("outputs", "scales", lambda scales: ~scales, "too long"),
        ("parts", "dtype", lambda dtype: {3: 2, 4: 5}[int(dtype)], "another dtype"),
        ("parts", "param", lambda param: 1 - param, "another parameter"),
        ("parts", "stop", lambda stop: stop - 1, "outside of a part"),
        ("gathers", "offset", lambda offset: offset + 2, "does not hold"),
        ("gathers", "trainer", lambda trainer: 1 - trainer, "does not hold"),
        ("gathers", "strides", lambda strides: strides * 2, "does not hold"),
        ("gathers", "stop", lambda stop: np.maximum(stop - 1, 1), "is gathered by none"),
    ],
)
def test_spoilt_plan_refused(
    inventories: INVENTORIES, table: str, field: str, change: Callable[[np.ndarray], np.ndarray], text: str
) -> None:
    plan = make_plan(*inventories, PlanOptions(write_bytes_min=1))

    with pytest.raises(PlanError, match=text):
        check_plan(changed(plan, table, field, change), *inventories)


def test_blocks_of_scales_spoilt_refused(inventories: INVENTORIES) -> None:
    plan = make_plan(*inventories)
    quantised = int(np.argmax(plan.parts["block"].any(axis=1)))

    with pytest.raises(PlanError, match="scales of other blocks"):
        check_plan(
            changed(plan, "parts", "block", lambda block: block + np.array([0, 1, 0, 0, 0]), quantised), *inventories
        )


def test_bytes_that_do_not_lie_as_they_are_sent_refused(inventories: INVENTORIES) -> None:
    plan = make_plan(*inventories)
    task = int(np.argmax(plan.tasks["direct"]))

    with pytest.raises(PlanError, match="'n' is sent as it lies"):
        check_plan(changed(plan, "tasks", "offset", lambda offset: offset + 4, task), *inventories)
    task = int(np.argmin(plan.tasks["direct"]))
    with pytest.raises(PlanError, match="'w' is sent as it lies"):
        check_plan(changed(plan, "tasks", "direct", lambda direct: ~direct, task), *inventories)


def test_write_left_out_and_write_doubled_refused(inventories: INVENTORIES) -> None:
    plan = make_plan(*inventories)
    for row in range(len(plan.writes)):
        with pytest.raises(PlanError, match="is not written"):
            check_plan(replace(plan, writes=np.delete(plan.writes, row)), *inventories)
        doubled = np.insert(plan.writes, row, plan.writes[row])
        with pytest.raises(PlanError, match="is written twice"):
            check_plan(replace(plan, writes=doubled), *inventories)


def test_part_that_nothing_is_gathered_for_refused(inventories: INVENTORIES) -> None:
    plan = make_plan(*inventories, PlanOptions(write_bytes_min=1))
    for part in range(len(plan.parts)):
        left = plan.gathers[plan.gathers["part"] != part]
        with pytest.raises(PlanError, match="gathered by none"):
            check_plan(replace(plan, gathers=left), *inventories)


def test_two_writes_exchanged_refused(inventories: INVENTORIES) -> None:
    # Every byte is written exactly once, only not by what belongs there.
    plan = make_plan(*inventories, PlanOptions(write_bytes_min=1))
    rows = np.flatnonzero((plan.writes["target"] == 1) & (plan.writes["nbytes"] == 1024))
    writes = plan.writes.copy()
    writes["offset"][rows] = writes["offset"][rows[::-1]]
    assert len(rows) == 2

    with pytest.raises(PlanError, match="'w' of inference rank 1 gets other elements"):
        check_plan(replace(plan, writes=writes), *inventories)


def test_plan_for_other_ranks_refused(inventories: INVENTORIES) -> None:
    plan = make_plan(*inventories)

    with pytest.raises(PlanError, match="targets 0, 1"):
        check_plan(plan, inventories[0], inventories[1][:1])


def test_target_whose_holdings_overlap_refused(inventories: INVENTORIES) -> None:
    clash = [Holding.whole("w", "bfloat16", (64, 32), 0, 0), Holding.whole("n", "float32", (8,), 0, 4092)]

    with pytest.raises(UsageError, match="'w' and 'n' lie in the same memory of inference rank 0"):
        make_plan(inventories[0], [Process("target", 0, clash, 8192).inventory])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"dtype": "float16"}, r"'w' has the shape \(64, 32\) in float16 in the plan, at the trainers .* in bfloat16"),
        ({"shape": (32, 64)}, r"'w' has the shape \(32, 64\)"),
        ({"name": "v"}, "'v' of the plan is held by no trainer"),
    ],
)
def test_parameter_that_trainers_hold_otherwise_is_refused(
    inventories: INVENTORIES, change: dict[str, Any], text: str
) -> None:
    plan = make_plan(*inventories)
    params = [structs.replace(param, **change) if param.name == "w" else param for param in plan.params]

    with pytest.raises(PlanError, match=text):
        check_plan(replace(plan, params=tuple(params)), *inventories)


def test_plan_whose_rows_point_nowhere_is_refused_when_it_is_read(inventories: INVENTORIES) -> None:
    plan = make_plan(*inventories)
    for table in TABLES:
        for field in getattr(plan, table).dtype.names:
            if field not in ("task", "part", "param", "mesh", "dtype", "trainer", "target"):
                continue
            for value in (-1, 100):
                spoiled = changed(plan, table, field, lambda _, value=value: value)
                with pytest.raises(UsageError, match=f"table {table} of a plan: row 0 has {field} {value}"):
                    Plan.from_bytes(spoiled.to_bytes())
    for table in ("parts", "writes"):  # rows follow the order of tasks
        spoiled = changed(plan, table, "task", lambda _: 0, row=-1)
        with pytest.raises(UsageError, match=f"table {table} of a plan: row .* has task 0"):
            Plan.from_bytes(spoiled.to_bytes())


@pytest.mark.parametrize("ranks", [(1, 0), (0, 0), (-1, 0), (0, 1 << 40)])
def test_plan_for_what_are_no_ranks_is_refused_when_it_is_read(
    inventories: INVENTORIES, ranks: tuple[int, ...]
) -> None:
    plan = make_plan(*inventories)
    with pytest.raises(UsageError, match="trainers of a plan are no ranks, ascending"):
        Plan.from_bytes(replace(plan, trainers=ranks).to_bytes())

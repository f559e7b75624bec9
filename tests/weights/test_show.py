"""Plans for people: figures, differences and the heat map, against plans whose answers are known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from crossrail.errors import UsageError
from crossrail.weights import Holding, Inventory, Plan, make_plan
from crossrail.weights.planning.show import differences, draw, heat_map, matrix, summary
from tests.weights.memory import Process


def halves(rank: int, rows: int = 4) -> Inventory:
    box = ((rank * rows // 2, (rank + 1) * rows // 2), (0, 8))
    return Process("trainer", rank, [Holding("w", "float32", (rows, 8), box, 0, 0)], 4096).inventory


def target(rank: int, dtype: str = "float32", rows: int = 4) -> Inventory:
    return Process("target", rank, [Holding.whole("w", dtype, (rows, 8), 0, 0)], 4096).inventory


@pytest.fixture
def plan() -> Plan:
    """Two trainers with 2 of 4 rows of 32 bytes; the first sends all of it, to three targets."""
    return make_plan([halves(0), halves(1)], [target(0), target(5), target(6)])


def test_summary_counts_bytes_and_what_is_fetched(plan: Plan) -> None:
    figures = summary(plan)

    assert figures.nbytes == 3 * 128
    assert figures.received == (128, 128, 128)
    assert figures.sent.most == 256
    assert figures.writes == (1, 1.5, 2)
    assert figures.gathered_bytes == 2 * 64
    assert figures.tmp_bytes == 2 * 128
    assert figures.typical_bytes == 128
    assert figures.direct_bytes == 0


def test_matrix_says_who_sends_what_to_whom(plan: Plan) -> None:
    assert matrix(plan).sum(axis=0).tolist() == [128, 128, 128]
    assert matrix(plan).shape == (2, 3)


def test_heat_map_is_as_large_as_it_may_be_and_dark_where_much_goes() -> None:
    plan = make_plan([halves(0, 8), halves(1, 8)], [target(rank, rows=8) for rank in range(100)])

    lines = heat_map(plan, rows_max=1, columns_max=10)

    assert len(lines) == 1
    assert set("".join(lines)) == {"█"}
    assert len(lines[0]) == 10


def test_equal_plans_do_not_differ(plan: Plan) -> None:
    assert differences(plan, Plan.from_bytes(plan.to_bytes())) == []


def test_differences_name_ranks_parameters_and_bytes(plan: Plan) -> None:
    other = make_plan([halves(0), halves(1)], [target(0), target(5)])

    lines = differences(plan, other)

    assert "target 6 is gone" in lines
    # What target 6 had, and what target 5 had from the first trainer, which is balanced again.
    assert "256 bytes go another way: from another trainer, or to another place" in lines
    assert "target 6 is new" in differences(other, plan)


def test_differences_name_neighbouring_ranks_together(plan: Plan) -> None:
    other = make_plan([halves(0), halves(1)], [target(rank) for rank in (0, 7, 8, 9, 11)])

    lines = differences(plan, other)

    assert [line for line in lines if line.endswith("new")] == ["targets 7 to 9 are new", "target 11 is new"]
    assert [line for line in lines if line.endswith("gone")] == ["targets 5 to 6 are gone"]


def test_another_dtype_of_a_parameter_is_a_difference(plan: Plan) -> None:
    params = (msgspec.structs.replace(plan.params[0], dtype="bfloat16"),)

    assert differences(plan, replace(plan, params=params)) == ["parameter w has another shape or dtype"]


def test_order_of_tasks_is_a_difference(plan: Plan) -> None:
    tasks = plan.tasks.copy()
    tasks["tmp_bytes"] += 1

    assert differences(plan, replace(plan, tasks=tasks)) == ["tasks are in another order, or are prepared otherwise"]


def test_plan_in_a_file(plan: Plan, tmp_path: Path) -> None:
    file = tmp_path / "plan"
    plan.save(file)

    assert Plan.load(file) == plan

    file.write_bytes(b"no plan")
    with pytest.raises(UsageError, match="not a plan"):
        Plan.load(file)


def test_rank_that_is_not_in_the_plan_refused(plan: Plan) -> None:
    with pytest.raises(UsageError, match="inference rank 9"):
        plan.expected(9)
    with pytest.raises(UsageError, match="trainer 9"):
        plan.of_trainer(9)


def test_plan_without_ranks_has_figures_and_nothing_to_draw(plan: Plan, tmp_path: Path) -> None:
    empty = replace(
        plan, trainers=(), targets=(), params=(),
        **{name: getattr(plan, name)[:0] for name in ("tasks", "parts", "gathers", "outputs", "writes")},
    )  # fmt: skip
    figures = summary(empty)
    assert (figures.nbytes, figures.sent, figures.received) == (0, (0, 0, 0), (0, 0, 0))
    assert heat_map(empty) == []
    assert differences(plan, empty)
    with pytest.raises(UsageError, match="cannot be drawn"):
        draw(empty, tmp_path / "x.png")

"""Simulated updates of a small cluster, whose outcomes can be told beforehand; and what they were fitted to."""

from __future__ import annotations

import gc
from dataclasses import replace

import numpy as np
import pytest

from crossrail.cli.weights.simulate import Costs, Outcome, Setting, adapted, collective_works, hulls_of, simulate
from crossrail.cli.weights.simulate.lanes import Memory
from crossrail.errors import UsageError
from crossrail.sim.profiles import CX7
from crossrail.weights import Inventory, Plan, PlanOptions, make_plan
from crossrail.weights.dtypes import ITEM_BYTES
from crossrail.weights.inventory.models import (
    CLUSTERS,
    MODELS,
    Cluster,
    ModelShape,
    inventories,
    target_inventory,
    trainer_inventory,
)
from crossrail.weights.planning.boxes import volume
from crossrail.weights.planning.plan import TABLES
from crossrail.weights.planning.show import summary

Sides = tuple[list[Inventory], list[Inventory]]
SMALL = ModelShape(
    hidden=2048, layers=4, heads=16, vocab=8192, experts=16, expert_rows=1024, kv_heads=4, head_dim=128
)  # fmt: skip
CLUSTER = Cluster(trainers=8, targets=4, pipeline=2, expert_parallel=2, dense_shard=2, target_experts=4)
FAST = Costs(h2d=1e6, gather=1e6, fuse=1e6, quantise=1e6, submit_us=0.1, barrier_ms=0)


@pytest.fixture(scope="module")
def sides() -> Sides:
    return inventories(SMALL, CLUSTER)


@pytest.fixture(scope="module")
def plan(sides: Sides) -> Plan:
    return make_plan(*sides)


def outcome(plan: Plan, sides: Sides, **setting: object) -> Outcome:
    return simulate(plan, *sides, Setting(**setting))


def test_update_takes_what_the_busiest_link_takes(plan: Plan, sides: Sides) -> None:
    found = outcome(plan, sides, costs=FAST)

    received_s = summary(plan).received.most / (CX7.gbps / 8 * 1e9)
    assert found.bound == "links of receivers"
    assert found.bounds[found.bound] == pytest.approx(received_s)
    assert 1.0 < found.over_bound < 1.25


def test_what_gpus_do_is_overlapped_and_bounds_when_slow(plan: Plan, sides: Sides) -> None:
    slow = outcome(plan, sides, costs=replace(FAST, quantise=2.0))

    assert slow.bound == "prepare"
    assert 1.0 < slow.over_bound < 1.25


def test_straggler_is_what_the_others_wait_for(plan: Plan, sides: Sides) -> None:
    even = outcome(plan, sides, costs=replace(FAST, quantise=20.0))
    uneven = outcome(plan, sides, costs=replace(FAST, quantise=20.0), straggler=20.0)

    assert uneven.total_s > 2 * even.total_s
    assert uneven.waited_s > even.waited_s
    assert uneven.bound == "prepare"


def test_next_plan_asks_less_of_a_trainer_whose_link_is_slow(sides: Sides) -> None:
    # Four ranks of each expert: what a slow trainer alone holds is read once from it instead of written four times.
    trainers, targets = inventories(SMALL, replace(CLUSTER, targets=16))
    both = trainers, targets
    before = make_plan(*both)
    slow = outcome(before, both, costs=FAST, slow_link=6.0)

    after = outcome(adapted(before, *both, slow), both, costs=FAST, slow_link=6.0)

    assert slow.bound == after.bound == "links of senders"
    assert after.total_s < slow.total_s * 0.7
    assert after.read_bytes > slow.read_bytes
    assert after.nbytes == slow.nbytes


def test_next_plan_is_the_same_where_nobody_is_slow(plan: Plan, sides: Sides) -> None:
    assert adapted(plan, *sides, outcome(plan, sides, costs=FAST)) == plan


def test_only_rail_comes_back_and_all_arrives(plan: Plan, sides: Sides) -> None:
    down = outcome(plan, sides, costs=FAST, rail_down=True, down_ms=20.0)

    assert down.nbytes == summary(plan).nbytes
    assert down.total_s > 0.02


def test_spans_are_of_lanes_and_end_with_the_update(plan: Plan, sides: Sides) -> None:
    found = outcome(plan, sides)

    assert 0 in found.spans
    for spans in found.spans.values():
        assert {"h2d", "submit", "write", "wait for others"} <= {span.stage for span in spans}
        assert all(0 <= span.begin_s <= span.end_s <= found.total_s + 1e-9 for span in spans)


def test_rail_that_goes_down_costs_time_and_no_byte(plan: Plan, sides: Sides) -> None:
    both = outcome(plan, sides, costs=FAST, rails=2)
    one = outcome(plan, sides, costs=FAST, rails=2, rail_down=True)

    assert one.nbytes == both.nbytes == summary(plan).nbytes
    assert one.total_s > both.total_s


def test_papers_way_gathers_all_that_a_rank_holds_part_of(sides: Sides) -> None:
    full = make_plan(*sides, PlanOptions(gather="full"))

    found = outcome(full, sides, costs=replace(FAST, gather=2.0), collective=True)

    assert found.bound == "prepare"
    assert found.nbytes == summary(full).nbytes


def test_same_seed_same_time(plan: Plan, sides: Sides) -> None:
    assert outcome(plan, sides, costs=FAST) == outcome(plan, sides, costs=FAST)


def test_interrupt_is_all_that_is_told(
    plan: Plan, sides: Sides, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Memory, "give", interrupt)
    with pytest.raises(KeyboardInterrupt):
        outcome(plan, sides)
    gc.collect()
    assert not caplog.records


@pytest.mark.parametrize("below", [1, 1 << 40])
def test_watermark_below_the_largest_task_refused(
    plan: Plan, sides: Sides, caplog: pytest.LogCaptureFixture, below: int
) -> None:
    watermark = max(int(plan.tasks["tmp_bytes"].max()) - below, 1024)
    with pytest.raises(UsageError, match=rf"a task needs .* the watermark is {watermark}"):
        outcome(plan, sides, watermark_bytes=watermark)
    gc.collect()
    assert not caplog.records  # nothing was begun that has to be given up


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ({"rail_down": True}, "rails=2"),
        ({"down_ms": 5.0}, "down_ms=5.0"),
        ({"straggler": 0.5}, "straggler"),
        ({"slow_link": float("nan")}, "slow_link"),
        ({"rails": 9}, "rails=9"),
    ],
)
def test_setting_that_is_none_refused(setting: dict[str, object], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        Setting(**setting)  # type: ignore[arg-type]


# --- what the model was fitted to ---


def test_lanes_of_a_kimi_rank_are_those_of_table_5() -> None:
    model, cluster = MODELS["kimi-k2"], CLUSTERS["kimi-k2"]
    # The meshes of trainer 0: 8 ranks for what is no expert, 16 for 48 experts.
    trainers = [trainer_inventory(model, cluster, rank) for rank in range(16)]
    target = target_inventory(model, cluster, 0)
    quantised = {held.scale_of for held in target.holdings if held.scale_of is not None}
    nothing = Plan((0,), (0,), (), (), *(np.zeros(0, dtype) for dtype in TABLES.values()))

    works = collective_works(nothing, trainers[0], hulls_of(trainers), quantised, Costs())

    seconds = {name: sum(work.prepare_s[name] for work in works) for name in ("gather", "fuse", "quantise")}
    seconds["h2d"] = sum(work.h2d_s for work in works)
    assert seconds == pytest.approx({"gather": 0.518, "fuse": 0.018, "quantise": 0.088, "h2d": 0.184}, rel=0.03)


def test_qwen3_ranks_receive_what_was_published() -> None:
    rows = target_inventory(MODELS["qwen3-235b"], CLUSTERS["qwen3-235b"], 0).rows

    nbytes = (volume(rows["start"], rows["stop"]) * ITEM_BYTES[rows["dtype"]]).sum()

    assert nbytes / 1e9 == pytest.approx(37.688, abs=0.001)

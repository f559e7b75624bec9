"""Dispatch and combine between processes: every row and every sum against the oracle, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

import crossrail as xr
from crossrail.moe import AllToAll, EngineGroup
from tests.moe.fleet import Fleet
from tests.moe.fleet_rank import STYLES
from tests.moe.workloads import ROUTINGS, Workload
from tests.support.seeds import Seed

RANKS = 4


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with Fleet(RANKS) as fleet:
        yield fleet


@pytest.fixture
def work(seed: Seed) -> Workload:
    """Ten experts: the first three ranks have three, the last one."""
    return Workload(RANKS, experts=10, hidden=200, top_k=4, max_tokens=24, routing="uniform", seed=seed.number())


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("style", STYLES)
def test_any_routes_arrive_and_come_back(fleet: Fleet, work: Workload, routing: str, style: str) -> None:
    fleet.round(replace(work, routing=routing), style)


@pytest.mark.parametrize("tokens", [(0, 0, 0, 0), (24, 0, 0, 0), (0, 1, 24, 7)], ids=str)
def test_ranks_with_few_tokens_or_none(fleet: Fleet, work: Workload, tokens: tuple[int, ...]) -> None:
    fleet.round(replace(work, tokens=tokens))
    fleet.round(replace(work, tokens=tokens), "overlapped")


@pytest.mark.parametrize("experts", [1, 3, 4, 600])
def test_experts_that_some_ranks_have_few_or_none_of(fleet: Fleet, work: Workload, experts: int) -> None:
    fleet.round(replace(work, experts=experts, top_k=min(4, experts)))


@pytest.mark.parametrize(("dtype", "scale_block"), [("bfloat16", None), ("float16", 64), ("float32", None)])
@pytest.mark.parametrize("out_dtype", ["bfloat16", "float16", "float32"])
def test_dtypes(fleet: Fleet, work: Workload, dtype: str, scale_block: int | None, out_dtype: str) -> None:
    fleet.round(replace(work, dtype=dtype, scale_block=scale_block, out_dtype=out_dtype), "in-place")


@pytest.mark.parametrize("options", [{"padding": 8}, {"layout": "masked"}, {"capacity_factor": 4.0}], ids=str)
def test_layouts_of_what_comes(fleet: Fleet, work: Workload, options: dict[str, object]) -> None:
    for style in STYLES:
        fleet.round(work, style, **options)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("options", [{"node_size": 2}, {"node_size": 1, "private_tokens": 0}], ids=str)
def test_ranks_that_share_no_memory(fleet: Fleet, work: Workload, routing: str, options: dict[str, int]) -> None:
    for style in STYLES:
        fleet.round(replace(work, routing=routing), style, **options)


def test_ranks_that_tcp_connects(seed: Seed) -> None:
    with Fleet(3, "tcp") as fleet:
        for routing in ROUTINGS:
            work = Workload(3, experts=7, hidden=96, top_k=3, max_tokens=20, routing=routing, seed=seed.number())
            for style in STYLES:
                fleet.round(work, style)


def test_many_rounds_on_the_same_buffers(fleet: Fleet, work: Workload) -> None:
    for number in range(20):
        routing = list(ROUTINGS)[number % len(ROUTINGS)]
        fleet.round(replace(work, routing=routing, seed=work.seed + number), list(STYLES)[number % len(STYLES)])


def test_the_same_round_gives_the_same_bits(fleet: Fleet, work: Workload) -> None:
    once = fleet.round(work, "fractions")
    fleet.round(replace(work, routing="skewed"), "overlapped")
    assert fleet.round(work, "fractions") == once


def test_what_arrives_is_known_before_only_when_masked(engine: xr.Engine) -> None:
    sizes = {"experts": 2, "hidden": 64, "top_k": 1, "max_tokens": 4, "dtype": "float32", "scale_block": None}
    x, indices = np.ones((3, 64), np.float32), np.array([[1], [0], [1]])
    with EngineGroup(engine, [engine.address]) as group:
        with AllToAll(engine, group, layout="masked", **sizes) as masked:
            opened = masked.dispatch_send(x, None, indices)
            arriving, _ = masked.arriving(opened)
            dispatched = masked.dispatch_recv(opened)
            assert arriving.shape == dispatched.x.shape == (8, 64)
            assert np.shares_memory(arriving, dispatched.x)
        with AllToAll(engine, group, **sizes) as grouped:
            with pytest.raises(xr.UsageError, match="layout is 'grouped'"):
                grouped.arriving(grouped.dispatch_send(x, None, indices))


def test_one_rank_alone(seed: Seed) -> None:
    with Fleet(1) as alone:
        for routing in ROUTINGS:
            work = Workload(1, experts=6, hidden=64, top_k=2, max_tokens=9, routing=routing, seed=seed.number())
            for style in STYLES:
                alone.round(work, style)

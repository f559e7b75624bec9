"""crossrail.integrations.deepep between processes: DeepEP's calls, with their options, or with these refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from crossrail.cli.child import Child, Children
from tests.moe import oracle
from tests.moe.workloads import Workload
from tests.support.seeds import Seed

RANKS = 2
DEADLINE_S = 100.0


@pytest.fixture(scope="module", params=["AllToAll", "GraphAllToAll"])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Children]:
    meeting: Path = tmp_path_factory.mktemp("deepep") / "meeting"
    with Children([Child("tests.integrations.deepep_rank", f"rank {rank}") for rank in range(RANKS)]) as ranks:
        common = {"ranks": RANKS, "meeting": str(meeting), "kind": request.param}
        ranks.each("open", [common | {"rank": rank} for rank in range(RANKS)], DEADLINE_S)
        yield ranks
        ranks.all("close", DEADLINE_S)


@pytest.fixture
def work(seed: Seed) -> Workload:
    return Workload(RANKS, experts=6, hidden=384, top_k=3, max_tokens=16, routing="masked", seed=seed.number())


@pytest.mark.parametrize("use_fp8", [True, False])
@pytest.mark.parametrize("routing", ["uniform", "masked", "one-expert"])
def test_dispatch_and_combine(ranks: Children, work: Workload, routing: str, use_fp8: bool) -> None:
    work = replace(work, routing=routing)
    counts = ranks.all("round", DEADLINE_S, work=work.to_json(), use_fp8=use_fp8)
    assert counts == [oracle.received(work, rank).counts.tolist() for rank in range(RANKS)]


def test_hooks_of_two_rounds_and_no_copy(ranks: Children, work: Workload) -> None:
    for _ in range(3):
        ranks.all("overlapped", DEADLINE_S, work=work.to_json())


def test_fewer_tokens_than_there_may_be(ranks: Children, work: Workload) -> None:
    ranks.all("round", DEADLINE_S, work=replace(work, tokens=(5, 0)).to_json())


@pytest.mark.parametrize("call", ["low_latency_dispatch", "low_latency_combine"])
def test_who_waits_for_a_rank_whose_call_was_refused_is_told_and_the_round_goes_on_once_it_is_mended(
    ranks: Children, work: Workload, call: str
) -> None:
    common = {"work": work.to_json(), "call": call}
    ranks.all("round", DEADLINE_S, work=work.to_json())
    ranks[0].start("fail_in", **common)
    ranks[1].start("hear", **common)
    why = ranks[0].finish(DEADLINE_S)
    heard = ranks[1].finish(DEADLINE_S)
    assert "torch.float" in why
    assert heard.startswith("rank 0, left: False: rank 0 ")
    assert f"its {call} failed: UsageError: {why}. Nothing is lost: wait again" in heard
    ranks[0].start("go_on", **common)
    ranks[1].start("hear_on", **common)
    for each in (ranks[0], ranks[1]):
        each.finish(DEADLINE_S)


@pytest.mark.parametrize(
    ("call", "options"),
    [
        ("Buffer", {"low_latency_mode": False}),
        ("Buffer", {"num_nvl_bytes": 1 << 20}),
        ("Buffer", {"enable_shrink": True}),
        ("Buffer", {"comm": "a communicator"}),
        ("low_latency_dispatch", {"dispatch_wait_recv_cost_stats": [0]}),
        ("low_latency_dispatch", {"round_scale": True}),
        ("low_latency_dispatch", {"use_ue8m0": True}),
        ("low_latency_combine", {"use_logfmt": True}),
        ("low_latency_combine", {"combine_wait_recv_cost_stats": [0]}),
    ],
    ids=str,
)
def test_options_that_are_not_there_refused_by_name(ranks: Children, call: str, options: dict[str, Any]) -> None:
    ((name, value),) = options.items()
    assert f"{name}={value!r} is not supported" in ranks[0].call("refused", DEADLINE_S, call=call, **options)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"async_finish": True, "return_recv_hook": True}, "exclude each other"),
        ({"dtype": "float32"}, "x is torch.float32"),
        ({"experts": 5}, "num_experts is 5, must be a multiple of the number of ranks, 2"),
        ({"experts": "4"}, "num_experts must be a whole number, not str"),
        ({"max_tokens": 4.0}, "num_max_dispatch_tokens_per_rank must be a whole number, not float"),
        ({"stats": (1, "int32")}, "cumulative_local_expert_recv_stats has shape (1,), must have (2,)"),
        ({"stats": (2, "float32")}, "cumulative_local_expert_recv_stats is torch.float32"),
    ],
)
def test_what_does_not_fit_refused(ranks: Children, options: dict[str, Any], complaint: str) -> None:
    assert complaint in ranks[0].call("refused", DEADLINE_S, call="low_latency_dispatch", **options)


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        ("combine of no dispatch", "handle is NoneType, must be what low_latency_dispatch gave"),
        ("x of no tensor", "x is list, must be a tensor of torch"),
    ],
)
def test_what_is_something_else_refused(ranks: Children, call: str, complaint: str) -> None:
    assert complaint in ranks[0].call("refused", DEADLINE_S, call=call)


def test_parameters_are_those_of_deepep(ranks: Children) -> None:
    """As in deep_ep/buffers/legacy.py of July 2026: their names and order are the interface."""
    dispatch = (
        "x topk_idx num_max_dispatch_tokens_per_rank num_experts cumulative_local_expert_recv_stats "
        "dispatch_wait_recv_cost_stats use_fp8 round_scale use_ue8m0 async_finish return_recv_hook"
    )
    combine = (
        "x topk_idx topk_weights handle use_logfmt zero_copy async_finish return_recv_hook out "
        "combine_wait_recv_cost_stats"
    )
    assert ranks[0].call("parameters", call="low_latency_dispatch") == dispatch.split()
    assert ranks[0].call("parameters", call="low_latency_combine") == combine.split()

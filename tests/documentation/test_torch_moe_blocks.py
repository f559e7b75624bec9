"""Pieces of docs/moe.md and docs/moe-gpu.md that take torch, as they stand there, by a group of one rank.

tests/vllm has the last of docs/moe.md, tests/moe/test_rounds.py that on copies of experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import crossrail as xr
from crossrail.integrations.transformers import ExpertParallel, distribute_experts
from crossrail.moe import AllToAll, EngineGroup
from crossrail.moe.rows import device
from tests.documentation.blocks import blocks
from tests.moe.played_rows import PlayedRows
from tests.moe.ranks import Ranks
from tests.support.fake_gpu import FakeGpu
from tests.support.limits import WAIT_S

ON_A_GPU, IN_GRAPHS = blocks()["docs/moe-gpu.md"]
WITH_TRANSFORMERS, AS_DEEPEP = blocks()["docs/moe.md"][2:4]
TOKENS, HIDDEN, EXPERTS, TOP_K = 4, 7168, 256, 8


@pytest.fixture
def names() -> Iterator[dict[str, Any]]:
    """What the pieces take for granted: a group, and a batch of rows in fp8."""
    random = torch.Generator().manual_seed(7)
    indices = torch.stack([torch.randperm(EXPERTS, generator=random)[:TOP_K] for _ in range(TOKENS)])
    with xr.Engine("rank-0") as engine, EngineGroup(engine, [engine.address]) as group:
        yield {
            "engine": engine,
            "group": group,
            "x": torch.ones((TOKENS, HIDDEN)).to(torch.float8_e4m3fn),
            "scales": torch.ones((TOKENS, HIDDEN // 128)),
            "indices": indices,
            "weights": torch.full((TOKENS, TOP_K), 1 / TOP_K),
        }


def test_rows_on_a_gpu(names: dict[str, Any], gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PlayedRows, "gpu", gpu, raising=False)
    monkeypatch.setattr(device, "DeviceRows", PlayedRows)

    def experts(_: Any) -> Any:
        memory = names["all_to_all"]._memory
        memory.settle()
        return torch.ones((names["got"].rows, HIDDEN), dtype=torch.bfloat16)

    names |= {"AllToAll": AllToAll, "experts": experts}
    exec(ON_A_GPU, names)
    names["all_to_all"]._memory.settle()
    assert torch.equal(names["out"], torch.ones((TOKENS, HIDDEN), dtype=torch.bfloat16))
    names["all_to_all"].close()


def test_in_graphs(names: dict[str, Any]) -> None:
    """In host memory, where nothing is captured: what a graph would hold is done once, as it is replayed."""
    text = IN_GRAPHS.replace('device="cuda:0", ', "")
    assert text != IN_GRAPHS

    def layer(exchange: Any) -> None:
        got = exchange.dispatch(names["x"], names["scales"], names["indices"], names["weights"])
        exchange.combine(experts(got.x, got.counts), got)

    def experts(x: Any, counts: Any) -> Any:
        assert int(counts.sum()) == TOKENS * TOP_K
        return torch.ones(x.shape, dtype=torch.bfloat16)

    replayed: list[bool] = []
    graph = SimpleNamespace(replay=lambda: replayed.append(True))
    cuda = SimpleNamespace(graph=lambda _: nullcontext())
    names |= {"layer": layer, "experts": experts, "graph": graph, "torch": SimpleNamespace(cuda=cuda)}
    exec(text, names)
    assert replayed and torch.equal(names["out"], torch.ones((TOKENS, HIDDEN), dtype=torch.bfloat16))
    names["exchange"].close()


class _Experts(torch.nn.Module):
    def __init__(self, experts: int, hidden: int) -> None:
        super().__init__()
        self.gate_up_proj = torch.nn.Parameter(torch.ones((experts, 2 * hidden, hidden)))
        self.down_proj = torch.nn.Parameter(torch.ones((experts, hidden, hidden)))
        self.act_fn = torch.nn.functional.silu
        self.num_experts = experts


def test_with_transformers(names: dict[str, Any]) -> None:
    """Of a model only the form counts: tests/cli/test_transformers_moe.py has one of transformers."""
    block = torch.nn.Module()
    block.experts = _Experts(experts=4, hidden=64)
    with AllToAll(
        names["engine"], names["group"], experts=4, hidden=64, top_k=2, max_tokens=TOKENS, dtype="float32",
        scale_block=None, out_dtype="float32", timeout_s=WAIT_S,
    ) as all_to_all:  # fmt: skip
        exec(WITH_TRANSFORMERS, {"model": block, "all_to_all": all_to_all})
        assert type(block.experts).__name__ == "ExpertParallel"


def test_each_rank_keeps_the_experts_that_are_its_own() -> None:
    block, split = _Experts(experts=4, hidden=8), [0, 3, 1]
    block.down_proj.data *= torch.arange(4.0)[:, None, None]
    kept: list[list[float]] = []
    with Ranks(3, experts=4, experts_per_rank=split, hidden=8, top_k=2, max_tokens=TOKENS, dtype="float32",
               scale_block=None, out_dtype="float32") as ranks:  # fmt: skip
        for part in ranks.parts:
            own = ExpertParallel(block, part)
            assert len(own.gate_up_proj) == split[part.rank]
            kept.append(own.down_proj[:, 0, 0].tolist())
    assert kept == [[], [0, 1, 2], [3]]


class _Clamped(_Experts):
    """With a gate of its own, as experts of DeepSeek-V4 have one, and without an act_fn."""

    def __init__(self, experts: int, hidden: int) -> None:
        super().__init__(experts, hidden)
        del self.act_fn
        self.limit = 3.0

    def _apply_gate(self, both: torch.Tensor) -> torch.Tensor:
        gate, up = both.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate.clamp(max=self.limit)) * up.clamp(-self.limit, self.limit)


def test_experts_with_a_gate_of_their_own_compute_by_it() -> None:
    block, hidden = _Clamped(experts=4, hidden=8), 8
    x, indices, weights = torch.ones((2, hidden)), torch.tensor([[0, 3], [1, 4]]), torch.ones((2, 2))
    one = block._apply_gate(x[0] @ block.gate_up_proj[0].T) @ block.down_proj[0].T  # all experts are alike
    with Ranks(1, experts=4, hidden=hidden, top_k=2, max_tokens=TOKENS, dtype="float32", scale_block=None,
               out_dtype="float32") as ranks, torch.no_grad():  # fmt: skip
        got = ExpertParallel(block, ranks.parts[0])(x, indices, weights)
    assert torch.equal(got, torch.stack([2 * one, one]))  # 4 is none of them


def test_a_model_with_experts_whose_gate_is_unknown_is_left_as_it_was() -> None:
    model = torch.nn.ModuleList([torch.nn.Module(), torch.nn.Module()])
    for block in model:
        block.experts = _Experts(experts=4, hidden=8)
    del model[1].experts.act_fn
    with Ranks(1, experts=4, hidden=8, top_k=2, max_tokens=TOKENS, dtype="float32", scale_block=None,
               out_dtype="float32") as ranks:  # fmt: skip
        with pytest.raises(xr.UsageError, match="_Experts has neither act_fn nor _apply_gate"):
            distribute_experts(model, ranks.parts[0])
    assert [type(block.experts).__name__ for block in model] == ["_Experts", "_Experts"]


def test_as_deepep(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        names: dict[str, Any] = {
            "group": dist.group.WORLD,
            "x": torch.ones((TOKENS, 256), dtype=torch.bfloat16),
            "topk_idx": torch.tensor([[0, 3]] * TOKENS),
            "max_tokens": TOKENS,
            "experts": 4,
        }
        exec(AS_DEEPEP, names)
        with names["buffer"]:
            names["hook"]()
            assert names["recv_count"].tolist() == [TOKENS, 0, 0, TOKENS]
    finally:
        dist.destroy_process_group()

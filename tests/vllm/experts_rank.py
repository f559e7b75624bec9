"""One rank of a layer of experts: vLLM's kernel and reference experts, with rows that crossrail.moe brings."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import (
    FUSED_MOE_UNQUANTIZED_CONFIG,
    FusedMoEConfig,
    FusedMoEParallelConfig,
    RoutingMethodType,
)
from vllm.model_executor.layers.fused_moe.experts import fused_batched_moe
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEKernel

import crossrail as xr
from crossrail.cli.child import answer_calls
from crossrail.moe import AllToAll, EngineGroup
from crossrail.moe.graph import GraphAllToAll
from tests.documentation.blocks import blocks

# The reference experts ask whether a graph is being captured, which torch refuses to say where there is no accelerator.
fused_batched_moe._is_capturing_or_compiling = lambda: False

EXPERTS, HIDDEN, INTERMEDIATE, TOKENS = 6, 64, 96, 12
KINDS = {"AllToAll": AllToAll, "GraphAllToAll": GraphAllToAll}


class _Rank:
    def open(self, name: str) -> str:
        torch.set_num_threads(1)
        self.engine = xr.Engine(name, transport="shm")
        return self.engine.address.to_bytes().hex()

    def meet(self, addresses: list[str]) -> None:
        self.group = EngineGroup(self.engine, [bytes.fromhex(address) for address in addresses])

    def layer(self, kind: str, top_k: int, weight_on_input: bool, dtype: str) -> float:
        """The same layer twice: the largest difference to all experts in one process, of the largest value."""
        with set_current_vllm_config(VllmConfig()):
            return self._layer(KINDS[kind], top_k, weight_on_input, getattr(torch, dtype))

    def _layer(self, kind: Any, top_k: int, weight_on_input: bool, dtype: torch.dtype) -> float:
        rank, ranks = self.group.rank, self.group.size
        of_all = torch.Generator().manual_seed(7)
        w1 = (torch.randn((EXPERTS, 2 * INTERMEDIATE, HIDDEN), generator=of_all) / HIDDEN**0.5).to(dtype)
        w2 = (torch.randn((EXPERTS, HIDDEN, INTERMEDIATE), generator=of_all) / INTERMEDIATE**0.5).to(dtype)
        own = torch.Generator().manual_seed(100 + rank)
        x = torch.randn((TOKENS - rank, HIDDEN), generator=own).to(dtype)
        weights, ids = torch.topk(torch.rand((len(x), EXPERTS), generator=own), top_k)
        text = str(dtype).removeprefix("torch.")
        local = slice(rank * EXPERTS // ranks, (rank + 1) * EXPERTS // ranks)
        with kind(
            self.engine, self.group, experts=EXPERTS, hidden=HIDDEN, top_k=top_k, max_tokens=TOKENS, dtype=text,
            scale_block=None, out_dtype=text, layout="masked", timeout_s=60.0,
        ) as all_to_all:  # fmt: skip
            experts = fused_batched_moe.NaiveBatchedExperts(
                _config(rank, ranks, top_k, dtype), FUSED_MOE_UNQUANTIZED_CONFIG, TOKENS, ranks
            )
            names = {"FusedMoEKernel": FusedMoEKernel, "all_to_all": all_to_all, "experts": experts}
            exec(blocks()["docs/moe.md"][-1], names)
            kernel: Any = names["kernel"]
            given = [
                kernel.apply(
                    x, w1[local], w2[local], weights, ids, MoEActivation.SILU, EXPERTS, None, weight_on_input
                ).clone()
                for _ in range(2)
            ]
        assert torch.equal(*given)
        wanted = _reference(x, w1, w2, weights, ids, weight_on_input)
        return float((given[0].float() - wanted).abs().max() / wanted.abs().max())


def _config(rank: int, ranks: int, top_k: int, dtype: torch.dtype) -> FusedMoEConfig:
    parallel = FusedMoEParallelConfig(
        tp_size=1, pcp_size=1, dp_size=ranks, ep_size=ranks, tp_rank=0, pcp_rank=0, dp_rank=rank, ep_rank=rank,
        sp_size=1, use_ep=True, all2all_backend="allgather_reducescatter", enable_eplb=False,
    )  # fmt: skip
    return FusedMoEConfig(
        num_experts=EXPERTS, experts_per_token=top_k, hidden_dim=HIDDEN, intermediate_size=INTERMEDIATE,
        num_local_experts=EXPERTS // ranks, num_logical_experts=EXPERTS, activation=MoEActivation.SILU, device="cpu",
        routing_method=RoutingMethodType.Renormalize, moe_parallel_config=parallel, in_dtype=dtype,
        max_num_tokens=TOKENS,
    )  # fmt: skip


def _reference(x: Any, w1: Any, w2: Any, weights: Any, ids: Any, weight_on_input: bool) -> Any:
    """All experts of all tokens in float32, token by token."""
    sums = torch.zeros(x.shape)
    for token, k in torch.cartesian_prod(torch.arange(len(x)), torch.arange(ids.shape[1])).tolist():
        expert, weight = ids[token, k], weights[token, k]
        row = x[token].float() * (weight if weight_on_input else 1.0)
        gate, up = functional.linear(row, w1[expert].float()).chunk(2)
        made = functional.linear(functional.silu(gate) * up, w2[expert].float())
        sums[token] += made * (1.0 if weight_on_input else weight)
    return sums


if __name__ == "__main__":
    this = _Rank()
    answer_calls({handler.__name__: handler for handler in (this.open, this.meet, this.layer)})

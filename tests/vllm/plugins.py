"""What tests add to vLLM's processes (`vllm.general_plugins`), so that its layers run on the CPU at hand."""

from __future__ import annotations

from typing import Any

import torch


def local_experts() -> None:
    """vLLM's experts for the CPU take no expert map, and crash on numbers of experts that are elsewhere."""
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    apply = CPUUnquantizedExperts.apply
    if apply.__name__ == "mapped":  # plugins are loaded more than once
        return

    def mapped(
        self: Any, output: Any, hidden_states: Any, w1: Any, w2: Any, topk_weights: Any, topk_ids: Any,
        activation: Any, global_num_experts: int, expert_map: Any, *more: Any, **named: Any,
    ) -> None:  # fmt: skip
        local = expert_map[topk_ids.long()]
        weights = torch.where(local < 0, 0.0, topk_weights)
        ids = local.clamp(min=0).to(topk_ids.dtype)
        apply(self, output, hidden_states, w1, w2, weights, ids, activation, global_num_experts, None, *more, **named)

    CPUUnquantizedExperts.apply = mapped


def float8() -> None:
    """vLLM asks for AMX before it takes its fp8 kernels for the CPU, which compute without it too."""
    from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUFp8BlockScaledMMKernel
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUExpertsFp8

    CPUFp8BlockScaledMMKernel.is_supported = classmethod(lambda *_: (True, None))
    CPUExpertsFp8._supports_current_device = staticmethod(lambda: True)

"""Expert parallelism for MoE models of Hugging Face transformers: each rank keeps its share of the experts.

    all_to_all = AllToAll(engine, group, experts=..., hidden=..., top_k=..., max_tokens=..., dtype="float32", ...)
    distribute_experts(model, all_to_all)
    model(input_ids)         # every rank, as many times as the others, each with a batch of its own

Attention, norms and routers stay whole on every rank. Inference only: there is no backward pass.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from crossrail._extras import needs
from crossrail.errors import UsageError
from crossrail.moe import AllToAll, Dispatched

with needs(__name__, "'crossrail[transformers]'"):
    import torch

__all__ = ["ExpertParallel", "distribute_experts"]


class ExpertParallel(torch.nn.Module):
    """Takes the place of a block's `experts`, and is called as they are.

    The module it replaces has gate_up_proj [experts, 2 * intermediate, hidden], down_proj [experts, hidden,
    intermediate] and act_fn, without biases, as Qwen3-MoE, Mixtral, DeepSeek-V3 and others have. Where it has a gate of
    its own (_apply_gate, as DeepSeek-V4, whose is clamped), that is used. This rank's part of both is copied; the rest
    is freed with the replaced module.
    """

    def __init__(self, experts: torch.nn.Module, all_to_all: AllToAll) -> None:
        """UsageError when the experts are of another form or number, or computing in another dtype."""
        super().__init__()
        _check(experts, all_to_all)
        ours = all_to_all.config.split.of(all_to_all.rank)
        own = slice(ours.start, ours.stop)
        self.gate_up_proj = torch.nn.Parameter(experts.gate_up_proj[own].detach().clone(), requires_grad=False)
        self.down_proj = torch.nn.Parameter(experts.down_proj[own].detach().clone(), requires_grad=False)
        self._gate = _gate_of(experts)
        self._all_to_all = all_to_all

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """[tokens, hidden]: the weighted sum over each token's experts, wherever they are.

        hidden_states: [tokens, hidden]; top_k_index: [tokens, top_k], an index of `experts` or more is for none of
        them, as in transformers; top_k_weights: [tokens, top_k]. Blocks until all ranks have called.
        """
        if torch.is_grad_enabled() and hidden_states.requires_grad:
            raise UsageError("hidden_states require a gradient, and ExpertParallel has none: use torch.no_grad()")
        all_to_all = self._all_to_all
        indices = top_k_index.masked_fill(top_k_index >= all_to_all.config.experts, -1)
        dispatched = all_to_all.dispatch(hidden_states.contiguous(), None, indices)
        y = all_to_all.expert_output(dispatched)
        self._run(dispatched, y)
        return all_to_all.combine(y, dispatched, top_k_weights.float())

    def _run(self, dispatched: Dispatched, y: torch.Tensor) -> None:
        """Each expert's output for its rows, without their weights; padding of groups stays as it is."""
        for local in range(len(self.gate_up_proj)):
            first, count = int(dispatched.offsets[local]), int(dispatched.counts[local])
            rows = slice(first, first + count)
            gated = self._gate(torch.nn.functional.linear(dispatched.x[rows], self.gate_up_proj[local]))
            y[rows] = torch.nn.functional.linear(gated, self.down_proj[local])


def distribute_experts(model: torch.nn.Module, all_to_all: AllToAll) -> int:
    """Replaces the experts of every MoE block of a model; how many blocks. UsageError when there is none, or where one
    is refused: the model is as it was then.

    One AllToAll serves all layers, which run one after another.
    """
    blocks = [module for module in model.modules() if hasattr(getattr(module, "experts", None), "gate_up_proj")]
    for block in blocks:  # all of them before the first is replaced
        _check(block.experts, all_to_all)
    for block in blocks:
        block.experts = ExpertParallel(block.experts, all_to_all)
    if not blocks:
        raise UsageError(f"{type(model).__name__} has no block with experts that have a gate_up_proj")
    return len(blocks)


def _gate_of(experts: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """[rows, 2 * intermediate] to [rows, intermediate], as these experts do it; without their weights, which it would
    keep from being freed.
    """
    bare = copy.copy(experts)
    bare._parameters = {}
    apply_gate: Callable[[torch.Tensor], torch.Tensor] | None = getattr(bare, "_apply_gate", None)
    if apply_gate is not None:
        return apply_gate

    def gate_and_up(both: torch.Tensor) -> torch.Tensor:
        gate, up = both.chunk(2, dim=-1)
        activated: torch.Tensor = bare.act_fn(gate) * up
        return activated

    return gate_and_up


def _check(experts: Any, all_to_all: AllToAll) -> None:
    """Checks the experts' form, with which _run computes, and what all_to_all can carry."""
    name = type(experts).__name__
    if biases := [of for of, _ in experts.named_parameters() if of not in ("gate_up_proj", "down_proj")]:
        raise UsageError(f"{name} has {', '.join(biases)}, which ExpertParallel does not support")
    number, hidden, intermediate = experts.down_proj.shape
    if tuple(experts.gate_up_proj.shape) != (number, 2 * intermediate, hidden):
        raise UsageError(
            f"{name}: gate_up_proj of {tuple(experts.gate_up_proj.shape)} must be "
            f"{(number, 2 * intermediate, hidden)} for a down_proj of {tuple(experts.down_proj.shape)}"
        )
    if not hasattr(experts, "act_fn") and not hasattr(experts, "_apply_gate"):
        raise UsageError(f"{name} has neither act_fn nor _apply_gate: its gate is unknown")
    config = all_to_all.config
    if (number, hidden) != (config.experts, config.hidden):
        raise UsageError(
            f"{name} has {number} experts of hidden size {hidden}, the AllToAll is for {config.experts} of "
            f"{config.hidden}"
        )
    dtype = str(experts.down_proj.dtype).removeprefix("torch.")
    if {config.dtype, config.out_dtype} != {dtype}:
        raise UsageError(
            f"{name} computes in {dtype}, the AllToAll carries {config.dtype} out and {config.out_dtype} back"
        )

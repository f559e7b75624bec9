"""vLLM's interface for expert parallelism, over crossrail.moe: prepares the inputs of fused experts, and finalizes.

    kernel = FusedMoEKernel(CrossrailPrepareAndFinalize(all_to_all), experts)   # experts of vLLM's batched format

vLLM 0.32 has no registry of these: whoever builds the kernel of a layer chooses one. Tested with vLLM's own kernel and
reference experts on CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceDelegate
from vllm.v1.worker.ubatching import dbo_current_ubatch_id

from crossrail.errors import UsageError
from crossrail.moe import AllToAll, Dispatched
from crossrail.moe.farewell import is_told_by
from crossrail.moe.graph import GraphAllToAll, GraphDispatched


def _all_to_all_of(adapter: CrossrailPrepareAndFinalize) -> list[Any]:
    return [adapter._all_to_all]


class CrossrailPrepareAndFinalize(mk.FusedMoEPrepareAndFinalizeModular):
    """Of one rank. Threads: one at a time, as vLLM's micro-batches are.

    all_to_all: of layout "masked", without scales, on the device of activations, of their dtype. Its owner closes it.
    With a GraphAllToAll all of this only launches, so CUDA graphs can have it, and counts are on the device alone. Of
    graphs that are replayed nothing but all_to_all.check() says that a rank was lost; sums are NaN from then on.
    Rows are dispatched as they are: experts that want them quantised are refused.
    """

    def __init__(self, all_to_all: AllToAll | GraphAllToAll) -> None:
        super().__init__()
        config = all_to_all.config
        if config.layout != "masked" or config.scale_block is not None:
            raise UsageError(
                f"all_to_all has layout {config.layout!r} and scale_block {config.scale_block!r}, must have layout "
                "'masked' and no scale_block"
            )
        self._all_to_all: Any = all_to_all
        self._config = config
        self._dispatched: dict[int, Dispatched | GraphDispatched] = {}  # by micro-batch

    @property
    def activation_format(self) -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.BatchedExperts

    def topk_indices_dtype(self) -> torch.dtype:
        return torch.int64

    def max_num_tokens_per_rank(self) -> int:
        return self._config.max_tokens

    def num_dispatchers(self) -> int:
        return self._config.world

    def output_is_reduced(self) -> bool:
        return True

    def supports_async(self) -> bool:
        return True

    def prepare(self, *args: Any, **options: Any) -> mk.PrepareResultType:
        hook, receiver = self.prepare_async(*args, **options)
        hook()
        return receiver()

    @is_told_by(_all_to_all_of)
    def prepare_async(
        self,
        a1: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_experts: int,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: Any,
        defer_input_quant: bool = False,
    ) -> tuple[Callable[[], None], mk.ReceiverType]:
        """Sends; hook waits for the other ranks; receiver gives [local experts, ranks * max tokens, hidden] and counts.

        topk_ids are of all experts, so expert_map is not needed.
        """
        all_to_all, batch = self._all_to_all, dbo_current_ubatch_id()
        if quant_config.quant_dtype is not None:
            raise UsageError(f"quant_dtype {quant_config.quant_dtype}: activations are dispatched as they are")
        if num_experts != all_to_all.config.experts:
            raise UsageError(f"num_experts is {num_experts}, the AllToAll is for {all_to_all.config.experts}")
        if apply_router_weight_on_input:
            if topk_ids.shape[1] != 1:
                raise UsageError(f"apply_router_weight_on_input needs a top-k of 1, not {topk_ids.shape[1]}")
            a1 = a1 * topk_weights.to(a1.dtype)
        opened = all_to_all.dispatch_send(a1.contiguous(), None, topk_ids.contiguous())

        def hook() -> None:
            self._dispatched[batch] = all_to_all.dispatch_recv(opened)

        def receiver() -> mk.PrepareResultType:
            dispatched = self._dispatched[batch]
            is_known = isinstance(dispatched, Dispatched)  # otherwise reading the counts would wait for the GPU
            counts = mk.ExpertTokensMetadata(
                expert_num_tokens=dispatched.counts, expert_num_tokens_cpu=dispatched.counts.cpu() if is_known else None
            )
            config = all_to_all.config  # this rank may have no experts
            rows = dispatched.x.view(len(dispatched.counts), config.rows_per_expert, config.hidden)
            return rows, None, counts, None, None

        return hook, receiver

    def finalize(self, *args: Any, **options: Any) -> None:
        hook, receiver = self.finalize_async(*args, **options)
        hook()
        receiver()

    @is_told_by(_all_to_all_of)
    def finalize_async(
        self,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: mk.TopKWeightAndReduce,
    ) -> tuple[Callable[[], None], Callable[[], None]]:
        """Sends; hook waits for the other ranks and writes output: sums in float32, in the order of k."""
        if not isinstance(weight_and_reduce_impl, TopKWeightAndReduceDelegate):
            raise UsageError(
                f"{type(weight_and_reduce_impl).__name__}: weights are applied where rows are summed, here"
            )
        batch = dbo_current_ubatch_id()
        dispatched = self._dispatched[batch]
        weights = torch.ones_like(topk_weights) if apply_router_weight_on_input else topk_weights
        self._all_to_all.combine_send(fused_expert_output.reshape(dispatched.x.shape), dispatched)
        del self._dispatched[batch]

        def hook() -> None:
            self._all_to_all.combine_recv(dispatched, weights.float().contiguous(), out=output)

        return hook, lambda: None

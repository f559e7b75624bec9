"""Where the weights of a vLLM worker's model are written, and what vLLM has to do with them afterwards.

Weights that kernels read as loaded are written in place. Layers whose weights vLLM changes after loading (packed for
the CPU, shuffled for a kernel, fp8 whose scales a backend rearranges) are written to memory beside the model, in the
form in which vLLM loads them, and reloaded from there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.layers.fused_moe import RoutedExperts, UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod, Fp8MoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS

from crossrail.errors import UsageError
from crossrail.integrations.vllm.weights_reload import loaded_form, reload
from crossrail.weights.inventory.families import names_of
from crossrail.weights.inventory.mapping import Names, Ranks
from crossrail.weights.inventory.memory import Place, WeightMemory, place_of
from crossrail.weights.inventory.torch_tensors import add_tensor

# Names of backends and kernels for which tests have seen what vLLM makes of weights, bit for bit.
MOE_AS_LOADED = ("TRITON", "BATCHED_TRITON")
MOE_CHANGED = ("CPU", "FLASHINFER_CUTLASS")
MOE_FLOAT8 = ("CPU", "TRITON", "BATCHED_TRITON", "FLASHINFER_CUTLASS", "VLLM_CUTLASS")
LINEAR_FLOAT8 = ("CPUFp8BlockScaledMMKernel", "TritonFp8BlockScaledMMKernel", "CutlassFp8BlockScaledMMKernel")
_ELSE = "Next: leave this model to a backend of vLLM's own"


@dataclass
class WorkerModel:
    """Of one worker. config: the model's config.json. ranks: of tensor parallelism. Threads: vLLM's worker thread.

    Lifecycle: 1. fill(). 2. after each update that is complete: apply(). The memory must not be written meanwhile.
    """

    model: torch.nn.Module
    model_config: Any
    config: dict[str, Any]
    ranks: Ranks
    _beside: list[tuple[str, torch.nn.Module, dict[str, torch.Tensor]]] = field(default_factory=list)
    _again: list[torch.nn.Module] = field(default_factory=list)  # vLLM has made copies of these
    _attentions: list[MLAAttention] = field(default_factory=list)
    _shared: set[int] = field(default_factory=set)

    def fill(self, memory: WeightMemory) -> None:
        """Adds all parameters. UsageError names the one that cannot be updated, and what to do."""
        names = self.add(memory)
        if missing := names.shapes.keys() - memory.names:
            raise UsageError(f"{min(missing)}: the model has this parameter, and its worker in vLLM has not. {_ELSE}")

    def add(self, memory: WeightMemory) -> Names:
        """Adds those that the model has."""
        if hasattr(self.model, "process_weights_after_loading"):
            raise UsageError(f"{type(self.model).__name__} changes weights of all layers after loading. {_ELSE}")
        names = names_of(self.config)
        for name, module in self.model.named_modules():
            if isinstance(module, MLAAttention):  # what it has, it makes of kv_b_proj
                self._attentions.append(module)
            elif any(True for _ in module.parameters(recurse=False)):
                self._add_module(memory, names, name, module)
        return names

    @property
    def bytes_beside(self) -> int:
        return sum(tensor.nbytes for _, _, tensors in self._beside for tensor in tensors.values())

    def apply(self) -> None:
        """What was written beside the model is loaded, and what vLLM makes of weights is made again.

        RuntimeError names the layer that could not be; those before it are updated.
        """
        with torch.no_grad():
            for name, layer, tensors in self._beside:
                try:
                    reload(layer, tensors, self.model_config)
                except Exception as error:
                    raise RuntimeError(
                        f"{name}: vLLM could not load it again: {type(error).__name__}: {error}"
                    ) from error
            for layer in self._again:
                layer.quant_method.process_weights_after_loading(layer)
            for attention in self._attentions:
                attention.process_weights_after_loading(self.model_config.dtype)
        if next(self.model.parameters()).is_cuda:
            torch.cuda.synchronize()

    def _add_module(self, memory: WeightMemory, names: Names, name: str, module: torch.nn.Module) -> None:
        in_place = [own for own, one in module._parameters.items() if one is not None]
        loaded = loaded_form(module)
        if _is_changed(name, module):
            if not loaded:
                raise UsageError(f"{name}: vLLM has not recorded how it loaded this layer. {_ELSE}")
            in_place = [own for own in in_place if own in SKIP_TENSORS]  # the others are made of what is loaded
            tensors = {own: torch.empty(like.shape, dtype=like.dtype, device="cpu") for own, like in loaded.items()}
            self._beside.append((name, module, tensors))
            for own, tensor in tensors.items():
                self._add(memory, names, f"{name}.{own}", tensor, module)
        elif removed := set(loaded).difference(in_place):
            raise UsageError(f"{name}.{min(removed)}: vLLM has removed it after loading. {_ELSE}")
        elif _is_copied(module):
            self._again.append(module)
        for own in in_place:
            self._add_in_place(memory, names, f"{name}.{own}", module, own, loaded.get(own))

    def _add_in_place(
        self, memory: WeightMemory, names: Names, name: str, module: torch.nn.Module, own: str, loaded: Any
    ) -> None:
        parameter = module._parameters[own]
        assert parameter is not None
        tensor = parameter.detach().as_subclass(torch.Tensor)
        if loaded is not None and (had := _form(loaded)) != _form(tensor):
            raise UsageError(f"{name}: vLLM has {_form(tensor)} where it loaded {had}, and does not say how. {_ELSE}")
        if own == "bias" and getattr(module, "params_dtype", tensor.dtype) != tensor.dtype:
            raise UsageError(f"{name}: vLLM has made {tensor.dtype} of it after loading. {_ELSE}")
        # What is added is an alias, which stays where it is if the parameter gets other memory, or is replaced by
        # another one.
        memory.watch(name, partial(_place_of, module, own))
        if tensor.data_ptr() not in self._shared:  # tied: written once
            self._shared.add(tensor.data_ptr())
            self._add(memory, names, name, tensor, module)

    def _add(
        self, memory: WeightMemory, names: Names, name: str, tensor: torch.Tensor, module: torch.nn.Module
    ) -> None:
        if isinstance(module, VocabParallelEmbedding) and name.endswith(".weight"):
            _add_vocabulary(memory, name, tensor, module)
        elif isinstance(module, RoutedExperts):
            moe = module.moe_config.moe_parallel_config
            for here, experts in _runs(name, module):
                ranks = Ranks(moe.tp_rank, moe.tp_size, experts=experts)
                add_tensor(memory, names, name, tensor[here : here + experts[1] - experts[0]], ranks=ranks)
        else:  # some layers are not divided where others are
            ranks = Ranks(getattr(module, "tp_rank", self.ranks.tp_rank), getattr(module, "tp_size", self.ranks.tp))
            add_tensor(memory, names, name, tensor, ranks=ranks)


def _is_changed(name: str, module: torch.nn.Module) -> bool:
    """vLLM reads other weights than it loaded into this layer. UsageError where it does not say which."""
    method = getattr(module, "quant_method", None)
    kind = type(method)
    if not isinstance(method, QuantizeMethodBase):
        return False
    if kind in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
        is_empty = not module.weight.numel()
        if is_empty and getattr(module, "_cpu_skip_gemm_dispatch", False):
            raise UsageError(
                f"{name}.weight is empty: vLLM's attention has packed it for AMX, and cannot do it again. Next: start "
                "vLLM with --attention-backend CPU_MLA"
            )
        return is_empty
    if kind is UnquantizedFusedMoEMethod:
        backend = method.unquantized_backend.name
        _check_tried(name, backend, (*MOE_AS_LOADED, *MOE_CHANGED), "--moe-backend triton")
        return backend in MOE_CHANGED
    if kind is Fp8LinearMethod or kind is Fp8MoEMethod:
        _check_float8(name, method)
        return True
    raise UsageError(
        f"{name} is computed by {kind.__name__}: weight transfer by crossrail knows layers of bfloat16, float16 and "
        f"float32, and of fp8 with weight_block_size, without LoRA. {_ELSE}"
    )


def _check_tried(name: str, backend: str, tried: tuple[str, ...], option: str) -> None:
    if backend not in tried:
        raise UsageError(
            f"{name}: what vLLM makes of weights for {backend} has not been tried, only for {', '.join(tried)}. "
            f"Next: start vLLM with {option}"
        )


def _check_float8(name: str, method: Any) -> None:
    if not method.block_quant:
        raise UsageError(
            f"{name} is fp8 with a scale for all of a tensor: only scales of blocks are sent (weight_block_size in "
            f"the model's quantization_config). {_ELSE}"
        )
    if isinstance(method, Fp8LinearMethod):
        _check_tried(name, type(method.fp8_linear).__name__, LINEAR_FLOAT8, "--linear-backend triton")
        return
    _check_tried(name, method.fp8_backend.name, MOE_FLOAT8, "--moe-backend triton")
    if method.weight_scale_refine is not None:
        raise UsageError(
            f"{name}: {method.weight_block_size} elements share a scale, and tensor parallelism divides them. Next: "
            "fewer ranks of tensor parallelism, or --enable-expert-parallel"
        )


def _is_copied(module: torch.nn.Module) -> bool:
    """On CPU what computes this layer has a copy of its weight, besides the weight that is still there."""
    linear = module.__dict__.get("cpu_linear")
    return getattr(linear, "__closure__", None) is not None or bool(getattr(linear, "__defaults__", None))


def _runs(name: str, module: RoutedExperts) -> Iterator[tuple[int, tuple[int, int]]]:
    """Experts that are neighbours here and in the model: where the first is here, and their numbers in the model."""
    manager, config = module.expert_map_manager, module.moe_config
    if config.num_experts != config.num_logical_experts or manager.num_fused_shared_experts:
        raise UsageError(
            f"{name}: vLLM has copies of experts, or shared ones, among the model's {config.num_logical_experts}. "
            "Next: start it without --enable-eplb"
        )
    padded, real = config.intermediate_size_per_partition, config.intermediate_size_per_partition_unpadded
    if padded != real or config.hidden_dim != config.hidden_dim_unpadded:
        raise UsageError(
            f"{name}: vLLM has experts of {config.hidden_dim} x {padded} for this model's "
            f"{config.hidden_dim_unpadded} x {real}, as its kernel wants them. Next: choose another with --moe-backend"
        )
    here = sorted(manager.get_local_expert_ids(), key=manager.map_global_to_local)
    begin = 0
    for place in range(1, len(here) + 1):
        if place == len(here) or here[place] != here[place - 1] + 1:
            yield begin, (here[begin], here[place - 1] + 1)
            begin = place


def _form(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)} with strides {tensor.stride()}"


def _place_of(module: torch.nn.Module, own_name: str) -> Place:
    """Where this parameter of the module is at present; address 0: it has none."""
    parameter = module._parameters.get(own_name)
    return (0, None, None) if parameter is None else place_of(parameter)


def _add_vocabulary(memory: WeightMemory, name: str, tensor: torch.Tensor, module: Any) -> None:
    """vLLM pads the vocabulary before it divides it: of a worker's rows the first are real."""
    rows = module.shard_indices
    first, last = rows.org_vocab_start_index, rows.org_vocab_end_index
    shape = module.org_vocab_size, tensor.shape[1]
    memory.add(name, tensor[: last - first], shape=shape, box=((first, last), (0, shape[1])))

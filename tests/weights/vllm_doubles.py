"""Stand-ins for the few names of vLLM that its weight-transfer backend imports, with what it asks of them."""

from __future__ import annotations

import enum
import sys
from collections.abc import Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

MODEL_EXECUTOR = "vllm.model_executor"
LAYERS = f"{MODEL_EXECUTOR}.layers"


class TransferEngine:
    def __class_getitem__(cls, _: object) -> type[TransferEngine]:
        return cls

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        self.vllm_config, self.model_config = vllm_config, vllm_config.model_config


class Method:
    """How a layer computes, and what it does with weights after loading. QuantizeMethodBase of vLLM's."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)
        self.processed: list[Any] = []

    def process_weights_after_loading(self, layer: Any) -> None:
        self.processed.append(layer)


class LinearMethod(Method):
    pass


class EmbeddingMethod(Method):
    pass


class MoeMethod(Method):
    pass


class Float8Method(Method):
    pass


class Float8MoeMethod(Method):
    pass


class OtherMethod(Method):
    pass


class Kernel:
    pass


class TritonFp8BlockScaledMMKernel(Kernel):
    pass


class Backend(enum.Enum):
    FLASHINFER_TRTLLM = "FlashInfer TRTLLM"
    FLASHINFER_CUTLASS = "FlashInfer CUTLASS"
    AITER = "ROCm AITER"
    TRITON = "TRITON"
    BATCHED_TRITON = "BATCHED_TRITON"
    MOONEP = "MOONEP"
    CPU = "CPU"


class Embedding(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(48, 16))  # padded
        self.org_vocab_size = 32
        self.shard_indices = SimpleNamespace(org_vocab_start_index=0, org_vocab_end_index=32)


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.W_UV = torch.nn.Parameter(torch.zeros(2, 3))
        self.processed: list[Any] = []

    def process_weights_after_loading(self, dtype: Any) -> None:
        self.processed.append(dtype)


class ExpertMap:
    """places: the number of each expert here, by its place."""

    num_fused_shared_experts = 0

    def __init__(self, places: list[int]) -> None:
        self._places = places

    def get_local_expert_ids(self) -> list[int]:
        return sorted(self._places)

    def map_global_to_local(self, expert: int) -> int:
        return self._places.index(expert)


class Experts(torch.nn.Module):
    """of: how many there are in all."""

    def __init__(self, w13: torch.Tensor, w2: torch.Tensor, places: list[int], of: int, method: Method) -> None:
        super().__init__()
        self.w13_weight = torch.nn.Parameter(w13, requires_grad=False)
        self.w2_weight = torch.nn.Parameter(w2, requires_grad=False)
        self.expert_map_manager = ExpertMap(places)
        parallel = SimpleNamespace(tp_rank=0, tp_size=1)
        hidden, wide = w2.shape[1:]
        self.moe_config = SimpleNamespace(
            moe_parallel_config=parallel, num_experts=of, num_logical_experts=of, hidden_dim=hidden,
            hidden_dim_unpadded=hidden, intermediate_size_per_partition=wide,
            intermediate_size_per_partition_unpadded=wide,
        )  # fmt: skip
        self.quant_method = method


class Layerwise:
    """vLLM's reload, as far as it keeps what it does: which layers, and tensors of which values."""

    def __init__(self) -> None:
        self.loaded: dict[Any, dict[str, torch.Tensor]] = {}  # how layers were before anything was loaded
        self.reloaded: list[tuple[Any, str, torch.Tensor]] = []
        self.error: Exception | None = None

    def record(self, module: Any, **tensors: torch.Tensor) -> None:
        self.loaded[module] = {name: torch.empty_like(one, device="meta") for name, one in tensors.items()}

    def get_layerwise_info(self, layer: Any) -> Any:
        return SimpleNamespace(restore_metadata=(self.loaded.get(layer, {}), {}), reset=lambda: None)

    def initialize_layerwise_reload(self, layer: Any) -> None:
        for name, one in self.loaded[layer].items():
            layer._parameters[name] = one

    def make_online_process_loader(self, layer: Any, name: str) -> Any:
        return lambda _, tensor: self.reloaded.append((layer, name, tensor.clone()))

    def finalize_layerwise_reload(self, *_: Any) -> None:
        if self.error is not None:
            raise self.error


def put(monkeypatch: pytest.MonkeyPatch, layerwise: Layerwise) -> None:
    base = {
        "WeightTransferEngine": TransferEngine, "WeightTransferInitInfo": object, "WeightTransferUpdateInfo": object,
    }  # fmt: skip
    contents: Mapping[str, Mapping[str, Any]] = {
        "vllm": {},
        "vllm.distributed": {},
        "vllm.distributed.parallel_state": {"get_tensor_model_parallel_rank": lambda: 0},
        "vllm.distributed.weight_transfer": {},
        "vllm.distributed.weight_transfer.base": base,
        MODEL_EXECUTOR: {},
        LAYERS: {},
        f"{LAYERS}.attention": {"MLAAttention": Attention},
        f"{LAYERS}.fused_moe": {"RoutedExperts": Experts, "UnquantizedFusedMoEMethod": MoeMethod},
        f"{LAYERS}.fused_moe.oracle": {},
        f"{LAYERS}.fused_moe.oracle.unquantized": {"UnquantizedMoeBackend": Backend},
        f"{LAYERS}.linear": {"UnquantizedLinearMethod": LinearMethod},
        f"{LAYERS}.quantization": {},
        f"{LAYERS}.quantization.base_config": {"QuantizeMethodBase": Method},
        f"{LAYERS}.quantization.fp8": {"Fp8LinearMethod": Float8Method, "Fp8MoEMethod": Float8MoeMethod},
        f"{LAYERS}.vocab_parallel_embedding": {
            "UnquantizedEmbeddingMethod": EmbeddingMethod, "VocabParallelEmbedding": Embedding,
        },
        f"{MODEL_EXECUTOR}.model_loader": {},
        f"{MODEL_EXECUTOR}.model_loader.reload": {},
        f"{MODEL_EXECUTOR}.model_loader.reload.meta": {"SKIP_TENSORS": {"bias", "e_score_correction_bias"}},
        f"{MODEL_EXECUTOR}.model_loader.reload.layerwise": {
            name: getattr(layerwise, name)
            for name in (
                "get_layerwise_info", "initialize_layerwise_reload", "make_online_process_loader",
                "finalize_layerwise_reload",
            )
        },
    }  # fmt: skip
    for name, content in contents.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)

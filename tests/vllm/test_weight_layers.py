"""vLLM's own layers of experts, updated as trainers would, hold bit for bit what its own loader makes of the weights.

Also for kernels that need a GPU: they are not run, but what vLLM does with weights for them is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.kernels import linear as linear_kernels
from vllm.model_executor.layers.fused_moe import RoutedExperts, UnquantizedFusedMoEMethod
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType
from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUExpertsFp8, CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.quantization.fp8 import Fp8Config, Fp8MoEMethod
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

import crossrail as xr
from crossrail.integrations.vllm.weights_model import (
    LINEAR_FLOAT8,
    MOE_AS_LOADED,
    MOE_CHANGED,
    MOE_FLOAT8,
    WorkerModel,
)
from crossrail.weights.inventory.mapping import Ranks
from crossrail.weights.inventory.memory import WeightMemory

EXPERTS, HIDDEN, WIDE = 6, 256, 256
NAME = "model.layers.0.mlp.experts.routed_experts"
PARTS = (("w13_weight", "w1", "gate"), ("w2_weight", "w2", "down"), ("w13_weight", "w3", "up"))
CONFIG = {
    "model_type": "qwen3_moe", "vocab_size": 32, "hidden_size": HIDDEN, "intermediate_size": 64, "head_dim": 16,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "num_experts": EXPERTS,
    "moe_intermediate_size": WIDE, "quantization_config": {"weight_block_size": [128, 128]},
}  # fmt: skip
Weights = dict[str, torch.Tensor]
BACKENDS = [
    *(UnquantizedMoeBackend[name] for name in (*MOE_AS_LOADED, *MOE_CHANGED)),
    *(Fp8MoeBackend[name] for name in MOE_FLOAT8),
]
# Ranks of tensor and of expert parallelism, and which of them this is.
PLACES = {"alone": (1, 0, 1, 0), "tp": (2, 1, 1, 0), "ep": (1, 0, 2, 1), "uneven ep": (1, 0, 4, 1)}


@pytest.fixture(autouse=True)
def configured() -> Iterator[None]:
    config = VllmConfig()
    config.model_config = SimpleNamespace(dtype=torch.bfloat16)
    with set_current_vllm_config(config):
        yield


def weights(seed: int, is_float8: bool) -> Weights:
    """By their names in a model."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for part, shape in (("gate", (WIDE, HIDDEN)), ("up", (WIDE, HIDDEN)), ("down", (HIDDEN, WIDE))):
        name = f"model.layers.0.mlp.experts.{part}_proj.weight"
        made[name] = torch.randn((EXPERTS, *shape), generator=generator)
        if is_float8:
            made[name] = made[name].to(torch.float8_e4m3fn)
            blocks = EXPERTS, *(n // 128 for n in shape)
            made[f"{name}_scale_inv"] = torch.rand(blocks, generator=generator) + 0.5
    return made


def make_layer(
    monkeypatch: pytest.MonkeyPatch, backend: Any, place: tuple[int, int, int, int], strategy: str = "linear"
) -> RoutedExperts:
    tp, tp_rank, ep, ep_rank = place
    parallel = FusedMoEParallelConfig(
        tp_size=tp, pcp_size=1, dp_size=1, ep_size=ep, tp_rank=tp_rank, pcp_rank=0, dp_rank=0, ep_rank=ep_rank,
        sp_size=1, use_ep=ep > 1, all2all_backend="allgather_reducescatter", enable_eplb=False,
    )  # fmt: skip
    experts = ExpertMapManager(64, 2, EXPERTS, 0, 2, parallel, strategy, False)
    config = FusedMoEConfig(
        num_experts=EXPERTS, experts_per_token=2, hidden_dim=HIDDEN, intermediate_size=WIDE, device="cpu",
        num_local_experts=experts.local_num_experts, num_logical_experts=EXPERTS, activation=MoEActivation.SILU,
        routing_method=RoutingMethodType.Renormalize, moe_parallel_config=parallel, in_dtype=torch.bfloat16,
        max_num_tokens=64,
    )  # fmt: skip
    # Without the kernel itself, which would have to run on a GPU.
    of_cpu = CPUExpertsFp8 if isinstance(backend, Fp8MoeBackend) else CPUUnquantizedExperts
    kernel = of_cpu if backend.name == "CPU" else None
    module = "vllm.model_executor.layers."
    monkeypatch.setattr(
        f"{module}fused_moe.unquantized_fused_moe_method.select_unquantized_moe_backend",
        lambda **_: (backend, kernel),
    )
    monkeypatch.setattr(f"{module}quantization.fp8.select_fp8_moe_backend", lambda **_: (backend, kernel))
    for where in (f"{module}quantization.fp8", "vllm.distributed"):
        monkeypatch.setattr(f"{where}.get_tensor_model_parallel_world_size", lambda: tp)
    if kernel is None:
        for method in (UnquantizedFusedMoEMethod, Fp8MoEMethod):
            monkeypatch.setattr(method, "_init_moe_kernel", lambda self, layer: setattr(self, "moe_kernel", KERNEL))
    quantised = isinstance(backend, Fp8MoeBackend)
    layer = RoutedExperts(
        NAME, torch.bfloat16, config, Fp8Config(weight_block_size=[128, 128]) if quantised else None, experts
    )
    record_metadata_for_reloading(layer)
    return layer


KERNEL = SimpleNamespace(
    fused_experts=SimpleNamespace(process_weights_after_loading=lambda layer: None, consumes_expert_mask=False)
)


def load(layer: RoutedExperts, values: Weights) -> None:
    """As vLLM does at the start."""
    for own, shard, part in PARTS:
        for suffix in ("", "_scale_inv"):
            stack = values.get(f"model.layers.0.mlp.experts.{part}_proj.weight{suffix}")
            for expert in range(EXPERTS if stack is not None else 0):
                parameter = getattr(layer, own + suffix)
                assert stack is not None
                layer.weight_loader(parameter, stack[expert], own + suffix, shard, expert, return_success=True)
    layer.quant_method.process_weights_after_loading(layer)


def write(memory: WeightMemory, values: Weights) -> None:
    """What trainers do: to all that was added, and nothing else."""
    for held, piece in memory._added:
        box = tuple(slice(start, stop) for start, stop in held.box)
        piece.owner.tensor.copy_(values[held.name][box])


def check(name: str, make: Callable[[], torch.nn.Module], load: Callable[[Any, int], None], values: Any) -> WorkerModel:
    """A layer of this name that make() makes. load: gives it, as vLLM does, the weights of a seed. values: those."""
    live = make()
    load(live, 1)
    before = {own: one.data_ptr() for own, one in live._parameters.items() if one is not None}
    model = live
    for part in reversed(name.split(".")):
        parent = torch.nn.Module()
        parent.add_module(part, model)
        model = parent
    worker = WorkerModel(model, SimpleNamespace(dtype=torch.bfloat16), CONFIG, Ranks())
    with xr.Engine("worker", transport="shm") as engine, WeightMemory(engine, "target", 0) as memory:
        worker.add(memory)
        for seed in (2, 3):
            write(memory, values(seed))
            worker.apply()
            fresh = make()
            load(fresh, seed)
            assert dict(fresh.named_parameters()).keys() == before.keys()
            for own, wanted in fresh.named_parameters():
                given = live.get_parameter(own)
                assert given.shape == wanted.shape and given.stride() == wanted.stride()
                assert torch.equal(given.view(torch.uint8), wanted.view(torch.uint8)), own
        memory.check_in_place()
        assert {own: one.data_ptr() for own, one in live._parameters.items() if one is not None} == before
    return worker


def check_experts(monkeypatch: pytest.MonkeyPatch, backend: Any, *place: Any) -> WorkerModel:
    is_float8 = isinstance(backend, Fp8MoeBackend)
    return check(
        NAME,
        lambda: make_layer(monkeypatch, backend, *place),
        lambda layer, seed: load(layer, weights(seed, is_float8)),
        lambda seed: weights(seed, is_float8),
    )


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda one: f"{type(one).__name__}.{one.name}")
def test_updated_experts_are_those_that_vllm_loads(monkeypatch: pytest.MonkeyPatch, backend: Any, place: str) -> None:
    worker = check_experts(monkeypatch, backend, PLACES[place])
    in_place = isinstance(backend, UnquantizedMoeBackend) and backend.name in MOE_AS_LOADED
    assert (worker.bytes_beside == 0) == in_place


@pytest.mark.parametrize("name", ["CPU", "TRITON"])
def test_experts_that_are_dealt_out_one_by_one(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    check_experts(monkeypatch, UnquantizedMoeBackend[name], (1, 0, 2, 1), "round_robin")


def test_vllm_itself_leaves_the_cpus_packing_out_when_it_loads_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why a kernel is put away for it: once this fails, that is needed no longer."""
    layer = make_layer(monkeypatch, UnquantizedMoeBackend.CPU, PLACES["alone"])
    load(layer, weights(1, False))
    packed = layer.w13_weight.clone()
    load(layer, weights(1, False))
    assert not torch.equal(layer.w13_weight, packed)


HEADS, KV_HEADS, HEAD_DIM = 8, 2, 64
LINEAR: dict[str, tuple[type, Any, list[tuple[Any, str, tuple[int, int]]]]] = {
    "self_attn.qkv_proj": (
        QKVParallelLinear,
        (HIDDEN, HEAD_DIM, HEADS, KV_HEADS),
        [("q", "q", (512, HIDDEN)), ("k", "k", (128, HIDDEN)), ("v", "v", (128, HIDDEN))],
    ),
    "self_attn.o_proj": (RowParallelLinear, (512, HIDDEN), [(None, "o", (HIDDEN, 512))]),
    "mlp.gate_up_proj": (
        MergedColumnParallelLinear, (HIDDEN, [512, 512]), [(0, "gate", (512, HIDDEN)), (1, "up", (512, HIDDEN))],
    ),
    "mlp.down_proj": (RowParallelLinear, (512, HIDDEN), [(None, "down", (HIDDEN, 512))]),
}  # fmt: skip


@pytest.mark.parametrize("rank", [None, 0, 1], ids=["alone", "tp 0", "tp 1"])
@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize("kernel", LINEAR_FLOAT8)
def test_updated_float8_layers_are_those_that_vllm_loads(
    monkeypatch: pytest.MonkeyPatch, kernel: str, name: str, rank: int | None
) -> None:
    if rank is not None and name == "self_attn.qkv_proj":
        sizes: Any = (HIDDEN, HEAD_DIM, HEADS, 2 * KV_HEADS)  # so that a rank's k is a whole block
        parts: Any = [("q", "q", (512, HIDDEN)), ("k", "k", (256, HIDDEN)), ("v", "v", (256, HIDDEN))]
        kind: Any = QKVParallelLinear
    else:
        kind, sizes, parts = LINEAR[name]
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": parts[-1][2][0] // HEAD_DIM, "head_dim": HEAD_DIM}
    monkeypatch.setitem(globals(), "CONFIG", {**CONFIG, **heads, "mlp_only_layers": [0], "intermediate_size": 512})
    ranks = {
        "get_tensor_model_parallel_rank": rank or 0,
        "get_tensor_model_parallel_world_size": 1 + (rank is not None),
    }
    for module in ("distributed", "model_executor.parameter", "model_executor.layers.linear"):
        for call, value in ranks.items():
            monkeypatch.setattr(f"vllm.{module}.{call}", lambda value=value: value)
    monkeypatch.setattr(
        linear_kernels, "choose_scaled_mm_linear_kernel", lambda *_, **__: getattr(linear_kernels, kernel)
    )
    of_layer = f"model.layers.0.{name}"

    def values(seed: int) -> Weights:
        generator = torch.Generator().manual_seed(seed)
        made = {}
        for _, part, shape in parts:
            full = f"{of_layer.rpartition('.')[0]}.{part}_proj.weight"
            made[full] = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
            made[f"{full}_scale_inv"] = torch.rand([n // 128 for n in shape], generator=generator) + 0.5
        return made

    def make_linear() -> torch.nn.Module:
        config = Fp8Config(weight_block_size=[128, 128])
        layer = kind(*sizes, bias=False, params_dtype=torch.bfloat16, quant_config=config, prefix=of_layer)
        record_metadata_for_reloading(layer)
        return layer

    def load_linear(layer: Any, seed: int) -> None:
        for (shard, *_), (full, value) in zip(
            [part for part in parts for _ in range(2)], values(seed).items(), strict=True
        ):
            parameter = layer.get_parameter("weight_scale_inv" if full.endswith("_scale_inv") else "weight")
            parameter.weight_loader(parameter, value, *([] if shard is None else [shard]))
        layer.quant_method.process_weights_after_loading(layer)

    worker = check(of_layer, make_linear, load_linear, values)
    assert worker.bytes_beside

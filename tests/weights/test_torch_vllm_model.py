"""What the vLLM backend makes of a worker's model, with stand-ins for the few names of vLLM that it imports."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import crossrail as xr
from crossrail.weights.inventory.mapping import Ranks
from crossrail.weights.inventory.memory import WeightMemory
from tests.weights import vllm_doubles as doubles

CONFIG = {
    "model_type": "llama", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2,
}  # fmt: skip
EXPERTS = 7
MOE = CONFIG | {"model_type": "qwen3_moe", "num_experts": EXPERTS, "moe_intermediate_size": 4}
BACKEND = "crossrail.integrations.vllm.weights"
LAYER = "model.layers.0"


@pytest.fixture
def layerwise() -> doubles.Layerwise:
    return doubles.Layerwise()


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch, layerwise: doubles.Layerwise) -> Iterator[Any]:
    """crossrail.integrations.vllm.weights."""
    doubles.put(monkeypatch, layerwise)
    yield importlib.import_module(BACKEND)
    for part in ("", "_model", "_reload"):
        del sys.modules[BACKEND + part]


@pytest.fixture
def memory() -> Iterator[WeightMemory]:
    with xr.Engine("worker", transport="shm") as engine, WeightMemory(engine, "target", 0) as made:
        yield made


def make_model() -> Any:
    model = torch.nn.Module()
    model.model = torch.nn.Module()
    model.model.norm = torch.nn.Module()
    model.model.norm.weight = torch.nn.Parameter(torch.zeros(16))
    model.model.embed_tokens = doubles.Embedding()
    model.lm_head = doubles.Embedding()
    model.lm_head.weight = model.model.embed_tokens.weight
    return model


def model_with(name: str, module: torch.nn.Module) -> torch.nn.Module:
    """A model whose only layer has this name, which dots divide."""
    for part in reversed(name.split(".")):
        parent = torch.nn.Module()
        parent.add_module(part, module)
        module = parent
    return module


def worker_model(backend: Any, model: torch.nn.Module, config: dict[str, Any] = CONFIG) -> Any:
    return backend.WorkerModel(model, SimpleNamespace(dtype=torch.float32), config, Ranks())


def move(parent: Any) -> None:
    parent.weight.data = parent.weight.data.clone()


def replace(parent: Any) -> None:
    parent.weight = torch.nn.Parameter(parent.weight.detach().clone())


def delete(parent: Any) -> None:
    del parent.weight


@pytest.mark.parametrize("how", [move, replace, delete])
@pytest.mark.parametrize("name", ["model.norm", "model.embed_tokens", "lm_head"])
def test_parameter_that_lies_elsewhere_than_when_it_was_added_is_refused(
    backend: Any, memory: WeightMemory, name: str, how: Any
) -> None:
    model = make_model()
    worker_model(backend, model).add(memory)
    memory.inventory()
    memory.check_in_place()
    with torch.no_grad():
        model.model.norm.weight.add_(1)
    memory.check_in_place()
    how(model.get_submodule(name))
    tied = name == "lm_head" and how is move  # the same parameter
    named = "model.embed_tokens" if tied else name
    with pytest.raises(xr.UsageError, match=rf"^{named}\.weight: its tensor lies elsewhere"):
        memory.check_in_place()


def experts(places: list[int], backend: doubles.Backend, of: int = EXPERTS) -> doubles.Experts:
    count = len(places)
    method = doubles.MoeMethod(unquantized_backend=backend, moe_kernel="made at the first load")
    return doubles.Experts(torch.zeros(count, 8, 16), torch.zeros(count, 16, 4), places, of, method)


def expected(tensor: torch.Tensor, places: list[int], parts: list[str]) -> dict[tuple[str, int], int]:
    """Where each expert's part must lie, by the part's name and the expert's number in the model."""
    rows = tensor.shape[1] // len(parts)
    return {
        (f"{LAYER}.mlp.experts.{part}_proj.weight", expert): tensor[place, rows * i].data_ptr()
        for place, expert in enumerate(places)
        for i, part in enumerate(parts)
    }


def placed(memory: WeightMemory) -> dict[tuple[str, int], int]:
    found = {}
    for held in memory.inventory().holdings:
        first, stop = held.box[0]
        begin = memory.regions[held.region].base + held.offset
        assert held.strides is not None and held.shape[0] == EXPERTS
        found |= {(held.name, expert): begin + (expert - first) * held.strides[0] for expert in range(first, stop)}
    return found


@pytest.mark.parametrize("infix", ["", ".routed_experts"])
@pytest.mark.parametrize("places", [[*range(EXPERTS)], [0, 1, 2, 3], [4, 5, 6], [1, 3, 5], [5, 6, 0]], ids=str)
def test_experts_are_where_vllms_expert_map_says(
    backend: Any, memory: WeightMemory, places: list[int], infix: str
) -> None:
    layer = experts(places, doubles.Backend.TRITON)
    worker = worker_model(backend, model_with(f"{LAYER}.mlp.experts{infix}", layer), MOE)
    worker.add(memory)
    w13 = expected(layer.w13_weight, places, ["gate", "up"])
    assert placed(memory) == w13 | expected(layer.w2_weight, places, ["down"])
    assert worker.bytes_beside == 0
    worker.apply()
    assert layer.quant_method.processed == []


def test_experts_of_more_ranks_of_tensor_parallelism_than_the_rest(backend: Any, memory: WeightMemory) -> None:
    """Without expert parallelism vLLM divides them by data parallelism too."""
    layer = experts([*range(EXPERTS)], doubles.Backend.TRITON)
    layer.moe_config.moe_parallel_config = SimpleNamespace(tp_rank=3, tp_size=4)
    worker = worker_model(backend, model_with(f"{LAYER}.mlp.experts", layer), MOE | {"moe_intermediate_size": 16})
    worker.add(memory)
    boxes = {held.name.split(".")[-2]: held.box[1:] for held in memory.inventory().holdings}
    assert boxes == {
        "gate_proj": ((12, 16), (0, 16)), "up_proj": ((12, 16), (0, 16)), "down_proj": ((0, 16), (12, 16)),
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["CPU", "FLASHINFER_CUTLASS"])
def test_experts_that_vllm_lays_out_anew_are_loaded_again(
    backend: Any, memory: WeightMemory, layerwise: doubles.Layerwise, kind: str
) -> None:
    layer = experts([4, 5, 6], doubles.Backend[kind])
    layerwise.record(layer, w13_weight=layer.w13_weight, w2_weight=layer.w2_weight)
    live = layer.w13_weight, layer.w2_weight
    worker = worker_model(backend, model_with(f"{LAYER}.mlp.experts", layer), MOE)
    worker.add(memory)
    tensors = worker._beside[0][2]
    w13 = expected(tensors["w13_weight"], [4, 5, 6], ["gate", "up"])
    assert placed(memory) == w13 | expected(tensors["w2_weight"], [4, 5, 6], ["down"])
    assert worker.bytes_beside == sum(one.nbytes for one in live)
    for i, tensor in enumerate(tensors.values()):
        tensor.fill_(i + 1)
    worker.apply()
    assert [(one, name, float(values.mean())) for one, name, values in layerwise.reloaded] == [
        (layer, "w13_weight", 1.0), (layer, "w2_weight", 2.0),
    ]  # fmt: skip
    # The CPU's kernel packs weights when it is made, and only then.
    assert layer.quant_method.moe_kernel is (None if kind == "CPU" else "made at the first load")


def test_layer_that_vllm_cannot_load_again_keeps_its_parameters(
    backend: Any, memory: WeightMemory, layerwise: doubles.Layerwise
) -> None:
    layer = experts([4, 5, 6], doubles.Backend.CPU)
    layerwise.record(layer, w13_weight=layer.w13_weight, w2_weight=layer.w2_weight)
    live, kernel = (layer.w13_weight, layer.w2_weight), layer.quant_method.moe_kernel
    worker = worker_model(backend, model_with(f"{LAYER}.mlp.experts", layer), MOE)
    worker.add(memory)
    layerwise.error = ValueError("no such kernel")
    with pytest.raises(RuntimeError, match=rf"^{LAYER}\.mlp\.experts: vLLM could not .*ValueError: no such kernel"):
        worker.apply()
    layerwise.error = None  # with its traceback, which keeps all this alive
    assert all(one is two for one, two in zip(live, (layer.w13_weight, layer.w2_weight), strict=True))
    assert layer.quant_method.moe_kernel is kernel


def linear(rows: int = 16, method: doubles.Method | None = None, **parameters: torch.Tensor) -> Any:
    layer = torch.nn.Module()
    for name, tensor in ({"weight": torch.zeros(rows, 16)} | parameters).items():
        layer.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
    vars(layer)["quant_method"] = method or doubles.LinearMethod()
    return layer


def test_linear_layer_that_vllm_has_packed_is_loaded_again(
    backend: Any, memory: WeightMemory, layerwise: doubles.Layerwise
) -> None:
    layer = linear(weight=torch.zeros(0), bias=torch.zeros(48))
    layerwise.record(layer, weight=torch.zeros(48, 16))
    worker = worker_model(backend, model_with(f"{LAYER}.self_attn.qkv_proj", layer), CONFIG | {"model_type": "qwen2"})
    worker.add(memory)
    worker._beside[0][2]["weight"].fill_(3)
    at = {held.name: memory.regions[held.region].base + held.offset for held in memory.inventory().holdings}
    assert at[f"{LAYER}.self_attn.k_proj.bias"] == layer.bias[16:].data_ptr()
    assert len(at) == 6
    worker.apply()
    ((one, name, values),) = layerwise.reloaded
    assert one is layer and name == "weight" and bool((values == 3).all())


def test_what_vllm_makes_of_weights_is_made_again(
    backend: Any, memory: WeightMemory, layerwise: doubles.Layerwise
) -> None:
    """A copy of a head, in what computes it on CPU; and what latent attention makes of kv_b_proj."""
    model = make_model()
    packed = object()
    for module in (model.lm_head, model.model.embed_tokens):
        vars(module)["quant_method"] = doubles.EmbeddingMethod()
    vars(model.lm_head)["cpu_linear"] = lambda: packed
    vars(model.model.embed_tokens)["cpu_linear"] = lambda: None  # computes with the weight itself
    model.attention = doubles.Attention()
    worker = worker_model(backend, model)
    worker.add(memory)
    assert {held.name for held in memory.inventory().holdings} == {"model.embed_tokens.weight", "model.norm.weight"}
    worker.apply()
    assert model.lm_head.quant_method.processed == [model.lm_head]
    assert model.model.embed_tokens.quant_method.processed == []
    assert model.attention.processed == [torch.float32]
    assert layerwise.reloaded == []


def float8(method: doubles.Method, **more: torch.Tensor) -> Any:
    return linear(
        method=method, weight=torch.zeros(256, 128).to(torch.float8_e4m3fn), weight_scale_inv=torch.zeros(2, 1), **more
    )


def test_float8_is_written_beside_with_its_scales(
    backend: Any, memory: WeightMemory, layerwise: doubles.Layerwise
) -> None:
    layer = float8(
        doubles.Float8Method(block_quant=True, fp8_linear=doubles.TritonFp8BlockScaledMMKernel()),
        workspace=torch.zeros(3),
    )  # of a kernel's own
    layerwise.record(layer, weight=layer.weight, weight_scale_inv=layer.weight_scale_inv)
    sizes = {"hidden_size": 128, "intermediate_size": 128, "quantization_config": {"weight_block_size": [128, 128]}}
    worker = worker_model(backend, model_with(f"{LAYER}.mlp.gate_up_proj", layer), CONFIG | sizes)
    worker.add(memory)
    told = {held.name: (held.dtype, held.shape, held.scale_of, held.block) for held in memory.inventory().holdings}
    for part in ("gate", "up"):
        name = f"{LAYER}.mlp.{part}_proj.weight"
        assert told.pop(name) == ("float8_e4m3fn", (128, 128), None, ())
        assert told.pop(f"{name}_scale_inv") == ("float32", (1, 1), name, (128, 128))
    assert not told
    worker.apply()
    assert [name for _, name, _ in layerwise.reloaded] == ["weight", "weight_scale_inv"]


def packed_for_amx() -> Any:
    layer = linear(weight=torch.zeros(0))
    vars(layer)["_cpu_skip_gemm_dispatch"] = True
    return layer


def other_type() -> Any:
    layer = linear(bias=torch.zeros(16))
    vars(layer)["params_dtype"] = torch.bfloat16
    return layer


def padded_experts() -> Any:
    layer = experts([*range(EXPERTS)], doubles.Backend.CPU)
    layer.moe_config.intermediate_size_per_partition = 64
    return layer


def with_copies_of_experts() -> Any:
    layer = experts([*range(EXPERTS)], doubles.Backend.TRITON)
    layer.moe_config.num_experts = EXPERTS + 1
    return layer


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "quantised": (lambda: linear(method=doubles.OtherMethod()), "is computed by OtherMethod: .*weight_block_size"),
    "a scale for all": (lambda: float8(doubles.Float8Method(block_quant=False)), "is fp8 with a scale for all"),
    "divided blocks": (
        lambda: float8(
            doubles.Float8MoeMethod(
                block_quant=True, weight_scale_refine=(2, 2), weight_block_size=[128, 128],
                fp8_backend=doubles.Backend.TRITON,
            )
        ),
        r"\[128, 128\] elements share a scale, and tensor parallelism divides them. Next: ",
    ),
    "no record": (lambda: linear(weight=torch.zeros(0)), "vLLM has not recorded how it loaded"),
    "amx": (packed_for_amx, "packed it for AMX, .* Next: start vLLM with --attention-backend CPU_MLA"),
    "bias of another type": (other_type, r"\.bias: vLLM has made torch.float32 of it"),
    "experts for an untried kernel": (
        lambda: experts([0], doubles.Backend.MOONEP),
        "for MOONEP has not been tried, only for TRITON, .*Next: .*--moe-backend triton",
    ),
    "float8 experts for an untried kernel": (
        lambda: float8(doubles.Float8MoeMethod(block_quant=True, fp8_backend=doubles.Backend.AITER)),
        "for AITER has not been tried, only for CPU, .*Next: .*--moe-backend triton",
    ),
    "float8 for an untried kernel": (
        lambda: float8(doubles.Float8Method(block_quant=True, fp8_linear=doubles.Kernel())),
        "for Kernel has not been tried, only for CPUFp8.*Next: .*--linear-backend triton",
    ),
    "padded experts": (padded_experts, "vLLM has experts of 16 x 64 for this model's 16 x 4.*Next: .*--moe-backend"),
    "copies of experts": (with_copies_of_experts, "copies of experts.*Next: start it without --enable-eplb"),
}  # fmt: skip


@pytest.mark.parametrize("why", REFUSED)
def test_layer_that_cannot_be_updated_is_refused_by_name(
    backend: Any, memory: WeightMemory, layerwise: doubles.Layerwise, why: str
) -> None:
    make, said = REFUSED[why]
    name = f"{LAYER}.mlp.experts" if "experts" in why else f"{LAYER}.self_attn.o_proj"
    layer = make()
    if why != "no record":
        layerwise.record(layer, **{own: one for own, one in layer.named_parameters() if own != "bias"})
    with pytest.raises(xr.UsageError, match=f"^'?{name}.*{said}"):
        worker_model(backend, model_with(name, layer), MOE | {"attention_bias": True}).add(memory)


@pytest.mark.parametrize(
    ("loaded", "said"),
    [
        (
            {"weight": torch.zeros(16, 16).t()},
            r"o_proj\.weight: vLLM has float32 \(16, 16\) with strides \(16, 1\) where",
        ),
        ({"weight": torch.zeros(16, 16, dtype=torch.float16)}, r"o_proj\.weight: vLLM has float32 .* loaded float16"),
        ({"weight": torch.zeros(16, 16), "extra": torch.zeros(1)}, r"o_proj\.extra: vLLM has removed it"),
    ],
)
def test_parameter_that_is_not_as_it_was_loaded_is_refused(
    backend: Any, memory: WeightMemory, layerwise: doubles.Layerwise, loaded: dict[str, torch.Tensor], said: str
) -> None:
    layer = linear()
    layerwise.record(layer)
    layerwise.loaded[layer] = {name: one.to("meta") for name, one in loaded.items()}
    with pytest.raises(xr.UsageError, match=said):
        worker_model(backend, model_with(f"{LAYER}.self_attn.o_proj", layer)).add(memory)


def test_parameter_that_vllms_model_lacks_is_named(backend: Any, memory: WeightMemory) -> None:
    model = make_model()
    worker = worker_model(backend, model, CONFIG | {"tie_word_embeddings": True, "num_hidden_layers": 1})
    with pytest.raises(
        xr.UsageError, match=rf"^{LAYER}\.input_layernorm\.weight: the model has this parameter, and its"
    ):
        worker.fill(memory)


def engine_config(**model: Any) -> Any:
    parallel = SimpleNamespace(pipeline_parallel_size=1, enable_expert_parallel=True, enable_eplb=False)
    model_config = SimpleNamespace(**model)
    return SimpleNamespace(parallel_config=parallel, quant_config=None, model_config=model_config, lora_config=None)


def test_model_whose_memory_vllm_lets_go_is_refused(backend: Any) -> None:
    config = engine_config(enable_sleep_mode=True)
    with pytest.raises(xr.UsageError, match="enable_sleep_mode: weight transfer by crossrail needs parameters that"):
        backend.CrossrailWeightTransferEngine(None, config, None, make_model())
    config.model_config.enable_sleep_mode = False
    backend.CrossrailWeightTransferEngine(None, config, None, make_model())


@pytest.mark.parametrize(("field", "value"), [("pipeline_parallel_size", 2), ("enable_eplb", True)])
def test_ways_to_divide_a_model_that_are_not_known_are_refused(backend: Any, field: str, value: Any) -> None:
    config = engine_config()
    setattr(config.parallel_config, field, value)
    with pytest.raises(xr.UsageError, match="weight transfer by crossrail"):
        backend.CrossrailWeightTransferEngine(None, config, None, make_model())


def test_layers_that_vllm_wraps_for_adapters_are_refused(backend: Any) -> None:
    config = engine_config()
    config.lora_config = SimpleNamespace(max_lora_rank=8)
    with pytest.raises(xr.UsageError, match=r"enable_lora: .* without --enable-lora, and merge adapters"):
        backend.CrossrailWeightTransferEngine(None, config, None, make_model())


@pytest.mark.parametrize("address", ["zz", 7])
def test_controller_that_is_no_address_is_named(backend: Any, address: Any) -> None:
    engine = backend.CrossrailWeightTransferEngine(None, engine_config(), None, make_model())
    with pytest.raises(xr.UsageError, match=f"^controller is {address!r}, must be an address: "):
        engine.init_transfer_engine(backend.CrossrailInitInfo(controller=address))


class StuckWorker:
    """Of which a writer stands still in the memory when it is closed for the first time."""

    closed = 0
    is_torn = False

    def close(self) -> None:
        self.closed += 1
        if self.closed == 1:
            raise xr.WaitTimeout("a write stands still")


def test_shutdown_that_failed_can_be_called_again(backend: Any) -> None:
    engine = backend.CrossrailWeightTransferEngine(None, engine_config(), None, make_model())
    engine._worker = worker = StuckWorker()
    with pytest.raises(xr.WaitTimeout):
        engine.shutdown()
    for _ in range(2):
        engine.shutdown()
        assert worker.closed == 2

"""What the vLLM backend makes of a worker's model, with stand-ins for the few names of vLLM that it imports."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import crossrail as xr
from crossrail.weights.inventory.mapping import Ranks
from crossrail.weights.inventory.memory import WeightMemory

CONFIG = {
    "model_type": "llama", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2,
}  # fmt: skip


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """crossrail.integrations.vllm.weights."""

    class Engine:
        def __class_getitem__(cls, _: object) -> type[Engine]:
            return cls

        def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
            self.vllm_config, self.model_config = vllm_config, vllm_config.model_config

    base = {"WeightTransferEngine": Engine, "WeightTransferInitInfo": object, "WeightTransferUpdateInfo": object}
    for name, content in {
        "vllm": {},
        "vllm.distributed": {},
        "vllm.distributed.parallel_state": {"get_tensor_model_parallel_rank": lambda: 0},
        "vllm.distributed.weight_transfer": {},
        "vllm.distributed.weight_transfer.base": base,
        "vllm.model_executor": {},
        "vllm.model_executor.layers": {},
        "vllm.model_executor.layers.vocab_parallel_embedding": {"VocabParallelEmbedding": Embedding},
    }.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    yield importlib.import_module("crossrail.integrations.vllm.weights")
    del sys.modules["crossrail.integrations.vllm.weights"]


class Embedding(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(48, 16))  # padded
        self.org_vocab_size = 32
        self.shard_indices = SimpleNamespace(org_vocab_start_index=0, org_vocab_end_index=32)


def make_model() -> Any:
    model = torch.nn.Module()
    model.model = torch.nn.Module()
    model.model.norm = torch.nn.Module()
    model.model.norm.weight = torch.nn.Parameter(torch.zeros(16))
    model.model.embed_tokens = Embedding()
    model.lm_head = Embedding()
    model.lm_head.weight = model.model.embed_tokens.weight
    return model


def move(parent: Any) -> None:
    parent.weight.data = parent.weight.data.clone()


def replace(parent: Any) -> None:
    parent.weight = torch.nn.Parameter(parent.weight.detach().clone())


def delete(parent: Any) -> None:
    del parent.weight


@pytest.mark.parametrize("how", [move, replace, delete])
@pytest.mark.parametrize("name", ["model.norm", "model.embed_tokens", "lm_head"])
def test_parameter_that_lies_elsewhere_than_when_it_was_added_is_refused(backend: Any, name: str, how: Any) -> None:
    model = make_model()
    with xr.Engine("worker", transport="shm") as engine, WeightMemory(engine, "target", 0) as memory:
        backend.add_model(memory, model, CONFIG, Ranks())
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


def test_model_whose_memory_vllm_lets_go_is_refused(backend: Any) -> None:
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(pipeline_parallel_size=1, enable_expert_parallel=False),
        quant_config=None,
        model_config=SimpleNamespace(enable_sleep_mode=True),
    )
    with pytest.raises(xr.UsageError, match="enable_sleep_mode: weight transfer by crossrail needs parameters that"):
        backend.CrossrailWeightTransferEngine(None, config, None, make_model())
    config.model_config.enable_sleep_mode = False
    backend.CrossrailWeightTransferEngine(None, config, None, make_model())


class StuckWorker:
    """Of which a writer stands still in the memory when it is closed for the first time."""

    closed = 0
    is_torn = False

    def close(self) -> None:
        self.closed += 1
        if self.closed == 1:
            raise xr.WaitTimeout("a write stands still")


def test_shutdown_that_failed_can_be_called_again(backend: Any) -> None:
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(pipeline_parallel_size=1, enable_expert_parallel=False),
        quant_config=None,
        model_config=SimpleNamespace(),
    )
    engine = backend.CrossrailWeightTransferEngine(None, config, None, make_model())
    engine._worker = worker = StuckWorker()
    with pytest.raises(xr.WaitTimeout):
        engine.shutdown()
    for _ in range(2):
        engine.shutdown()
        assert worker.closed == 2

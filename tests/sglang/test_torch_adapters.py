"""What a LoRA adapter is known by: its weights as SGLang holds them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from crossrail.integrations.sglang.prompts import _digest_of


def adapter(seed: int, dtype: torch.dtype = torch.bfloat16, scaling: float = 2.0, layers: int = 100) -> Any:
    """SGLang's LoRAAdapter."""
    drawn = torch.Generator().manual_seed(seed)
    weights = []
    for i in range(layers):
        a, b = torch.randn(8, 300, generator=drawn).to(dtype), torch.randn(300, 8, generator=drawn).to(dtype)
        weights.append(SimpleNamespace(weights={f"{i}.q_proj.lora_A": a, f"{i}.q_proj.lora_B": b}))
    embedding = {"embed_tokens.lora_A": torch.randn(8, 40, generator=drawn).to(dtype)}
    return SimpleNamespace(scaling=scaling, layers=weights, embedding_layers=embedding, added_tokens_embeddings={})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_equal_weights_have_equal_digests(dtype: torch.dtype) -> None:
    assert _digest_of(adapter(1, dtype)) == _digest_of(adapter(1, dtype)) != _digest_of(adapter(2, dtype))


def test_scale_and_layers_count_too() -> None:
    assert len({_digest_of(one) for one in (adapter(1), adapter(1, scaling=1.0), adapter(1, layers=99))}) == 3


def test_an_adapter_without_weights_has_a_digest() -> None:
    empty = SimpleNamespace(scaling=1.0, layers=[], embedding_layers={}, added_tokens_embeddings={})
    assert len(_digest_of(empty)) == 16

"""A model for true inference engines in tests, and prompts for it."""

from pathlib import Path
from typing import Any

VOCABULARY = 256
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "initializer_range": 0.3,
}


def make_model(folder: Path, seed: int = 1) -> Path:
    """A Llama with random weights, large enough that every token depends on all before it. Downloads nothing."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    LlamaForCausalLM(LlamaConfig(**_SHAPE)).save_pretrained(folder)
    return folder


def make_window_model(folder: Path, window: int) -> Path:
    """The same as a Mistral, of which every layer looks back no further than `window` tokens."""
    import torch
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(1)
    MistralForCausalLM(MistralConfig(**_SHAPE, sliding_window=window)).save_pretrained(folder)
    return folder


def prompt(seed: int, length: int) -> list[int]:
    """No two seeds share a first block or page."""
    return [(seed * 101 + i * (37 + 2 * seed) + i * i // 7) % VOCABULARY for i in range(length)]

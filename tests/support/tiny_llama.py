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
    """Like make_model(), but a Mistral in which no layer looks back further than `window` tokens."""
    import torch
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(1)
    MistralForCausalLM(MistralConfig(**_SHAPE, sliding_window=window)).save_pretrained(folder)
    return folder


def make_mla_model(folder: Path) -> Path:
    """The same model as a DeepSeek-V2, which keeps a latent vector of 576 numbers per token: the only size that CPUs
    support.
    """
    import torch
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    torch.manual_seed(1)
    latent = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32, "q_lora_rank": 32}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 64}
    dense = {"first_k_dense_replace": _SHAPE["num_hidden_layers"]}
    shape = {key: value for key, value in _SHAPE.items() if key != "head_dim"} | {"num_key_value_heads": 4}
    DeepseekV2ForCausalLM(DeepseekV2Config(**shape, **latent, **experts, **dense)).save_pretrained(folder)
    return folder


def make_shared_cache_model(folder: Path) -> Path:
    """The same model as a Gemma 3n: the last two of six layers read the KV of earlier layers; half use a sliding
    window.
    """
    import torch
    from transformers import Gemma3nForCausalLM, Gemma3nTextConfig

    torch.manual_seed(1)
    own = {"num_hidden_layers": 6, "intermediate_size": [256] * 6, "initializer_range": 0.05}
    per_layer = {"laurel_rank": 8, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCABULARY}
    attention = {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 3}
    config = Gemma3nTextConfig(
        **_SHAPE | own, **per_layer, **attention, sliding_window=64, activation_sparsity_pattern=[0.0] * 6
    )
    Gemma3nForCausalLM(config).save_pretrained(folder)
    return folder


def prompt(seed: int, length: int) -> list[int]:
    """No two seeds share a first block or page."""
    return [(seed * 101 + i * (37 + 2 * seed) + i * i // 7) % VOCABULARY for i in range(length)]

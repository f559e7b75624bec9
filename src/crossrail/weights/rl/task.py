"""The model's sizes, and the task: even tokens are rewarded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

# As in a config.json. Six experts are uneven over four shards: one shard has none. Rows and columns are multiples of
# 128, so that fused tensors of one rank have whole fp8 blocks.
CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

PROMPT_TOKENS = 3
NEW_TOKENS = 8


class Rollout(Struct):
    """One completion. logprobs: its tokens' log probabilities when they were sampled. reward: 0 to 1."""

    prompt: list[int]
    completion: list[int]
    logprobs: list[float]
    reward: float


def reward(completion: Sequence[int]) -> float:
    """The part of its tokens that are even. 0.5 by chance."""
    return sum(token % 2 == 0 for token in completion) / len(completion)

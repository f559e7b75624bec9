"""The demo's model: a small Qwen3-MoE of transformers, with random weights drawn from a seed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

_VOCABULARY = 512


@dataclass(frozen=True)
class ModelSpec:
    """dtype: of weights and computing, "float32" or "bfloat16". batch, tokens: what each rank is given at once."""

    dtype: str = "float32"
    seed: int = 1
    experts: int = 14  # uneven over four ranks: the last has two, the others four
    top_k: int = 4
    hidden: int = 128
    layers: int = 2
    batch: int = 2
    tokens: int = 48

    @property
    def max_tokens(self) -> int:
        """Most tokens of a rank in one layer."""
        return self.batch * self.tokens

    def model(self) -> Any:
        """The whole of it. Sets torch's seed."""
        torch.manual_seed(self.seed)
        config = Qwen3MoeConfig(
            vocab_size=_VOCABULARY,
            hidden_size=self.hidden,
            intermediate_size=2 * self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            num_experts=self.experts,
            num_experts_per_tok=self.top_k,
            moe_intermediate_size=self.hidden,
            norm_topk_prob=True,
            max_position_embeddings=4 * self.tokens,
            initializer_range=0.1,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
        return Qwen3MoeForCausalLM(config).to(getattr(torch, self.dtype)).eval()

    def token_ids(self, rank: int) -> torch.Tensor:
        """A rank's token ids: [batch, tokens]."""
        return torch.randint(_VOCABULARY, (self.batch, self.tokens), generator=self._generator(rank))

    def hidden_states(self, rank: int) -> torch.Tensor:
        """Inputs of one MoE block: [batch, tokens, hidden]."""
        states = torch.randn((self.batch, self.tokens, self.hidden), generator=self._generator(rank))
        return states.to(getattr(torch, self.dtype))

    def _generator(self, rank: int) -> torch.Generator:
        return torch.Generator().manual_seed(1000 * self.seed + rank)

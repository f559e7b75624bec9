"""Small models of well-known architectures, with random weights from a seed. Tokens are bytes, plus an end token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from crossrail._extras import needs
from crossrail.errors import UsageError
from crossrail.kv.models.checkpoint import torch_dtype
from crossrail.kv.models.hosted import HostedModel, HostOptions

with needs(__name__, "'crossrail[transformers]'"):
    import torch
    from transformers import AutoModelForCausalLM, DeepseekV3Config, LlamaConfig, PreTrainedConfig, Qwen3Config

_VOCABULARY = 257
_HEAD_DIM = 32


@dataclass(frozen=True)
class ExampleOptions(HostOptions):
    """seed: 0 to 2**64 - 1. hidden: 64 or a multiple. There are half as many K/V heads as heads; MLA has none."""

    seed: int = 1
    layers: int = 4
    hidden: int = 256


def open_example(name: str, options: ExampleOptions) -> HostedModel:
    """Opens one of EXAMPLES. Equal seed, layers, hidden, dtype and version of torch give equal weights."""
    if options.hidden < 64 or options.hidden % 64 or options.layers < 1:
        raise UsageError(f"hidden={options.hidden} must be a multiple of 64, and layers={options.layers} at least 1")
    if not 0 <= options.seed < 1 << 64:
        raise UsageError(f"seed={options.seed} must be in 0..2**64-1")
    config = EXAMPLES[name](options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model = model.to(torch_dtype(options.dtype or "float32"))
    own = {field: value for field, value in asdict(options).items() if field in HostOptions.__dataclass_fields__}
    return HostedModel(model, name, frozenset({_VOCABULARY - 1}), HostOptions(**own))


def _common(options: ExampleOptions) -> dict[str, Any]:
    return {
        "vocab_size": _VOCABULARY,
        "hidden_size": options.hidden,
        "intermediate_size": 3 * options.hidden,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.hidden // _HEAD_DIM,
        "max_position_embeddings": 1 << 15,
        # Much larger than for training: a layer's contribution, attention included, must decide which tokens come out.
        "initializer_range": 0.1,
        "bos_token_id": None,
        "eos_token_id": _VOCABULARY - 1,
        "pad_token_id": None,
    }


def _qwen3(options: ExampleOptions) -> PreTrainedConfig:
    heads = options.hidden // _HEAD_DIM
    return Qwen3Config(**_common(options), num_key_value_heads=heads // 2, head_dim=_HEAD_DIM)


def _llama(options: ExampleOptions) -> PreTrainedConfig:
    heads = options.hidden // _HEAD_DIM
    return LlamaConfig(**_common(options), num_key_value_heads=heads // 2, head_dim=_HEAD_DIM)


def _deepseek(options: ExampleOptions) -> PreTrainedConfig:
    """Like DeepSeek-V3: latent attention; from the second layer on a shared expert, and 2 of 8 others in 2 groups."""
    return DeepseekV3Config(
        **_common(options),
        num_key_value_heads=options.hidden // _HEAD_DIM,
        q_lora_rank=options.hidden // 2,
        kv_lora_rank=64,
        qk_rope_head_dim=16,
        qk_nope_head_dim=_HEAD_DIM,
        v_head_dim=_HEAD_DIM,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_shared_experts=1,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        moe_intermediate_size=options.hidden,
    )


EXAMPLES: dict[str, Callable[[ExampleOptions], PreTrainedConfig]] = {
    "qwen3": _qwen3,
    "llama": _llama,
    "deepseek": _deepseek,
}

"""Rules for the names of vLLM and transformers, and shapes from a model's configuration: Llama, Qwen3, DeepSeek-V3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from crossrail.errors import UsageError
from crossrail.weights.mapping import Names, Part, Rule
from crossrail.weights.models import ModelShape

_LAYER = "model.layers.{layer}"
_ATTENTION = f"{_LAYER}.self_attn"
_EXPERTS = f"{_LAYER}.mlp.experts"


def _mlp(of: str) -> tuple[Rule, ...]:
    return (
        Rule(f"{of}.gate_up_proj.{{kind}}", (Part(f"{of}.gate_proj.{{kind}}", 0), Part(f"{of}.up_proj.{{kind}}", 0))),
        *(Rule(f"{of}.{name}.{{kind}}", (Part(f"{of}.{name}.{{kind}}", 0),)) for name in ("gate_proj", "up_proj")),
        Rule(f"{of}.down_proj.{{kind}}", (Part(f"{of}.down_proj.{{kind}}", 1),)),
    )


_VOCABULARY = tuple(Rule(name, (Part(name, 0),)) for name in ("model.embed_tokens.weight", "lm_head.weight"))
_ROWS = Rule(f"{_ATTENTION}.o_proj.{{kind}}", (Part(f"{_ATTENTION}.o_proj.{{kind}}", 1, "heads"),))
_Q, _K, _V = (
    Part(f"{_ATTENTION}.{name}_proj.{{kind}}", 0, units)
    for name, units in (("q", "heads"), ("k", "kv_heads"), ("v", "kv_heads"))
)

# Grouped-query attention and a dense block: Llama, Qwen2, Qwen3, Mistral.
LLAMA: tuple[Rule, ...] = (
    *_VOCABULARY,
    Rule(f"{_ATTENTION}.qkv_proj.{{kind}}", (_Q, _K, _V)),
    *(Rule(part.name, (part,)) for part in (_Q, _K, _V)),
    _ROWS,
    *_mlp(f"{_LAYER}.mlp"),
)

_GATE, _UP = Part(f"{_EXPERTS}.gate_proj.weight", 0), Part(f"{_EXPERTS}.up_proj.weight", 0)
_DOWN = Part(f"{_EXPERTS}.down_proj.weight", 1)
# Experts as vLLM stacks them (0.32 with an infix), as transformers 5 does in memory, and one by one as in checkpoints.
EXPERTS: tuple[Rule, ...] = (
    *(Rule(f"{of}.w13_weight", (_GATE, _UP), experts=True) for of in (_EXPERTS, f"{_EXPERTS}.routed_experts")),
    *(Rule(f"{of}.w2_weight", (_DOWN,), experts=True) for of in (_EXPERTS, f"{_EXPERTS}.routed_experts")),
    Rule(f"{_EXPERTS}.gate_up_proj", (_GATE, _UP), experts=True),
    Rule(f"{_EXPERTS}.down_proj", (_DOWN,), experts=True),
    *(
        Rule(f"{_EXPERTS}.{{expert}}.{name}_proj.weight", (part,))
        for name, part in (("gate", _GATE), ("up", _UP), ("down", _DOWN))
    ),
)
QWEN3_MOE: tuple[Rule, ...] = (*EXPERTS, *LLAMA)

# Latent attention, experts and shared experts: DeepSeek-V3 and R1, Kimi-K2.
DEEPSEEK_V3: tuple[Rule, ...] = (
    *_VOCABULARY,
    Rule(
        f"{_ATTENTION}.fused_qkv_a_proj.{{kind}}",
        (Part(f"{_ATTENTION}.q_a_proj.{{kind}}"), Part(f"{_ATTENTION}.kv_a_proj_with_mqa.{{kind}}")),
    ),
    *(
        Rule(f"{_ATTENTION}.{name}.{{kind}}", (Part(f"{_ATTENTION}.{name}.{{kind}}", 0, "heads"),))
        for name in ("q_b_proj", "kv_b_proj")
    ),
    _ROWS,
    *EXPERTS,
    *_mlp(f"{_LAYER}.mlp.shared_experts"),
    *_mlp(f"{_LAYER}.mlp"),
)

_RULES: Mapping[str, tuple[Rule, ...]] = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen3": LLAMA,
    "qwen3_moe": QWEN3_MOE,
    "deepseek_v3": DEEPSEEK_V3,
    "kimi_k2": DEEPSEEK_V3,
}


def names_of(config: Mapping[str, Any]) -> Names:
    """For a model's config.json as a mapping. Raises UsageError for a model_type without rules, or fields that lack."""
    kind = str(config.get("model_type"))
    if kind not in _RULES:
        raise UsageError(
            f"model_type {kind!r} has no rules here, there are {', '.join(_RULES)}; Names() takes your own"
        )
    try:
        shape = _shape(config, latent=kind in ("deepseek_v3", "kimi_k2"), normed=kind.startswith("qwen3"))
    except KeyError as error:
        raise UsageError(f"the configuration of a {kind} model has no {error.args[0]!r}") from None
    shapes = {tensor.name: tensor.shape for tensor in shape.tensors()}
    if config.get("tie_word_embeddings", False):
        del shapes["lm_head.weight"]
    rows, columns = config.get("quantization_config", {}).get("weight_block_size", (128, 128))
    units = {"heads": shape.heads, "kv_heads": shape.kv_heads or shape.heads}
    return Names(_RULES[kind], shapes, units, (rows, columns))


def _shape(config: Mapping[str, Any], *, latent: bool, normed: bool) -> ModelShape:
    heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
    common: dict[str, Any] = {
        "hidden": config["hidden_size"],
        "layers": layers,
        "heads": heads,
        "vocab": config["vocab_size"],
        "dense_layers": layers,
        "dense_rows": config["intermediate_size"],
    }
    if latent:
        experts = config["n_routed_experts"]
        return ModelShape(
            **common | {"dense_layers": config["first_k_dense_replace"]},
            experts=experts,
            expert_rows=config["moe_intermediate_size"],
            shared_rows=config["moe_intermediate_size"] * config["n_shared_experts"],
            q_lora=config["q_lora_rank"],
            kv_lora=config["kv_lora_rank"],
            rope=config["qk_rope_head_dim"],
            nope=config["qk_nope_head_dim"],
            value=config["v_head_dim"],
        )
    experts = config.get("num_experts", 0)
    if experts:
        common["dense_layers"] = 0
    return ModelShape(
        **common,
        experts=experts,
        expert_rows=config["moe_intermediate_size"] if experts else 0,
        kv_heads=config.get("num_key_value_heads", heads),
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        normed=normed,
    )

"""Rules for tensor names of vLLM and transformers, and shapes from model configurations: Llama, Qwen, DeepSeek-V3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from crossrail.errors import UsageError
from crossrail.weights.inventory.mapping import Names, Part, Rule
from crossrail.weights.inventory.models import ModelShape

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
        for name in ("q_proj", "q_b_proj", "kv_b_proj")  # the first instead of the second without q_lora_rank
    ),
    _ROWS,
    *EXPERTS,
    *_mlp(f"{_LAYER}.mlp.shared_experts"),
    *_mlp(f"{_LAYER}.mlp"),
)

_RULES: Mapping[str, tuple[Rule, ...]] = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "qwen3": LLAMA,
    "qwen3_moe": QWEN3_MOE,
    "deepseek_v3": DEEPSEEK_V3,
    "kimi_k2": DEEPSEEK_V3,
}
_LATENT = ("deepseek_v3", "kimi_k2")


def names_of(config: Mapping[str, Any]) -> Names:
    """Rules for a model's config.json, given as a mapping in which null means absent.

    Raises UsageError for what is no mapping, a model_type without rules, and for fields that lack or are no sizes.
    """
    if not isinstance(config, Mapping):
        raise UsageError(
            f"the configuration is a {type(config).__name__}, must be config.json as a mapping. Next: the to_dict() of "
            "transformers' configurations"
        )
    if config.get("q_lora_rank", 0) is None:  # here null says something: queries are made without a latent
        config = {**config, "q_lora_rank": 0}
    config = {name: value for name, value in config.items() if value is not None}
    kind = str(config.get("model_type"))
    if kind not in _RULES:
        raise UsageError(
            f"model_type {kind!r} has no rules here, there are {', '.join(_RULES)}. "
            "Next: Names() with rules of your own (docs/weights-plans.md)"
        )
    try:
        shape = _shape(kind, config)
        block = _block_of(config)
    except KeyError as error:
        raise UsageError(f"the configuration of a {kind} model has no {error.args[0]!r}") from None
    except _NoSize as error:
        raise UsageError(f"the configuration of a {kind} model: {error}") from None
    shapes = {tensor.name: tensor.shape for tensor in shape.tensors()}
    if config.get("tie_word_embeddings", False):
        del shapes["lm_head.weight"]
    units = {"heads": shape.heads, "kv_heads": shape.kv_heads or shape.heads}
    return Names(_RULES[kind], shapes, units, block)


class _NoSize(ValueError):
    """A field that should be one is not."""


class _Sizes:
    """Fields of a configuration, each a whole number, 1 or more. KeyError, _NoSize."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config

    def __getitem__(self, name: str) -> int:
        return self.of(name, 1)

    def of(self, name: str, least: int) -> int:
        size = self._config[name]
        if not isinstance(size, int) or isinstance(size, bool) or size < least:
            raise _NoSize(f"{name} is {size!r}, must be a whole number, {least} or more")
        return size

    def get(self, name: str, default: int) -> int:
        """The value if it is present and not 0; otherwise the default."""
        return (self.of(name, 0) if name in self._config else 0) or default


def _block_of(config: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and columns that share an fp8 scale."""
    quantised = config.get("quantization_config", {})
    if not isinstance(quantised, Mapping):
        raise _NoSize(f"quantization_config is {str(quantised)!r:.80}, must be a mapping")
    block = quantised.get("weight_block_size")
    if block is None:
        return 128, 128
    if not isinstance(block, list | tuple) or len(block) != 2:
        raise _NoSize(f"weight_block_size is {str(block)!r:.80}, must be rows and columns")
    rows, columns = (_Sizes({"weight_block_size": size})["weight_block_size"] for size in block)
    return rows, columns


def _biased(kind: str, config: Mapping[str, Any]) -> frozenset[str]:
    """The projections that have biases, as transformers' classes decide; only Llama's know mlp_bias."""
    if kind == "qwen2":
        return frozenset({"q_proj", "k_proj", "v_proj"})
    names: set[str] = set()
    if kind != "mistral" and config.get("attention_bias", False):
        latent = {"q_a_proj", "kv_a_proj_with_mqa", "o_proj"}
        names |= latent if kind in _LATENT else {"q_proj", "k_proj", "v_proj", "o_proj"}
    if kind == "llama" and config.get("mlp_bias", False):
        names |= {"gate_proj", "up_proj", "down_proj"}
    return frozenset(names)


def _layers_without_experts(config: Mapping[str, Any], layers: int) -> frozenset[int]:
    """Qwen3-MoE: the layers that are named, and all except every decoder_sparse_step-th."""
    named = config.get("mlp_only_layers", [])
    if not isinstance(named, list | tuple):
        raise _NoSize(f"mlp_only_layers is {str(named)!r:.80}, must be a list of layers")
    step = _Sizes(config).get("decoder_sparse_step", 1)
    listed = {_Sizes({"mlp_only_layers": layer}).of("mlp_only_layers", 0) for layer in named}
    return frozenset(listed | {layer for layer in range(layers) if (layer + 1) % step})


def _shape(kind: str, config: Mapping[str, Any]) -> ModelShape:
    sizes = _Sizes(config)
    heads, layers = sizes["num_attention_heads"], sizes["num_hidden_layers"]
    common: dict[str, Any] = {
        "hidden": sizes["hidden_size"],
        "layers": layers,
        "heads": heads,
        "vocab": sizes["vocab_size"],
        "dense_layers": layers,
        "dense_rows": sizes["intermediate_size"],
        "biased": _biased(kind, config),
    }
    if kind in _LATENT:
        experts = sizes["n_routed_experts"]
        return ModelShape(
            **common | {"dense_layers": sizes.of("first_k_dense_replace", 0)},
            experts=experts,
            expert_rows=sizes["moe_intermediate_size"],
            shared_rows=sizes["moe_intermediate_size"] * sizes["n_shared_experts"],
            q_lora=sizes.of("q_lora_rank", 0),
            kv_lora=sizes["kv_lora_rank"],
            rope=sizes["qk_rope_head_dim"],
            nope=sizes["qk_nope_head_dim"],
            value=sizes["v_head_dim"],
        )
    experts = 0
    if kind == "qwen3_moe":  # transformers 5 writes num_local_experts for what published ones call num_experts
        experts = sizes["num_experts" if "num_experts" in config else "num_local_experts"]
        common |= {"dense_layers": 0, "also_dense": _layers_without_experts(config, layers)}
    return ModelShape(
        **common,
        experts=experts,
        expert_rows=sizes["moe_intermediate_size"] if experts else 0,
        kv_heads=sizes.get("num_key_value_heads", heads),
        head_dim=sizes.get("head_dim", sizes["hidden_size"] // heads),
        normed=kind.startswith("qwen3"),
    )

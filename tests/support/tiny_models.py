"""Small models of more families, for tests with real inference engines. Nothing is downloaded."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from crossrail.weights.conversion.float8 import BlockQuantiser

_COMMON: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 256, "max_position_embeddings": 1024, "initializer_range": 0.3,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 96, "norm_topk_prob": True}


def _qwen2() -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(**_COMMON, tie_word_embeddings=True))


def _qwen3() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**_COMMON, head_dim=32, tie_word_embeddings=True))


def _qwen3_moe() -> Any:
    """The first layer has no experts."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        **_COMMON, **_EXPERTS, head_dim=32, num_experts=6, mlp_only_layers=[0], decoder_sparse_step=1,
        tie_word_embeddings=False,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config)


def _deepseek_v3() -> Any:
    """Latent attention of the one size that vLLM has for the CPU, shared experts, a first layer without experts."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        **_COMMON | {"num_key_value_heads": 4}, **_EXPERTS, n_routed_experts=8, n_shared_experts=1, n_group=2,
        topk_group=1, first_k_dense_replace=1, q_lora_rank=48, kv_lora_rank=512, qk_rope_head_dim=64,
        qk_nope_head_dim=32, v_head_dim=32, topk_method="noaux_tc", scoring_func="sigmoid", tie_word_embeddings=False,
    )  # fmt: skip
    return DeepseekV3ForCausalLM(config)


def _qwen3_moe_blocks() -> Any:
    """Like _qwen3_moe(), of whole blocks of 128 elements."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"hidden_size": 256, "moe_intermediate_size": 128, "initializer_range": 0.15}
    config = Qwen3MoeConfig(
        **_COMMON | _EXPERTS | sizes, head_dim=64, num_experts=6, mlp_only_layers=[0], decoder_sparse_step=1,
        tie_word_embeddings=False,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config)


_MODELS: dict[str, Callable[[], Any]] = {
    "qwen2": _qwen2, "qwen3": _qwen3, "qwen3_moe": _qwen3_moe, "deepseek_v3": _deepseek_v3,
    "qwen3_moe_blocks": _qwen3_moe_blocks,
}  # fmt: skip


def make(family: str, folder: Path, seed: int) -> Path:
    """With random weights that bfloat16 has too, also where they begin as zeros or ones: biases, norms, what corrects a
    router.
    """
    import torch

    torch.manual_seed(seed)
    model = _MODELS[family]()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.dim() == 1:
                tensor.add_(torch.randn(tensor.shape) * 0.3)
            tensor.copy_(tensor.bfloat16())
            assert tensor.count_nonzero() > 0, name
    model.save_pretrained(folder)
    return folder


def quantise(model: Path, folder: Path) -> Path:
    """The same model in fp8, as published checkpoints are: with one scale per 128 x 128 elements."""
    import safetensors.torch
    import torch

    plain = safetensors.torch.load_file(model / "model.safetensors")
    made = {}
    for name, tensor in plain.items():
        made[name] = tensor
        if re.search(r"_proj\.weight$", name):
            scales = torch.empty([-(-n // 128) for n in tensor.shape])
            elements = torch.empty(tensor.shape, dtype=torch.float8_e4m3fn)
            BlockQuantiser().quantise(tensor.numpy(), elements.view(torch.uint8).numpy(), scales.numpy())
            made |= {name: elements, f"{name}_scale_inv": scales}
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        "modules_to_not_convert": [name.removesuffix(".weight") for name in plain if not name.endswith("_proj.weight")],
    }  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    safetensors.torch.save_file(made, folder / "model.safetensors", {"format": "pt"})
    return folder

"""What vLLM's KV caches are to crossrail.kv: a layout, memory, and the form that both sides must agree on.

Imports vLLM where it must ask it something; shapes and strides are read off the tensors.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from crossrail.errors import UsageError
from crossrail.kv import KvLayout

_NOT_THE_MODEL = {"_name_or_path", "transformers_version", "torch_dtype", "dtype"}


class Caches(NamedTuple):
    """buffers: (address, nbytes), one for all layers if they follow each other in memory, else one each."""

    layout: KvLayout
    buffers: list[tuple[int, int]]
    layers: list[str]


def read_caches(tensors: Mapping[str, Any], *, kv_heads: int, tp: int) -> Caches:
    """The KV caches of one rank, as vLLM registers them: by layer name, in the model's order.

    Each must be a CPU tensor [blocks, heads of this rank, block_size, K and V] without gaps, as CPU_ATTN keeps it:
    inside a head of a block K is transposed, in one way or another. kv_heads: of the whole model.
    Raises UsageError, which names the layer, for anything else.
    """
    if not tensors:
        raise UsageError("vLLM has no KV caches: there is nothing to transfer")
    first_name, first = next(iter(tensors.items()))
    for name, tensor in tensors.items():
        if tensor.device.type != "cpu":
            raise UsageError(f"the KV cache of {name} is on {tensor.device}: crossrail moves host memory so far")
        if tensor.ndim != 4 or not tensor.is_contiguous():
            raise UsageError(
                f"the KV cache of {name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}: only that of "
                "CPU_ATTN is known, [blocks, heads, block_size, K and V] without gaps"
            )
        if tensor.shape != first.shape or tensor.dtype != first.dtype:
            raise UsageError(
                f"the KV caches of {first_name} and {name} differ, {tuple(first.shape)} {first.dtype} and "
                f"{tuple(tensor.shape)} {tensor.dtype}: layers must be alike"
            )
    pages, rank_heads, page_tokens, head_dim = first.shape
    layout = KvLayout(
        layers=len(tensors),
        pages=pages,
        page_tokens=page_tokens,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=str(first.dtype),
        kind="PACKED",
        tp=tp,
    )
    if layout.rank_heads != rank_heads:
        raise UsageError(
            f"a rank has {rank_heads} KV heads of the model's {kv_heads}, with TP {tp} it should have "
            f"{layout.rank_heads}"
        )
    addresses = [tensor.data_ptr() for tensor in tensors.values()]
    in_a_row = all(address == addresses[0] + i * layout.layer_bytes for i, address in enumerate(addresses))
    if in_a_row:
        buffers = [(addresses[0], layout.rank_bytes)]
    else:
        buffers = [(address, layout.layer_bytes) for address in addresses]
    return Caches(layout, buffers, list(tensors))


def model_digest(config: Mapping[str, Any]) -> str:
    """Names a model's shape, not its weights: whoever gives both sides different weights gets what he asked for."""
    kept = {key: value for key, value in config.items() if key not in _NOT_THE_MODEL}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()[:16]


def form_of(vllm_config: Any, spec: Any, layers: list[str]) -> dict[str, str]:
    """What else must agree: how a head of a block is packed, by which kernel, of which model.

    spec: vLLM's, of the cache.
    Raises UsageError for attention backends whose packing is not known here.
    """
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa  # it alone says how K is packed

    attention = get_layers_from_vllm_config(vllm_config, AttentionLayerBase, layers)
    backends = sorted({layer.get_attn_backend().get_name() for layer in attention.values()})
    if backends != ["CPU_ATTN"]:
        raise UsageError(
            f"the attention backend is {' and '.join(backends)}: KV of CPU_ATTN alone is understood so far"
        )
    cache, model = vllm_config.cache_config, vllm_config.model_config
    isa = _get_attn_isa(model.dtype, spec.block_size, spec.head_size, cache.cache_dtype)  # asked as the backend asks
    return {
        "attention": backends[0],
        "packing": isa,
        "cache dtype": str(cache.cache_dtype),
        "model": model_digest(model.hf_text_config.to_dict()),
        "layer names": hashlib.sha256("\n".join(layers).encode()).hexdigest()[:16],
    }

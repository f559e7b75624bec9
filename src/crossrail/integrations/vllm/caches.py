"""Translates vLLM's KV caches for crossrail.kv: a layout, memory, and the form that both sides must agree on.

Imports vLLM where it must ask it something; shapes and strides are read off the tensors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from crossrail.errors import UsageError
from crossrail.integrations.instance import cache_scheme, model_digest
from crossrail.kv import KvLayout
from crossrail.kv.transfer.layout import Kind, Order

# Of vLLM 0.32, whose caches are [blocks, heads, tokens, content] whatever the backend. CPU_ATTN has K of a head's block
# transposed, in one way or another; these of GPUs split the content into K and, behind it, V; MLA's is the latent.
PACKINGS: dict[str, Kind] = {
    "CPU_ATTN": "PACKED",
    "FLASH_ATTN": "JOINT",
    "FLASHINFER": "JOINT",
    "FLEX_ATTENTION": "JOINT",
    "TRITON_ATTN": "JOINT",
    "AMX_MLA": "MLA",
    "CPU_MLA": "MLA",
    "CUTLASS_MLA": "MLA",
    "FLASHINFER_MLA": "MLA",
    "FLASHMLA": "MLA",
    "FLASH_ATTN_MLA": "MLA",
    "TRITON_MLA": "MLA",
}

# Others give blocks back, or share them, by rules of their own. FullAttentionSpec may name a window: it keeps all then.
SPECS = ("FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec")

_LLAMA4_LONG = 32768  # tokens; vLLM tunes the attention of a Llama 4 that may have more


class Caches(NamedTuple):
    """buffers: (address, nbytes), one for all layers if they follow each other in memory, else one each. layers: their
    names, without those that read the cache of a layer before them, as Gemma 3n's last layers do.
    """

    layout: KvLayout
    buffers: list[tuple[int, int]]
    layers: list[str]


def read_caches(tensors: Mapping[str, Any], *, kv_heads: int, tp: int, kind: Kind = "PACKED") -> Caches:
    """The KV caches of one rank, as vLLM registers them: by layer name, in the model's order.

    Each is a tensor [blocks, heads of this rank, block_size, what a head keeps of a token], all on one device, without
    gaps in memory: heads before tokens in a block (vLLM's layout LBHNC) or tokens before heads (LBNHC). kind: what the
    last axis is, as PACKINGS has it; PACKED, which is that of CPU_ATTN, is heads before tokens. kv_heads: of the whole
    model.
    Raises UsageError, which names the layer, for anything else.
    """
    if not tensors:
        raise UsageError("vLLM has no KV caches: there is nothing to transfer")
    tensors = _without_readers(tensors)
    first_name, first = next(iter(tensors.items()))
    order = _order_of(first_name, first)
    for name, tensor in tensors.items():
        if (tensor.shape, tensor.dtype, tensor.device, _order_of(name, tensor)) != (
            first.shape, first.dtype, first.device, order
        ):  # fmt: skip
            raise UsageError(
                f"the KV caches of {first_name} and {name} differ, {_told(first)} and {_told(tensor)}: layers must be "
                "alike, and on one device"
            )
    pages, rank_heads, page_tokens, head_dim = first.shape
    if kind == "PACKED" and order != "HND":
        raise UsageError(f"the KV cache of {first_name} is {_told(first)}: that of CPU_ATTN has heads before tokens")
    layout = KvLayout(
        layers=len(tensors),
        pages=pages,
        page_tokens=page_tokens,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=str(first.dtype),
        kind=kind,
        order=order,
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


def _without_readers(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Each cache once, by the name of the first layer that has it: the one that fills it."""
    owners: dict[int, str] = {}
    for name, tensor in tensors.items():
        owners.setdefault(tensor.data_ptr(), name)
    return {name: tensors[name] for name in owners.values()}


def _order_of(name: str, tensor: Any) -> Order:
    """How a layer's blocks lie in memory, by its strides. Raises UsageError for what KvLayout cannot say."""
    if tensor.device.type not in ("cpu", "cuda"):
        raise UsageError(f"the KV cache of {name} is on {tensor.device}: crossrail moves memory of hosts and CUDA GPUs")
    if tensor.ndim == 4:
        _, heads, tokens, content = tensor.shape
        lies: dict[Order, tuple[int, ...]] = {
            "HND": (heads * tokens * content, tokens * content, content, 1),
            "NHD": (heads * tokens * content, content, heads * content, 1),
        }
        for order, strides in lies.items():
            # An axis of one element may have any stride.
            wanted = zip(tensor.shape, tensor.stride(), strides, strict=True)
            if all(count == 1 or stride == right for count, stride, right in wanted):
                return order
    raise UsageError(
        f"the KV cache of {name} is {_told(tensor)}: known is [blocks, heads, tokens, content] without gaps, in memory "
        "with heads before tokens or tokens before heads; set VLLM_KV_CACHE_LAYOUT to LBHNC or LBNHC"
    )


def _told(tensor: Any) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)} and strides {tensor.stride()} on {tensor.device}"


class Window(NamedTuple):
    """Of layers that look at `tokens` tokens, their own among them. block: tokens in one. kept: more tokens whose
    blocks vLLM keeps, for speculation.
    """

    tokens: int
    block: int
    kept: int = 0

    def has_left(self, computed: int) -> int:
        """Blocks that vLLM has given away once so many tokens are computed: the next one looks at none of them."""
        return max(computed + 1 - self.tokens - self.kept, 0) // self.block


def window_of(spec: Any) -> Window | None:
    """The window of all layers with this KV cache; None: they look at all tokens. spec: vLLM's, of the cache.

    Raises UsageError for caches that vLLM handles in another way than a block for each block_size tokens.
    """
    name = type(spec).__name__
    if name not in SPECS:
        raise UsageError(f"the model has KV caches of vLLM's {name}: supported are {', '.join(SPECS)}")
    if name != "SlidingWindowSpec":
        return None
    return Window(spec.sliding_window, spec.block_size, spec.extra_retained_tokens)


def kind_of(backend: str, spec: Any) -> Kind:
    """What the last axis of a KV cache is. spec: vLLM's, of the cache.

    Raises UsageError for attention backends, and forms of theirs, that are not known here.
    """
    if backend not in PACKINGS:
        raise UsageError(
            f"the attention backend is {backend}: supported are {', '.join(sorted(PACKINGS))}; choose one by "
            "--attention-backend"
        )
    kind = PACKINGS[backend]
    if kind == "JOINT" and getattr(spec, "num_head_slots", None) is not None:
        raise UsageError(
            f"{backend} keeps K and V of this KV cache apart, in {spec.num_head_slots} slots of a block, as for cache "
            "dtype nvfp4: not supported"
        )
    if getattr(spec, "tokens_per_state", 1) != 1:
        raise UsageError(f"{backend} keeps {spec.tokens_per_state} tokens in one state: not supported")
    return kind


def form_of(vllm_config: Any, spec: Any, layers: list[str]) -> dict[str, str]:
    """What else must agree: how a head of a block is packed, by which kernel, of which model.

    spec: vLLM's, of the cache.
    Raises UsageError for attention backends whose packing is not known here.
    """
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    attention = get_layers_from_vllm_config(vllm_config, AttentionLayerBase, layers)
    backends = sorted({layer.get_attn_backend().get_name() for layer in attention.values()})
    if len(backends) != 1:
        raise UsageError(f"the layers have attention backends {' and '.join(backends)}: all must have the same")
    cache, model = vllm_config.cache_config, vllm_config.model_config
    text = model.hf_text_config.to_dict()
    return {
        "attention": backends[0],
        "packing": _packing_of(kind_of(backends[0], spec), vllm_config, spec),
        "cache dtype": str(cache.cache_dtype),
        "model": model_digest(text),
        "layer names": hashlib.sha256("\n".join(layers).encode()).hexdigest()[:16],
        **scales_of(spec.dtype.itemsize, text, model.hf_config.to_dict()),
        **lengths_of(text, model.max_model_len),
    }


def scales_of(element_bytes: int, *configs: Mapping[str, Any]) -> dict[str, str]:
    """What the numbers in the cache are multiples of. Only float8 has scales, which come with the weights. configs: of
    the model and its parts: one that is not text alone has its quantization outside of the text's.
    """
    return {"cache scales": cache_scheme(*configs) or "none"} if element_bytes == 1 else {}


def lengths_of(text: Mapping[str, Any], tokens_max: int) -> dict[str, str]:
    """What vLLM computes otherwise when max_model_len is above some length, whatever the length of the prompt. Nothing
    for most models. text: the model's configuration.
    """
    ropes = text.get("rope_parameters") or {}
    bounds = {
        rope["original_max_position_embeddings"]
        for rope in (ropes, *ropes.values())  # of the model, or by kinds of layers
        if isinstance(rope, Mapping) and rope.get("rope_type") == "longrope"
    }
    if str(text.get("model_type")).startswith("llama4"):
        bounds.add(_LLAMA4_LONG)
    sides = (f"above {bound}" if tokens_max > bound else f"{bound} at most" for bound in sorted(bounds))
    return {"max_model_len": ", ".join(sides)} if bounds else {}


def _packing_of(kind: Kind, vllm_config: Any, spec: Any) -> str:
    if kind == "MLA":
        return f"a latent of {spec.head_size}"
    if kind == "JOINT":
        return f"rows of K {spec.head_size} and V {getattr(spec, 'head_size_v', spec.head_size)}"
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa  # it alone says how K is packed

    cache, model = vllm_config.cache_config, vllm_config.model_config
    isa: str = _get_attn_isa(model.dtype, spec.block_size, spec.head_size, cache.cache_dtype)  # as the backend asks
    return isa

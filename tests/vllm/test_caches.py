"""vLLM's own views of KV caches, in each of its layouts: taken for what they are, or refused. Needs no GPU: vLLM makes
the same views of any memory.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec, KVCacheTensor, MLAAttentionSpec
from vllm.v1.kv_cache_interface import create_kv_cache_views as views_of
from vllm.v1.kv_cache_layout import KVCacheLayout

import crossrail as xr
from crossrail.integrations.vllm.caches import PACKINGS, Caches, kind_of, read_caches

BLOCKS, TOKENS, HEADS, HEAD, LAYERS = 5, 16, 2, 8, 3
GQA = FullAttentionSpec(block_size=TOKENS, num_kv_heads=HEADS, head_size=HEAD, dtype=torch.float16)
MLA = MLAAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=3 * HEAD, dtype=torch.float16)
TAKEN = {KVCacheLayout.LBHNC: "HND", KVCacheLayout.LBNHC: "NHD"}


def tensors(spec: AttentionSpec, layout: KVCacheLayout) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Memory of known content, and vLLM's view of each layer of it."""
    shape = (LAYERS, BLOCKS, spec.num_heads, TOKENS, spec.state_content_size_bytes)
    size, stride = 1, [0] * 5
    for axis in reversed(layout.stride_order):
        stride[axis], size = size, size * shape[axis]
    layer, block, *_ = stride
    memory = torch.from_numpy(np.random.default_rng(1).integers(-128, 128, size, np.int8))
    placed = KVCacheTensor(size=size, layers=["a", "b", "c"], layer_stride=layer, block_stride=block)
    return memory, dict(zip(placed.layers, views_of(memory, spec, BLOCKS, layout, placed), strict=True))


def read(spec: AttentionSpec, views: dict[str, torch.Tensor], backend: str) -> Caches:
    return read_caches(views, kv_heads=spec.num_kv_heads, tp=1, kind=kind_of(backend, spec))


@pytest.mark.parametrize("layout", TAKEN)
@pytest.mark.parametrize(("spec", "backend"), [(GQA, "FLASH_ATTN"), (MLA, "FLASHMLA")], ids=["GQA", "MLA"])
def test_a_layout_names_the_same_elements_as_vllm(spec: AttentionSpec, backend: str, layout: KVCacheLayout) -> None:
    memory, views = tensors(spec, layout)
    caches = read(spec, views, backend)

    assert caches.layout.order == TAKEN[layout] or spec.num_kv_heads == 1
    assert caches.buffers == [(memory.data_ptr(), memory.nbytes)]
    for i, view in enumerate(views.values()):
        layer = memory.numpy()[i * caches.layout.layer_bytes :][: caches.layout.layer_bytes]
        (ours,) = caches.layout.layer_view(layer).view(np.uint16)
        np.testing.assert_array_equal(ours, view.contiguous().view(torch.uint16).numpy())


@pytest.mark.parametrize("layout", [layout for layout in KVCacheLayout if layout not in TAKEN])
def test_layouts_that_split_a_layer_or_a_block_are_refused(layout: KVCacheLayout) -> None:
    _, views = tensors(GQA, layout)
    with pytest.raises(xr.UsageError, match="set VLLM_KV_CACHE_LAYOUT to LBHNC or LBNHC"):
        read(GQA, views, "FLASHINFER")


def test_the_backends_have_these_names() -> None:
    assert set(PACKINGS) <= set(AttentionBackendEnum.__members__)

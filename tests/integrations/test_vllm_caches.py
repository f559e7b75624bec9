"""What vLLM's KV caches are taken for, by stand-ins of its tensors and specs: right layouts, or a refusal by name."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import crossrail as xr
from crossrail.integrations.instance import Worker, mismatch, model_digest
from crossrail.integrations.vllm.caches import PACKINGS, Window, kind_of, lengths_of, read_caches, scales_of, window_of
from crossrail.kv import KvLayout, RankMemory
from tests.conftest import EngineFactory
from tests.support.fake_gpu import FakeGpu, GpuMemory

BLOCKS, HEADS, TOKENS, CONTENT, ITEM = 5, 2, 16, 24, 2
LBHNC = (HEADS * TOKENS * CONTENT, TOKENS * CONTENT, CONTENT, 1)
LBNHC = (HEADS * TOKENS * CONTENT, CONTENT, HEADS * CONTENT, 1)
LAYER_BYTES = BLOCKS * HEADS * TOKENS * CONTENT * ITEM


class Device(str):
    """cpu, cuda:0 and so on."""

    __slots__ = ()

    @property
    def type(self) -> str:
        return self.partition(":")[0]


GPU = Device("cuda:0")


@dataclass
class Tensor:
    """What is used of torch's. strides in elements."""

    address: int
    shape: tuple[int, ...] = (BLOCKS, HEADS, TOKENS, CONTENT)
    strides: tuple[int, ...] = LBNHC
    device: Device = GPU
    dtype: str = "torch.bfloat16"

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def stride(self) -> tuple[int, ...]:
        return self.strides

    def data_ptr(self) -> int:
        return self.address


def layers(address: int = 1 << 40, gap: int = 0, **changes: Any) -> dict[str, Tensor]:
    return {f"layer {i}": Tensor(address + i * (LAYER_BYTES + gap), **changes) for i in range(3)}


@pytest.mark.parametrize(("strides", "order"), [(LBHNC, "HND"), (LBNHC, "NHD")])
def test_rows_of_k_and_v_by_strides(strides: tuple[int, ...], order: str) -> None:
    """The tensor's axes are the same in both; where a head's token lies in memory is not."""
    caches = read_caches(layers(strides=strides), kv_heads=4, tp=2, kind="JOINT")

    assert caches.layout == KvLayout(
        layers=3, pages=BLOCKS, page_tokens=TOKENS, kv_heads=4, head_dim=CONTENT, dtype="bfloat16", kind="JOINT",
        order=order, tp=2,
    )  # fmt: skip
    assert caches.buffers == [(1 << 40, 3 * LAYER_BYTES)]
    memory: npt.NDArray[np.uint16] = np.arange(LAYER_BYTES // ITEM, dtype=np.uint16)
    as_vllm = np.lib.stride_tricks.as_strided(
        memory, (BLOCKS, HEADS, TOKENS, CONTENT), [ITEM * stride for stride in strides]
    )
    np.testing.assert_array_equal(caches.layout.layer_view(memory)[0], as_vllm)


def test_layers_apart_are_buffers_of_their_own() -> None:
    caches = read_caches(layers(gap=4096), kv_heads=2, tp=1, kind="JOINT")
    assert caches.buffers == [((1 << 40) + i * (LAYER_BYTES + 4096), LAYER_BYTES) for i in range(3)]


def test_layers_that_read_anothers_cache_are_not_sent_again() -> None:
    own = layers()
    shared = own | {"layer 3": own["layer 1"], "layer 4": own["layer 2"]}
    assert read_caches(shared, kv_heads=4, tp=2, kind="JOINT") == read_caches(own, kv_heads=4, tp=2, kind="JOINT")


def test_a_latent_of_all_heads() -> None:
    shape, strides = (BLOCKS, 1, TOKENS, CONTENT), (TOKENS * CONTENT, 7, CONTENT, 1)  # of one head: any stride
    layout = read_caches(layers(shape=shape, strides=strides), kv_heads=1, tp=2, kind="MLA").layout
    assert (layout.kind, layout.kv_heads, layout.head_dim, layout.tp) == ("MLA", 1, CONTENT, 2)


def test_cpu_attn_is_what_it_was() -> None:
    on_cpu = {"device": Device("cpu"), "dtype": "torch.float32"}
    layout = read_caches(layers(strides=LBHNC, **on_cpu), kv_heads=2, tp=1).layout
    assert (layout.kind, layout.order, layout.dtype) == ("PACKED", "HND", "float32")
    with pytest.raises(xr.UsageError, match="that of CPU_ATTN has heads before tokens"):
        read_caches(layers(strides=LBNHC, **on_cpu), kv_heads=2, tp=1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"strides": (3 * LBNHC[0], *LBNHC[1:])}, "layer 0 is torch.bfloat16 of shape .* without gaps.*LBHNC or LBNHC"),
        ({"strides": (TOKENS * CONTENT, BLOCKS * TOKENS * CONTENT, CONTENT, 1)}, "heads before tokens or"),
        ({"shape": (2, BLOCKS, TOKENS, HEADS, 12), "strides": (3840, 768, 24, 12, 1)}, r"shape \(2, 5, 16, 2, 12\)"),
        ({"device": Device("xpu:0")}, "layer 0 is on xpu:0: crossrail moves memory of hosts and CUDA GPUs"),
        ({"shape": (BLOCKS, 3, TOKENS, CONTENT), "strides": (1152, 24, 72, 1)}, "a rank has 3 KV heads of the model"),
        ({"dtype": "torch.complex64"}, "complex64"),
    ],
)  # fmt: skip
def test_what_cannot_be_said_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(xr.UsageError, match=words):
        read_caches(layers(**changes), kv_heads=4, tp=2, kind="JOINT")


@pytest.mark.parametrize(
    "changes", [{"device": Device("cuda:1")}, {"strides": LBHNC}, {"dtype": "torch.float16"}], ids=str
)
def test_layers_that_differ_are_refused(changes: dict[str, Any]) -> None:
    mixed = layers() | {"layer 2": Tensor(1 << 41, **changes)}
    with pytest.raises(xr.UsageError, match=r"of layer 0 and layer 2 differ, .*layers must be alike"):
        read_caches(mixed, kv_heads=4, tp=2, kind="JOINT")


def test_backends_that_are_known() -> None:
    plain = SimpleNamespace(num_head_slots=None, tokens_per_state=1)
    assert {kind_of(backend, plain) for backend in PACKINGS} == {"PACKED", "JOINT", "MLA"}
    with pytest.raises(xr.UsageError, match=r"backend is MAMBA2_ATTN: supported are AMX_MLA, CPU_ATTN, .*TRITON_MLA"):
        kind_of("MAMBA2_ATTN", plain)
    with pytest.raises(xr.UsageError, match="FLASHINFER keeps K and V of this KV cache apart, in 16 slots"):
        kind_of("FLASHINFER", SimpleNamespace(num_head_slots=16, tokens_per_state=1))
    with pytest.raises(xr.UsageError, match="keeps 4 tokens in one state"):
        kind_of("FLASHMLA", SimpleNamespace(num_head_slots=None, tokens_per_state=4))


def test_only_windows_that_slide_are_looked_through() -> None:
    def spec(name: str, **fields: Any) -> Any:
        return type(name, (), fields)()

    window = window_of(spec("SlidingWindowSpec", sliding_window=64, block_size=32, extra_retained_tokens=0))
    assert window == Window(64, 32)
    # The token behind 95 others looks at 63 of them: at 32 to 94.
    assert [window.has_left(computed) for computed in (0, 94, 95, 126, 127)] == [0, 0, 1, 1, 2]
    assert Window(64, 32, kept=2).has_left(96) == 0
    assert window_of(spec("FullAttentionSpec", sliding_window=64)) is None
    assert window_of(spec("MLAAttentionSpec")) is None
    with pytest.raises(xr.UsageError, match=r"ChunkedLocalAttentionSpec: supported are FullAttentionSpec, MLA"):
        window_of(spec("ChunkedLocalAttentionSpec"))


def test_sides_that_differ_are_told_apart() -> None:
    def side(strides: tuple[int, ...], attention: str) -> Worker:
        layout = read_caches(layers(strides=strides), kv_heads=2, tp=1, kind="JOINT").layout
        return Worker(b"", layout.to_wire(), {"attention": attention, "packing": "rows of K 12 and V 12"})

    flash, other_order = side(LBNHC, "FLASH_ATTN"), side(LBHNC, "FLASH_ATTN")
    assert mismatch(flash, other_order) == ""  # rows are cut out one by one
    why = mismatch(flash, side(LBHNC, "FLASHINFER"))
    assert "attention: producer FLASH_ATTN, decoder FLASHINFER" in why
    assert "JOINT with 2 x 24 bfloat16" in why and ", NHD, TP 1" in why and ", HND, TP 1" in why


def test_addresses_are_registered_as_a_gpus(gpu: FakeGpu, open_engine: EngineFactory) -> None:
    pool: GpuMemory = gpu.allocate(3 * LAYER_BYTES, 1)
    caches = read_caches(layers(pool.address), kv_heads=4, tp=2, kind="JOINT")
    memory = RankMemory.register(open_engine(), caches.layout, caches.buffers)
    assert [region.device for region in memory.regions] == ["cuda:1"]


def test_float8_of_other_scales_is_another_cache() -> None:
    text, scaled = {"hidden_size": 8}, {"quantization_config": {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}}
    assert scales_of(2, text, scaled) == scales_of(2, text) == {}
    assert (
        scales_of(1, text)
        == scales_of(1, {"quantization_config": {"kv_cache_scheme": None}})
        == {"cache scales": "none"}
    )
    assert scales_of(1, text, scaled) == scales_of(1, scaled) != scales_of(1, text)


LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 128, "short_factor": [1.0]}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ({"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 128}}, {}),
        ({"rope_parameters": None}, {}),
        ({"rope_parameters": LONGROPE}, {"max_model_len": "128 at most"}),
        ({"rope_parameters": {"full_attention": LONGROPE, "other": None}}, {"max_model_len": "128 at most"}),
        ({"model_type": "llama4_text", "rope_parameters": LONGROPE}, {"max_model_len": "128 at most, 32768 at most"}),
    ],
)  # fmt: skip
def test_models_that_are_others_with_another_max_model_len(text: dict[str, Any], said: dict[str, str]) -> None:
    assert lengths_of(text, 128) == said
    assert lengths_of(text, 129) == {key: value.replace("128 at most", "above 128") for key, value in said.items()}
    assert model_digest(text) == model_digest(text | {"max_model_len": 128})

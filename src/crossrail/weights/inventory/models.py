"""Inventories of large models at trainers and inference ranks, without their memory: for plans and simulations.

Shapes are those of the published configurations. Experts are stacked: one parameter (experts, rows, columns) each for
gate, up and down.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from crossrail.errors import UsageError
from crossrail.weights.dtypes import BFLOAT16, FLOAT32, FP8, ITEM_BYTES
from crossrail.weights.inventory.holdings import DIMS, HOLDING, Inventory, RegionInfo, Rows, c_strides

_ALIGN = 256
_BLOCK = 128


class _Tensor(NamedTuple):
    """layer: -1 before the first, the number of layers behind the last. quantised: at fp8 targets."""

    name: str
    shape: tuple[int, ...]
    layer: int
    quantised: bool
    expert: bool


@dataclass(frozen=True)
class ModelShape:
    """The sizes that decide the parameters of a decoder with experts. Elements.

    kv_lora and the others of MLA are 0 for grouped-query attention, heads x head_dim for q, kv_heads for k and v.
    q_lora alone is 0 where q is made without a latent.
    dense_layers: the first so many have no experts but a dense block; also_dense: these too, counted from 0. normed: q
    and k of each head are (Qwen3). biased: projections of attention, and of dense blocks, that have a bias.
    """

    hidden: int
    layers: int
    heads: int
    vocab: int
    experts: int
    expert_rows: int
    dense_layers: int = 0
    dense_rows: int = 0
    shared_rows: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    q_lora: int = 0
    kv_lora: int = 0
    rope: int = 0
    nope: int = 0
    value: int = 0
    normed: bool = True
    also_dense: frozenset[int] = frozenset()
    biased: frozenset[str] = frozenset()

    def tensors(self) -> Iterator[_Tensor]:
        """All parameters, in the order of layers."""
        yield _Tensor("model.embed_tokens.weight", (self.vocab, self.hidden), -1, False, False)
        for layer in range(self.layers):
            for name, shape, quantised, expert in self._layer(layer):
                yield _Tensor(f"model.layers.{layer}.{name}", shape, layer, quantised, expert)
        yield _Tensor("model.norm.weight", (self.hidden,), self.layers, False, False)
        yield _Tensor("lm_head.weight", (self.vocab, self.hidden), self.layers, False, False)

    def _layer(self, layer: int) -> Iterator[tuple[str, tuple[int, ...], bool, bool]]:
        for norm in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            yield norm, (self.hidden,), False, False
        for name, shape in self._attention():
            yield f"self_attn.{name}.weight", shape, len(shape) == 2, False
            if name in self.biased:
                yield f"self_attn.{name}.bias", shape[:1], False, False
        if layer < self.dense_layers or layer in self.also_dense:  # all of them, in a model without experts
            for name, shape in self._mlp(self.dense_rows):
                yield f"mlp.{name}.weight", shape, True, False
                if name in self.biased:
                    yield f"mlp.{name}.bias", shape[:1], False, False
            return
        yield "mlp.gate.weight", (self.experts, self.hidden), False, False
        if self.shared_rows:
            yield "mlp.gate.e_score_correction_bias", (self.experts,), False, False
            for name, shape in self._mlp(self.shared_rows):
                yield f"mlp.shared_experts.{name}.weight", shape, True, False
        for name, shape in self._mlp(self.expert_rows):
            yield f"mlp.experts.{name}.weight", (self.experts, *shape), True, True

    def _mlp(self, rows: int) -> Iterator[tuple[str, tuple[int, int]]]:
        yield "gate_proj", (rows, self.hidden)
        yield "up_proj", (rows, self.hidden)
        yield "down_proj", (self.hidden, rows)

    def _attention(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        if not self.kv_lora:
            yield "q_proj", (self.heads * self.head_dim, self.hidden)
            yield "k_proj", (self.kv_heads * self.head_dim, self.hidden)
            yield "v_proj", (self.kv_heads * self.head_dim, self.hidden)
            yield "o_proj", (self.hidden, self.heads * self.head_dim)
            if self.normed:
                yield "q_norm", (self.head_dim,)
                yield "k_norm", (self.head_dim,)
            return
        if self.q_lora:
            yield "q_a_proj", (self.q_lora, self.hidden)
            yield "q_a_layernorm", (self.q_lora,)
            yield "q_b_proj", (self.heads * (self.nope + self.rope), self.q_lora)
        else:
            yield "q_proj", (self.heads * (self.nope + self.rope), self.hidden)
        yield "kv_a_proj_with_mqa", (self.kv_lora + self.rope, self.hidden)
        yield "kv_a_layernorm", (self.kv_lora,)
        yield "kv_b_proj", (self.heads * (self.nope + self.value), self.kv_lora)
        yield "o_proj", (self.hidden, self.heads * self.value)


_MLA: Mapping[str, Any] = {"q_lora": 1536, "kv_lora": 512, "rope": 64, "nope": 128, "value": 128}
MODELS: Mapping[str, ModelShape] = {
    "kimi-k2": ModelShape(
        hidden=7168, layers=61, heads=64, vocab=163840, experts=384, expert_rows=2048,
        dense_layers=1, dense_rows=18432, shared_rows=2048, **_MLA,
    ),
    "deepseek-v3": ModelShape(
        hidden=7168, layers=61, heads=128, vocab=129280, experts=256, expert_rows=2048,
        dense_layers=3, dense_rows=18432, shared_rows=2048, **_MLA,
    ),
    "qwen3-235b": ModelShape(
        hidden=4096, layers=94, heads=64, vocab=151936, experts=128, expert_rows=1536, kv_heads=4, head_dim=128,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Cluster:
    """How a model is spread. trainers = pipeline x expert_parallel x fsdp; targets: a multiple of target_experts.

    Trainers, within each pipeline stage: experts are split over expert_parallel groups, and within each over fsdp
    ranks; everything else over the dense_shard ranks of a host, so that every host has all of it.

    Targets: every rank has everything except experts, and 1 / target_experts of the experts; fp8 with one scale for 128
    x 128 elements, except that embeddings, norms and routers are bf16.
    """

    trainers: int = 256
    targets: int = 128
    pipeline: int = 2
    expert_parallel: int = 8
    dense_shard: int = 8
    target_experts: int = 32

    def __post_init__(self) -> None:
        for name in ("pipeline", "expert_parallel", "dense_shard", "target_experts"):
            if (size := getattr(self, name)) < 1:
                raise UsageError(f"{name} is {size}, must be at least 1")
        stage = self.trainers // self.pipeline
        for name, value, of in (
            ("trainers", self.trainers, self.pipeline * self.expert_parallel),
            ("trainers of a stage", stage, self.dense_shard),
            ("targets", self.targets, self.target_experts),
        ):
            if value < 1 or value % of:
                raise UsageError(f"{name}: {value}; must be {of} or a multiple of it")

    @property
    def fsdp(self) -> int:
        """Ranks over which the experts of an expert-parallel group are sharded."""
        return self.trainers // self.pipeline // self.expert_parallel


# What the paper's Table 5 and the blog's Qwen3 figures were measured on (shared facts A.6); DeepSeek-V3's as Kimi-K2's.
CLUSTERS: Mapping[str, Cluster] = {
    "kimi-k2": Cluster(),
    "deepseek-v3": Cluster(),
    "qwen3-235b": Cluster(trainers=128, targets=32, pipeline=2, target_experts=8),
}


def inventories(model: ModelShape, cluster: Cluster) -> tuple[list[Inventory], list[Inventory]]:
    """The inventories of all trainers and all targets, bf16 there and mostly fp8 here."""
    trainers = [trainer_inventory(model, cluster, rank) for rank in range(cluster.trainers)]
    return trainers, [target_inventory(model, cluster, rank) for rank in range(cluster.targets)]


def trainer_inventory(model: ModelShape, cluster: Cluster, rank: int) -> Inventory:
    """The inventory of this trainer."""
    tensors, layers = _tensors(model), model.layers
    stage_ranks = cluster.trainers // cluster.pipeline
    stage, within = divmod(rank, stage_ranks)
    first, last = layers * stage // cluster.pipeline, layers * (stage + 1) // cluster.pipeline
    first, last = (-1 if stage == 0 else first), (layers + 1 if stage == cluster.pipeline - 1 else last)
    here = [tensor for tensor in tensors if first <= tensor.layer < last]
    rows = _rows(here)
    expert = np.array([tensor.expert for tensor in here], bool)  # of a stage without layers there are none
    group, shard = divmod(within, cluster.fsdp)
    _split(rows, expert, group, cluster.expert_parallel)
    _split(rows, expert, shard, cluster.fsdp)
    _split(rows, ~expert, within % cluster.dense_shard, cluster.dense_shard)
    rows["mesh"] = expert
    meshes = [f"stage{stage}.dense", f"stage{stage}.experts{group}"]
    return _inventory("trainer", rank, [tensor.name for tensor in here], meshes, rows)


def target_inventory(model: ModelShape, cluster: Cluster, rank: int) -> Inventory:
    """The inventory of this inference rank."""
    tensors = _tensors(model)
    rows = _rows(tensors)
    expert = np.array([tensor.expert for tensor in tensors])
    _split(rows, expert, rank % cluster.target_experts, cluster.target_experts)
    quantised = np.array([tensor.quantised for tensor in tensors])
    rows["dtype"][quantised] = FP8
    scales = rows[quantised].copy()
    dims = scales["dims"][:, np.newaxis]
    # Whole matrices are cut into blocks: the last two dimensions.
    blocked = (np.arange(DIMS) < dims) & (np.arange(DIMS) >= dims - 2)
    scales["block"] = np.where(blocked, _BLOCK, 1)
    for field in ("shape", "stop"):
        scales[field] = -(-scales[field] // scales["block"])
    scales["start"] //= scales["block"]
    scales["dtype"] = FLOAT32
    scales["scale_of"] = np.flatnonzero(quantised)
    scales["name"] = len(tensors) + np.arange(len(scales))
    names = [tensor.name for tensor in tensors]
    names += [f"{name}_scale_inv" for name, is_quantised in zip(names, quantised, strict=True) if is_quantised]
    return _inventory("target", rank, names, [""], np.concatenate([rows, scales]))


@lru_cache(maxsize=4)
def _tensors(model: ModelShape) -> tuple[_Tensor, ...]:
    return tuple(model.tensors())


def _rows(tensors: Sequence[_Tensor]) -> Rows:
    rows = np.zeros(len(tensors), HOLDING)
    rows["name"], rows["scale_of"], rows["dtype"] = np.arange(len(tensors)), -1, BFLOAT16
    rows["shape"] = rows["block"] = 1
    for row, tensor in zip(rows, tensors, strict=True):
        row["dims"] = len(tensor.shape)
        row["shape"][: len(tensor.shape)] = tensor.shape
    rows["stop"] = rows["shape"]
    return rows


def _split(rows: Rows, chosen: np.ndarray, index: int, count: int) -> None:
    """The piece of this index along the first dimension, as torch.chunk cuts it; it may be empty."""
    extent = rows["stop"][:, 0] - rows["start"][:, 0]
    size = -(-extent // count)
    start = rows["start"][:, 0] + np.minimum(size * index, extent)
    stop = rows["start"][:, 0] + np.minimum(size * (index + 1), extent)
    rows["start"][:, 0] = np.where(chosen, start, rows["start"][:, 0])
    rows["stop"][:, 0] = np.where(chosen, stop, rows["stop"][:, 0])


def _inventory(role: str, rank: int, names: list[str], meshes: list[str], rows: Rows) -> Inventory:
    """An inventory of tensors one behind the other in one region."""
    rows = rows[(rows["start"] < rows["stop"]).all(axis=1)]
    extent = rows["stop"] - rows["start"]
    item = ITEM_BYTES[rows["dtype"]]
    rows["strides"] = c_strides(extent, item)
    padded = -(-extent.prod(axis=1) * item // _ALIGN) * _ALIGN
    ends = np.cumsum(padded)
    rows["offset"] = ends - padded
    assert role in ("trainer", "target")
    return Inventory(role, rank, [RegionInfo(b"", int(padded.sum()))], names, meshes, rows)  # type: ignore[arg-type]

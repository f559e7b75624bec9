"""Generates from fused tensors, cut and named as vLLM's are: in bfloat16 over tensor-parallel halves, or in fp8.

One process plays all ranks of its tensor parallelism: each computes with its own tensors, and their results are added
up or put together where a real one has a collective. There is no KV cache, completions are short.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.nn import functional

import crossrail as xr
from crossrail.weights.conversion.float8 import BLOCK, blocks
from crossrail.weights.inventory.families import names_of
from crossrail.weights.inventory.mapping import Ranks
from crossrail.weights.inventory.memory import WeightMemory
from crossrail.weights.inventory.torch_tensors import add_tensor
from crossrail.weights.rl.task import NEW_TOKENS, PROMPT_TOKENS, Rollout, reward

_ALIGN_BYTES = 64
_SCALES = "_scale_inv"

Tensor = Any  # torch.Tensor
Config = Mapping[str, Any]


class Key(NamedTuple):
    """A tensor of a tensor-parallel rank. Tensors that all ranks share exist once, under rank 0."""

    rank: int
    name: str


class Served:
    """An inference rank's tensors, in memory of the engine's own, and what they compute. Threads: one at a time.

    tp: how many tensor-parallel ranks there are, all of them here. quantised: projections are float8_e4m3fn with scales
    of 128 x 128 blocks, for which tp is 1. Owner of engine: the caller; close() frees the memory.
    """

    def __init__(self, config: Config, engine: xr.Engine, rank: int, tp: int, quantised: bool) -> None:
        self.tp, self.quantised = tp, quantised
        self._config = config
        kept = dict(_tensors(config, tp, quantised))
        sizes = {key: math.prod(shape) * dtype.itemsize for key, (shape, dtype) in kept.items()}
        self._region = engine.alloc(sum(_aligned(size) for size in sizes.values()))
        self.memory = WeightMemory(engine, "target", rank, [self._region])
        self.tensors: dict[Key, Tensor] = {}
        names, whole, at = names_of(config), torch.from_numpy(self._region.array()), 0
        for key, (shape, dtype) in kept.items():
            tensor = whole[at : at + sizes[key]].view(dtype).view(shape)
            at += _aligned(sizes[key])
            self.tensors[key] = tensor
            add_tensor(self.memory, names, key.name, tensor, ranks=Ranks(key.rank, tp))

    def policy(self, like: Callable[[Tensor], Any]) -> Policy:
        """The weights of one version in float32. like: Reading.like."""
        kept = {key: as_stored(like(tensor), tensor.dtype) for key, tensor in self.tensors.items()}
        wide = {}
        for key, tensor in kept.items():
            if key.name.endswith(_SCALES):
                continue
            scales = kept.get(Key(key.rank, key.name + _SCALES))
            wide[key] = tensor.float() if scales is None else tensor.float() * _spread(scales)
        return Policy(self._config, wide, self.tp)

    def close(self) -> None:
        """Idempotent."""
        self.memory.close()
        self._region.close()


class Policy:
    """The forward pass of a Qwen3-MoE over the tensors of all tensor-parallel ranks. Immutable."""

    def __init__(self, config: Config, weights: Mapping[Key, Tensor], tp: int) -> None:
        self._config, self._weights, self._tp = config, weights, tp

    def logits(self, tokens: Tensor) -> Tensor:
        """tokens: (batch, length) int64. Returns (batch, length, vocabulary) float32."""
        embedding = torch.cat([self._of(rank, "model.embed_tokens.weight") for rank in range(self._tp)])
        states = embedding[tokens]
        for layer in range(self._config["num_hidden_layers"]):
            at = f"model.layers.{layer}."
            states = states + self._attention(at, self._normed(states, f"{at}input_layernorm.weight"))
            states = states + self._experts(at, self._normed(states, f"{at}post_attention_layernorm.weight"))
        states = self._normed(states, "model.norm.weight")
        heads = [functional.linear(states, self._of(rank, "lm_head.weight")) for rank in range(self._tp)]
        return torch.cat(heads, -1)

    def rollouts(self, count: int, seed: int) -> list[Rollout]:
        """Completions of prompts, both drawn by the seed."""
        chance = torch.Generator().manual_seed(seed)
        tokens = torch.randint(self._config["vocab_size"], (count, PROMPT_TOKENS), generator=chance)
        logprobs = []
        with torch.no_grad():
            for _ in range(NEW_TOKENS):
                last = self.logits(tokens)[:, -1].log_softmax(-1)
                drawn = torch.multinomial(last.exp(), 1, generator=chance)
                logprobs.append(last.gather(1, drawn))
                tokens = torch.cat([tokens, drawn], 1)
        made = zip(tokens.tolist(), torch.cat(logprobs, 1).tolist(), strict=True)
        split = [(row[:PROMPT_TOKENS], row[PROMPT_TOKENS:], of) for row, of in made]
        return [Rollout(prompt, new, of, reward(new)) for prompt, new, of in split]

    def _of(self, rank: int, name: str) -> Tensor:
        return self._weights[Key(rank, name)]

    def _normed(self, states: Tensor, name: str) -> Tensor:
        return functional.rms_norm(states, states.shape[-1:], self._of(0, name), self._config["rms_norm_eps"])

    def _attention(self, at: str, states: Tensor) -> Tensor:
        return sum(self._heads(f"{at}self_attn.", rank, states) for rank in range(self._tp))

    def _heads(self, at: str, rank: int, states: Tensor) -> Tensor:
        """The contribution of this rank's heads."""
        config = self._config
        wide = config["head_dim"]
        heads, kv_heads = (config[name] // self._tp for name in ("num_attention_heads", "num_key_value_heads"))
        fused = functional.linear(states, self._of(rank, f"{at}qkv_proj.weight"))
        parts = fused.unflatten(-1, (-1, wide)).transpose(1, 2).split([heads, kv_heads, kv_heads], 1)
        q, k = (self._turned(self._normed(part, f"{at}{n}_norm.weight")) for n, part in zip("qk", parts, strict=False))
        seen = functional.scaled_dot_product_attention(q, k, parts[2], is_causal=True, enable_gqa=True)
        return functional.linear(seen.transpose(1, 2).flatten(2), self._of(rank, f"{at}o_proj.weight"))

    def _turned(self, states: Tensor) -> Tensor:
        """Rotary embedding of (batch, heads, length, head_dim)."""
        length, wide = states.shape[-2:]
        rates = self._config["rope_theta"] ** (-torch.arange(0, wide, 2) / wide)
        angles = torch.arange(length)[:, None] * rates
        low, high = states.chunk(2, -1)
        sine, cosine = angles.sin(), angles.cos()
        return torch.cat([low * cosine - high * sine, high * cosine + low * sine], -1)

    def _experts(self, at: str, states: Tensor) -> Tensor:
        rows = states.flatten(0, 1)
        odds = functional.linear(rows, self._of(0, f"{at}mlp.gate.weight")).softmax(-1)
        shares, chosen = odds.topk(self._config["num_experts_per_tok"], -1)
        shares = shares / shares.sum(-1, keepdim=True)
        out = torch.zeros_like(rows)
        for expert in range(self._config["num_experts"]):
            row, place = (chosen == expert).nonzero(as_tuple=True)
            for rank in range(self._tp):
                w13, w2 = (self._of(rank, f"{at}mlp.experts.{name}_weight")[expert] for name in ("w13", "w2"))
                gate, up = functional.linear(rows[row], w13).chunk(2, -1)
                added = functional.linear(functional.silu(gate) * up, w2)
                out.index_add_(0, row, added * shares[row, place, None])
        return out.view(states.shape)


def as_stored(array: Any, dtype: Any) -> Tensor:
    """A torch tensor of this dtype over what numpy keeps as an integer of its size."""
    return torch.from_numpy(array).view(dtype)


def _tensors(config: Config, tp: int, quantised: bool) -> Iterator[tuple[Key, tuple[tuple[int, ...], Any]]]:
    """Shape and dtype of all that the ranks have."""
    hidden, wide, experts = (config[name] for name in ("hidden_size", "head_dim", "num_experts"))
    vocabulary, rows = config["vocab_size"] // tp, config["moe_intermediate_size"] // tp
    q, kv = (config[name] * wide // tp for name in ("num_attention_heads", "num_key_value_heads"))
    whole: dict[str, tuple[int, ...]] = {"model.norm.weight": (hidden,)}
    divided = {"model.embed_tokens.weight": (vocabulary, hidden), "lm_head.weight": (vocabulary, hidden)}
    projections: dict[str, tuple[int, ...]] = {}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        whole |= {f"{at}{name}layernorm.weight": (hidden,) for name in ("input_", "post_attention_")}
        whole |= {f"{at}self_attn.{name}_norm.weight": (wide,) for name in "qk"}
        whole |= {f"{at}mlp.gate.weight": (experts, hidden)}
        projections |= {
            f"{at}self_attn.qkv_proj.weight": (q + 2 * kv, hidden),
            f"{at}self_attn.o_proj.weight": (hidden, q),
            f"{at}mlp.experts.w13_weight": (experts, 2 * rows, hidden),
            f"{at}mlp.experts.w2_weight": (experts, hidden, rows),
        }
    yield from ((Key(0, name), (shape, torch.bfloat16)) for name, shape in whole.items())
    for rank in range(tp):
        yield from ((Key(rank, name), (shape, torch.bfloat16)) for name, shape in divided.items())
        for name, shape in projections.items():
            yield Key(rank, name), (shape, torch.float8_e4m3fn if quantised else torch.bfloat16)
            if quantised:
                scales = (*shape[:-2], blocks(shape[-2]), blocks(shape[-1]))
                yield Key(rank, name + _SCALES), (scales, torch.float32)


def _spread(scales: Tensor) -> Tensor:
    """One for each element."""
    return scales.repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN_BYTES) * _ALIGN_BYTES

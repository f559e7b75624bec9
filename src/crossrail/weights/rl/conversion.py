"""Converts a whole checkpoint to an inference rank's tensors with torch alone: what an update must equal, bit for bit.

Nothing here knows of inventories, plans or crossrail's own conversions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from crossrail.weights.rl.serving import Key

Tensor = Any  # torch.Tensor
_BLOCK = 128
_LARGEST = torch.finfo(torch.float8_e4m3fn).max
_SMALLEST = _LARGEST * torch.finfo(torch.float32).tiny


def converted(
    checkpoint: Mapping[str, Tensor], config: Mapping[str, Any], tp: int, quantised: bool
) -> Iterator[tuple[Key, Tensor]]:
    """All tensors of Served. checkpoint: by the names of transformers' files, experts one by one, in float32."""
    for name, tensor in checkpoint.items():
        if "norm." in name or name.endswith("mlp.gate.weight"):
            yield Key(0, name), tensor.bfloat16()
    for rank in range(tp):
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            yield Key(rank, name), checkpoint[name].chunk(tp)[rank].bfloat16()
        for layer in range(config["num_hidden_layers"]):
            for name, tensor in _projections(checkpoint, f"model.layers.{layer}.", config["num_experts"], rank, tp):
                if quantised:
                    values, scales = float8(tensor)
                    yield Key(rank, name), values
                    yield Key(rank, f"{name}_scale_inv"), scales
                else:
                    yield Key(rank, name), tensor.bfloat16()


def mismatches(
    wanted: Iterator[tuple[Key, Tensor]], tensors: Mapping[Key, Tensor], like: Callable[[Tensor], Any]
) -> list[str]:
    """Names of tensors that differ in any bit, or are on one side only. like: Reading.like."""
    found, seen = [], set()
    for key, tensor in wanted:
        seen.add(key)
        if key not in tensors or not _equal(tensor, tensors[key], like):
            found.append(f"{key.name} of rank {key.rank}")
    return found + [f"{key.name} of rank {key.rank}" for key in tensors if key not in seen]


def float8(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Elements as float8_e4m3fn, and the float32 scales of blocks of 128 x 128 of the last two dimensions."""
    high, wide = tensor.shape[-2:]
    blocked = tensor.unflatten(-2, (high // _BLOCK, _BLOCK)).unflatten(-1, (wide // _BLOCK, _BLOCK))
    scales = blocked.abs().amax((-3, -1)).clamp(min=_SMALLEST) / _LARGEST
    values = (blocked / scales[..., :, None, :, None]).to(torch.float8_e4m3fn)
    return values.view(tensor.shape), scales


def _projections(
    checkpoint: Mapping[str, Tensor], at: str, experts: int, rank: int, tp: int
) -> Iterator[tuple[str, Tensor]]:
    def part(name: str, dim: int) -> Tensor:
        return checkpoint[f"{at}{name}_proj.weight"].chunk(tp, dim)[rank]

    yield f"{at}self_attn.qkv_proj.weight", torch.cat([part(f"self_attn.{name}", 0) for name in "qkv"])
    yield f"{at}self_attn.o_proj.weight", part("self_attn.o", 1)
    of = [f"mlp.experts.{expert}" for expert in range(experts)]
    w13 = [torch.cat([part(f"{expert}.gate", 0), part(f"{expert}.up", 0)]) for expert in of]
    yield f"{at}mlp.experts.w13_weight", torch.stack(w13)
    yield f"{at}mlp.experts.w2_weight", torch.stack([part(f"{expert}.down", 1) for expert in of])


def _equal(wanted: Tensor, tensor: Tensor, like: Callable[[Tensor], Any]) -> bool:
    there = torch.from_numpy(like(tensor))
    if wanted.shape != there.shape or wanted.dtype != tensor.dtype:
        return False
    return bool(torch.equal(wanted.contiguous().view(torch.uint8), there.contiguous().view(torch.uint8)))

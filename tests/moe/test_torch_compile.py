"""Layers that torch.compile compiles: rounds in them are as they are without it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import crossrail as xr
from crossrail.integrations.deepep import Buffer
from crossrail.moe import AllToAll, EngineGroup
from crossrail.moe.graph import GraphAllToAll

EXPERTS, HIDDEN, TOP_K, TOKENS = 4, 128, 2, 8
SIZES: dict[str, Any] = {"experts": EXPERTS, "hidden": HIDDEN, "top_k": TOP_K, "max_tokens": TOKENS,
                         "dtype": "float32", "scale_block": None, "out_dtype": "float32"}  # fmt: skip
Layer = Callable[[torch.Tensor], torch.Tensor]


def _routes(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a router: weights, experts."""
    weights, indices = torch.topk(x[:, :EXPERTS].float().softmax(-1), TOP_K)
    return weights.contiguous(), indices


def whole(part: Any) -> Layer:
    """A dispatch and a combine."""

    def layer(x: torch.Tensor) -> torch.Tensor:
        weights, indices = _routes(2 * x)
        got = part.dispatch(2 * x, None, indices)
        return part.combine(got.x * 3, got, weights) + 1

    return layer


def halved(part: Any) -> Layer:
    """In halves, where the experts write to the memory that is read, and others are looked at meanwhile."""

    def layer(x: torch.Tensor) -> torch.Tensor:
        weights, indices = _routes(2 * x)
        opened = part.dispatch_send(2 * x, None, indices, weights)
        part.advance(opened)
        got = part.dispatch_recv(opened)
        y = part.expert_output(got)
        y.copy_(got.x * 3)
        part.check_combine(got)
        part.combine_send(y, got)
        return part.combine_recv(got) + 1

    return layer


def of_deepep(buffer: Buffer) -> Layer:
    """By its calls, with a hook."""

    def layer(x: torch.Tensor) -> torch.Tensor:
        weights, indices = _routes(2 * x)
        got, _, handle, _, hook = buffer.low_latency_dispatch(
            2 * x.bfloat16(), indices, TOKENS, EXPERTS, use_fp8=False, return_recv_hook=True
        )
        assert hook is not None
        hook()
        y = buffer.get_next_low_latency_combine_buffer(handle)
        y.copy_(got * 3)
        combined, _, _ = buffer.low_latency_combine(y, indices, weights, handle, zero_copy=True)
        return combined + 1

    return layer


def check_compiled(layer: Layer) -> None:
    """Against itself, for some numbers of tokens."""
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="eager")
    with torch.no_grad():
        for tokens in (TOKENS, 3):
            x = torch.randn(tokens, HIDDEN)

            given = compiled(x)

            assert torch.equal(given, layer(x))


@pytest.mark.parametrize("kind", ["whole", "halved", "graph"])
def test_a_compiled_layer_gives_what_it_gives_uncompiled(engine: xr.Engine, kind: str) -> None:
    make: Any = GraphAllToAll if kind == "graph" else AllToAll
    with EngineGroup(engine, [engine.address]) as group, make(engine, group, **SIZES) as part:
        check_compiled(halved(part) if kind == "halved" else whole(part))


def test_a_compiled_layer_of_deepeps_calls_gives_what_it_gives_uncompiled(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        with Buffer(dist.group.WORLD, low_latency_mode=True) as buffer:
            check_compiled(of_deepep(buffer))
    finally:
        dist.destroy_process_group()

"""What a caller gives to dispatch and combine: checked, and cut to as many tokens as the round has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from crossrail.errors import UsageError
from crossrail.moe.arrays import Array, to_count
from crossrail.moe.config import Config
from crossrail.moe.row_memory import RowMemory


@dataclass(frozen=True)
class Tokens:
    """Those of a round. x, scales, weights: as RowMemory.given() gives them; routes: int32 [count, top_k] of numpy."""

    count: int
    x: Any
    scales: Any | None
    routes: Array
    weights: Any | None


def tokens_given(
    config: Config,
    memory: RowMemory,
    x: Any,
    scales: Any | None,
    indices: Any,
    weights: Any | None,
    num_tokens: Any | None,
) -> Tokens:
    """The arguments of dispatch_send. UsageError that names the argument, and what it has to be."""
    values = memory.given(x, "x", (config.dtype,), (None, config.hidden))
    count = len(values) if num_tokens is None else to_count(num_tokens, len(values))
    if count > config.max_tokens:
        raise UsageError(f"x has {count} tokens, max_tokens is {config.max_tokens}")
    factors = scales_given(config, memory.given, scales, len(values))
    routes = memory.routes(indices, (len(values), config.top_k))
    given = None if weights is None else weights_given(config, memory, weights, count)
    if given is None and config.node_sums:
        raise UsageError("weights is None: with node_sums dispatch takes them")
    return Tokens(count, values[:count], None if factors is None else factors[:count], routes[:count], given)


def weights_given(config: Config, memory: RowMemory, weights: Any, tokens: int) -> Any:
    """Of so many tokens, [tokens, top_k]; there may be more in what is given."""
    array = memory.given(weights, "weights", ("float32",), (None, config.top_k))
    if len(array) < tokens:
        raise UsageError(f"weights has {len(array)} rows, the round has {tokens} tokens")
    return array[:tokens]


def scales_given(config: Config, given: Callable[..., Any], scales: Any | None, tokens: int) -> Any | None:
    """given: as of RowMemory."""
    if config.blocks == 0:
        if scales is not None:
            raise UsageError("scales are given, and scale_block is None")
        return None
    return given(scales, "scales", ("float32",), (tokens, config.blocks))

"""Checks the arrays that a caller passes to dispatch and combine, and cuts them to the round's number of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from crossrail._torch import is_tensor
from crossrail.errors import UsageError
from crossrail.moe.arrays import Array, check_no_gradient, overlap, to_count
from crossrail.moe.config import OUT_DTYPES, Config, is_flag
from crossrail.moe.rows.interface import RowMemory


class Arrays(Protocol):
    """Arrays of one kind of memory, with RowMemory's methods."""

    def given(self, array: Any, name: str, dtypes: tuple[str, ...], shape: tuple[int | None, ...]) -> Any: ...

    def empty(self, shape: tuple[int, int], dtype: str) -> Any: ...


@dataclass(frozen=True)
class Tokens:
    """A round's tokens. x, scales, weights: as from RowMemory.given(); routes: int32 [count, top_k] of numpy."""

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
    check_count(config, count)
    factors = scales_given(config, memory, scales, len(values))
    routes = memory.routes(indices, (len(values), config.top_k))
    given = None if weights is None else weights_given(config, memory, weights, count)
    if given is None and config.node_sums:
        raise UsageError("weights is None: with node_sums dispatch takes them")
    return Tokens(count, values[:count], None if factors is None else factors[:count], routes[:count], given)


def weights_given(config: Config, arrays: Arrays, weights: Any, tokens: int) -> Any:
    """The weights of so many tokens, [tokens, top_k]; more may be given."""
    array = arrays.given(weights, "weights", ("float32",), (None, config.top_k))
    if len(array) < tokens:
        raise UsageError(f"weights has {len(array)} rows, the round has {tokens} tokens")
    return array[:tokens]


def sums_given(
    config: Config, arrays: Arrays, tokens: int, weights: Any | None, out: Any | None, accumulate: bool
) -> Any:
    """Where the sums of so many tokens go: out, checked, or a new array. weights: None: there are none."""
    if not is_flag(accumulate):
        raise UsageError(f"accumulate is {accumulate!r}, must be True or False")
    if accumulate and out is None:
        raise UsageError("accumulate is set and out is None: there is nothing to add to")
    if weights is None:
        raise UsageError("weights is None, and dispatch was given none")
    shape = (tokens, config.hidden)
    if out is None:
        return arrays.empty(shape, config.out_dtype)
    if isinstance(out, np.ndarray) and not out.flags.writeable:
        raise UsageError("out is read-only, must be an array that can be written to")
    return arrays.given(out, "out", OUT_DTYPES, shape)


def check_apart(out: Any, read: Sequence[Any]) -> None:
    """UsageError where sums would be written over outputs of experts, which other ranks and our own sums still read."""
    if any(overlap(out, one) for one in read):
        raise UsageError(
            "out lies in what expert_output() gave, must be memory of its own: ranks read that for a while"
        )


def outputs_given(config: Config, arrays: Arrays, y: Any, rows: int, in_place: Any | None) -> Any | None:
    """The experts' outputs for so many rows, to be copied; None if they are expert_output()'s array, in_place."""
    if y is None or y is not in_place:
        return arrays.given(y, "y", (config.out_dtype,), (rows, config.hidden))
    if is_tensor(y):
        check_no_gradient(y, "y")
    return None


def check_count(config: Config, tokens: int) -> None:
    """UsageError for more than a rank has room for."""
    if tokens > config.max_tokens:
        raise UsageError(f"x has {tokens} tokens, max_tokens is {config.max_tokens}")


def scales_given(config: Config, arrays: Arrays, scales: Any | None, tokens: int) -> Any | None:
    """The scales of so many tokens."""
    if config.blocks == 0:
        if scales is not None:
            raise UsageError("scales are given, and scale_block is None")
        return None
    return arrays.given(scales, "scales", ("float32",), (tokens, config.blocks))

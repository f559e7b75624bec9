"""Rounds of GraphAllToAll and what they have to give, on whatever device. Imports torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from crossrail.moe import Dispatched
from crossrail.moe.graph import GraphAllToAll, GraphDispatched
from tests.moe.batches import Batch, expected_sums, expert_of_row, outputs
from tests.moe.test_rounds import check_dispatched, first_expert
from tests.support.limits import WAIT_S


def to_host(tensor: Any) -> Any:
    """As numpy, once the current stream is there. Polled: while a thread is in a copy to pageable memory, the driver
    keeps others of the process waiting, as to allocate; and ranks of one process wait for each other.
    """
    if tensor.is_cuda:
        deadline = time.monotonic() + 2 * WAIT_S
        while not torch.cuda.current_stream().query():
            assert time.monotonic() < deadline, "the stream does not end"
            time.sleep(1e-4)
    return tensor.cpu().numpy()


def given(part: GraphAllToAll, batch: Batch) -> tuple[Any, Any, Any, Any]:
    """x, scales, indices and weights on its device."""
    arrays = batch.x, batch.scales, batch.indices, batch.weights
    x, scales, indices, weights = (torch.from_numpy(array).to(part.device) for array in arrays)
    return x.view(torch.float8_e4m3fn), scales, indices, weights


def check(part: GraphAllToAll, got: GraphDispatched, batches: list[Batch]) -> None:
    """Waits for the device."""
    x, scales = to_host(got.x.view(torch.uint8)), to_host(got.scales)
    counts, offsets = to_host(got.counts), to_host(got.offsets)
    rows = int(offsets[-1])
    seen = Dispatched(x[:rows], scales[:rows], counts, offsets, rows, got.round)  # type: ignore[arg-type]
    room = part.config.rows_per_expert if part.config.layout == "masked" else None
    check_dispatched(seen, batches, first_expert(part), part.config.padding, room)  # type: ignore[arg-type]


def made_of(part: GraphAllToAll, got: GraphDispatched) -> Any:
    """What experts make of rows. Waits for the device."""
    x, counts, offsets = (to_host(each) for each in (got.x.view(torch.uint8), got.counts, got.offsets))
    first = first_expert(part)  # type: ignore[arg-type]
    return torch.from_numpy(outputs(x, expert_of_row(counts, offsets, first, got.rows))).to(part.device)


def whole_round(part: GraphAllToAll, rank: int, batches: list[Batch], take: Callable[[Any], Any] = to_host) -> None:
    """take: how sums come to the host."""
    x, scales, indices, weights = given(part, batches[rank])
    got = part.dispatch(x, scales, indices, weights)
    check(part, got, batches)
    sums = part.combine(made_of(part, got), got)
    assert np.array_equal(take(sums), expected_sums(batches[rank]))


def check_writes_to_others(part: GraphAllToAll, batch: Batch) -> None:
    """That its kernels write rows to a rank that they reach in a round, and not when the rounds have ended."""
    x, scales, indices, _ = given(part, batch)
    theirs = next(iter(part._peers.far.reached.values()))
    before = theirs.copy()
    for number, is_written in ((-1, False), (2, True)):
        routes = part._steps.new_routes(len(x))
        routes.kept.copy_(indices)
        part._steps.send(x, scales, routes, torch.tensor([number]))
        assert np.array_equal(theirs, before) is not is_written
        assert bool((routes.where >= 0).any()) is is_written

"""How the rounds of a GraphAllToAll end on all ranks, once they have on one."""

from __future__ import annotations

import gc
import pkgutil
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from crossrail.errors import UsageError, WaitTimeout
from crossrail.moe import AllToAll, PeerFailed
from crossrail.moe.graph import GraphAllToAll, GraphRound
from tests.moe.batches import draw, expected_sums, expert_of_row, outputs
from tests.moe.graph_rounds import given, made_of, whole_round
from tests.moe.ranks import Ranks
from tests.moe.test_rounds import first_expert
from tests.moe.test_torch_gpu import BLOCK, CONFIG, EXPERTS, HIDDEN, TCP, TOKENS, TOP_K, batches_of
from tests.moe.test_torch_graph import dispatch_and_check, until_it_ends
from tests.support.limits import NEVER_S, WAIT_S, never
from tests.support.seeds import Seed


@pytest.mark.parametrize("engine", [{}, TCP], ids=["shm", "tcp"])
def test_a_rank_whose_rounds_have_ended_tells_the_others_why(engine: dict[str, Any], seed: Seed) -> None:
    random = seed.rng()
    batches = [draw(random, TOKENS, HIDDEN, EXPERTS, TOP_K, BLOCK) for _ in range(2)]

    def run(part: GraphAllToAll, rank: int) -> None:
        whole_round(part, rank, batches)
        if rank == 0:
            batches[0].indices[0, 0] = EXPERTS
            with pytest.raises(UsageError, match=f"{EXPERTS}"):
                dispatch_and_check(part, batches[0])
            return
        with pytest.raises(UsageError, match=r"rank 0 .* has closed its AllToAll .*: its round failed: UsageError: "):
            dispatch_and_check(part, batches[rank])

    with Ranks(2, engine, GraphAllToAll, **CONFIG, timeout_s=100 * WAIT_S) as ranks:
        ranks.each(run)


@pytest.mark.parametrize("engine", [{}, TCP], ids=["shm", "tcp"])
def test_a_rank_that_is_dropped_and_not_closed_ends_the_others_rounds(engine: dict[str, Any], seed: Seed) -> None:
    batches = batches_of(seed.rng(), 2)
    with Ranks(2, engine, GraphAllToAll, **CONFIG, timeout_s=100 * WAIT_S) as ranks:
        ranks.each(lambda part, rank: whole_round(part, rank, batches))

        def drop() -> None:
            ranks.parts.pop()
            gc.collect()

        with pytest.warns(ResourceWarning, match=r"^<GraphAllToAll, rank 1 of 2, .* was not closed$"):
            drop()
        with pytest.raises(UsageError, match=r"rank 1 .* has closed its AllToAll .*garbage-collected, and not closed"):
            dispatch_and_check(ranks.parts[0], batches[0])


@pytest.mark.parametrize("engine", [{}, TCP], ids=["shm", "tcp"])
def test_who_leaves_a_with_block_by_an_error_of_its_own_says_which(engine: dict[str, Any], seed: Seed) -> None:
    batches = batches_of(seed.rng(), 2)

    def run(part: GraphAllToAll, rank: int) -> None:
        whole_round(part, rank, batches)
        if rank == 1:
            with pytest.raises(ZeroDivisionError), part:
                raise ZeroDivisionError("no expert of mine")
            return
        with pytest.raises(UsageError, match=r"rank 1 .* its with block failed: ZeroDivisionError: no expert of mine"):
            dispatch_and_check(part, batches[rank])

    with Ranks(2, engine, GraphAllToAll, **CONFIG, timeout_s=100 * WAIT_S) as ranks:
        ranks.each(run)


@pytest.mark.parametrize("engine", [{}, TCP], ids=["shm", "tcp"])
def test_a_refused_call_is_told_to_ranks_of_both_kinds_and_the_round_goes_on_once_it_is_mended(
    engine: dict[str, Any], seed: Seed
) -> None:
    batches = batches_of(seed.rng(), 3)
    config = CONFIG | {"private_tokens": TOKENS * TOP_K, "layout": "masked", "timeout_s": 100 * WAIT_S}
    all_are_told = threading.Barrier(3, timeout=WAIT_S)

    def make(engine: Any, group: Any, **config: Any) -> Any:
        if group.rank == 1:
            return AllToAll(engine, group, node_size=1, **config)
        return GraphAllToAll(engine, group, **config)

    def run(part: Any, rank: int) -> None:
        batch = batches[rank]
        if rank == 1:
            arguments: Any = (batch.x, batch.scales, batch.indices, batch.weights)
        else:
            arguments = given(part, batch)
        if rank == 0:
            x, scales, indices, weights = arguments
            with pytest.raises(UsageError, match="indices has shape"):
                part.dispatch(x, scales, indices[:, 1:].contiguous(), weights)
        else:
            with pytest.raises(PeerFailed, match=told_of("dispatch", "indices has ")) as caught:
                part.dispatch(*arguments)
            assert not caught.value.has_left
            assert "go on with it by dispatch_recv(open_rounds[-1])" in str(caught.value)
        all_are_told.wait()
        got = part.dispatch(*arguments) if rank == 0 else part.dispatch_recv(part.open_rounds[-1])
        if rank == 1:
            y: Any = outputs(got.x, expert_of_row(got.counts, got.offsets, first_expert(part), got.rows))
        else:
            y = made_of(part, got)
        if rank == 0:
            with pytest.raises(UsageError, match="y has shape"):
                part.combine(y[1:], got)
        else:
            with pytest.raises(PeerFailed, match=told_of("combine", "y has ")) as caught:
                part.combine(y, got)
            assert str(caught.value).endswith("Our part is sent: go on by combine_recv(), not by combine()")
        all_are_told.wait()
        sums = part.combine(y, got) if rank == 0 else part.combine_recv(got)
        assert np.array_equal(np.asarray(sums), expected_sums(batch))
        assert part.open_rounds == ()

    with Ranks(3, engine, make, **config) as ranks:
        for _ in range(2):
            ranks.each(run)


@pytest.mark.parametrize("engine", [{}, TCP], ids=["shm", "tcp"])
def test_a_refused_call_is_told_by_check_once_and_again_by_the_wait_that_gives_up(
    engine: dict[str, Any], seed: Seed
) -> None:
    batches = batches_of(seed.rng(), 3)
    with Ranks(3, engine, GraphAllToAll, **CONFIG, timeout_s=100 * WAIT_S) as ranks:
        ranks.each(lambda part, rank: whole_round(part, rank, batches))
        x, scales, indices, _ = given(ranks.parts[0], batches[0])
        with pytest.raises(UsageError, match="indices has shape"):
            ranks.parts[0].dispatch_send(x, scales, indices[:, 1:].contiguous())
        part = ranks.parts[2]
        part.check()  # which waits for nobody yet
        opened = part.dispatch_send(*given(part, batches[2]))
        with pytest.raises(PeerFailed, match=told_of("dispatch", "indices has ")):
            until_it_ends(part)
        never(part.check, "it is told again")  # which returns nothing
        part.timeout_s = NEVER_S
        with pytest.raises(WaitTimeout, match=told_of("dispatch", "indices has ")):
            recv_and_check(part, opened)


def recv_and_check(part: GraphAllToAll, opened: GraphRound) -> None:
    part.dispatch_recv(opened)
    part.check()


def told_of(half: str, why: str) -> str:
    return rf"rank 0 .* has not sent its {half} of round \d.*: its {half}(_send)? failed: UsageError: {why}"


def go_on(part: GraphAllToAll, arguments: tuple[Any, ...]) -> None:
    got = part.dispatch(*arguments)
    part.combine(made_of(part, got), got)
    until_it_ends(part)


def _to_another_expert(indices: torch.Tensor) -> None:
    indices[0, 0] = next(expert for expert in range(EXPERTS) if expert not in indices[0])


def _in_another_order(indices: torch.Tensor) -> None:
    """As many tokens to each expert."""
    experts = [set(row.tolist()) for row in indices]
    other = next(token for token in range(1, len(experts)) if experts[token] != experts[0])
    indices[[0, other]] = indices[[other, 0]]


@pytest.mark.parametrize("change", [_to_another_expert, _in_another_order])
@pytest.mark.parametrize("engine", [{}, TCP], ids=["shm", "tcp"])
def test_ranks_of_one_dp_group_that_route_differently_are_named_on_all(
    engine: dict[str, Any], change: Callable[[torch.Tensor], None], seed: Seed
) -> None:
    random = seed.rng()
    batches = [draw(random, TOKENS, HIDDEN, EXPERTS, TOP_K, BLOCK) for _ in range(2)]

    def run(part: GraphAllToAll, rank: int) -> str:
        whole_round(part, rank // 2, batches)
        x, scales, indices, weights = given(part, batches[rank // 2])
        if rank == 1:
            indices = indices.clone()  # its mate has the same memory
            change(indices)
        with pytest.raises(UsageError) as caught:
            go_on(part, (x, scales, indices, weights))
        return str(caught.value)

    config = CONFIG | {"private_tokens": TOKENS * TOP_K}
    with Ranks(4, engine, GraphAllToAll, dp_size=2, timeout_s=100 * WAIT_S, **config) as ranks:
        texts = ranks.each(run)
    assert all("indices of round 2 send" in text for text in texts)
    for rank, text in enumerate(texts[:2]):
        assert f"those of rank {1 - rank}" in text or "has closed its AllToAll" in text
    assert any("both must hold the same tokens and route them alike" in text for text in texts[:2])


@pytest.mark.parametrize(
    ("kind", "part", "lacks"),
    [
        (AllToAll, "crossrail.moe.all_to_all.row_memory", lambda engine, *_: engine.address.name == "rank-1"),
        (GraphAllToAll, "crossrail.moe.graph.all_to_all.row_memory", lambda e, *_: e.address.name == "rank-1"),
        (AllToAll, "crossrail.moe.all_to_all.Board", lambda engine, *_: engine.address.name == "rank-1"),
        (GraphAllToAll, "crossrail.moe.graph.all_to_all.Board", lambda engine, *_: engine.address.name == "rank-1"),
        (GraphAllToAll, "crossrail.moe.peers.Far", lambda *arguments: arguments[3] == 1),
        (GraphAllToAll, "crossrail.moe.graph.steps.GraphMemory", lambda *arguments: arguments[2] == 1),
    ],
    ids=["AllToAll's device", "device", "AllToAll's board", "board", "rows", "kernels"],
)
def test_a_rank_without_memory_or_device_is_named_on_all_before_they_have_waited(
    kind: Any, part: str, lacks: Callable[..., bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    make = pkgutil.resolve_name(part)

    def made(*arguments: Any) -> Any:
        if lacks(*arguments):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return make(*arguments)

    monkeypatch.setattr(part, made)

    def run(engine: Any, group: Any, **config: Any) -> Any:
        with pytest.raises(Exception, match="CUDA out of memory") as caught:
            kind(engine, group, **config)
        return SimpleNamespace(rank=group.rank, text=str(caught.value), close=lambda: None)

    with Ranks(3, {}, run, timeout_s=100 * WAIT_S, **CONFIG) as ranks:
        for rank in ranks.parts:
            assert rank.rank == 1 or rank.text.startswith("rank 1 could not be set up: ")

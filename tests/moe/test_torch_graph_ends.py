"""How the rounds of a GraphAllToAll end on all ranks, once they have on one."""

from __future__ import annotations

import gc
import pkgutil
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from crossrail.errors import UsageError, WaitTimeout
from crossrail.moe import AllToAll, PeerFailed
from crossrail.moe.graph import GraphAllToAll
from tests.moe.batches import draw
from tests.moe.graph_rounds import given, made_of, whole_round
from tests.moe.ranks import Ranks
from tests.moe.test_torch_gpu import BLOCK, CONFIG, EXPERTS, HIDDEN, TCP, TOKENS, TOP_K, batches_of
from tests.moe.test_torch_graph import dispatch_and_check, until_it_ends
from tests.support.limits import NEVER_S, WAIT_S
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
def test_a_refused_call_is_told_to_ranks_whose_calls_wait_and_to_ranks_of_graphs_when_they_give_up(
    engine: dict[str, Any], seed: Seed
) -> None:
    """The first and the last are GraphAllToAlls, the last is not patient."""
    batches = batches_of(seed.rng(), 3)
    config = CONFIG | {"private_tokens": TOKENS * TOP_K, "layout": "masked", "timeout_s": 100 * WAIT_S}
    has_been_told = threading.Event()

    def make(engine: Any, group: Any, **config: Any) -> Any:
        if group.rank == 1:
            return AllToAll(engine, group, node_size=1, **config)
        return GraphAllToAll(engine, group, **config)

    def run(part: Any, rank: int) -> None:
        why = r"rank 0 .* has not sent its dispatch of round 1.*: its dispatch_send failed: UsageError: indices has "
        if rank == 0:
            x, scales, indices, _ = given(part, batches[0])
            with pytest.raises(UsageError, match="indices has shape"):
                part.dispatch_send(x, scales, indices[1:])
            assert has_been_told.wait(WAIT_S)
        elif rank == 1:
            batch = batches[1]
            opened = part.dispatch_send(batch.x, batch.scales, batch.indices)
            with pytest.raises(PeerFailed, match=why):
                part.dispatch_recv(opened)
            has_been_told.set()
        else:
            assert has_been_told.wait(WAIT_S)
            part.timeout_s = 2 * NEVER_S
            with pytest.raises(WaitTimeout, match=why):
                dispatch_and_check(part, batches[2])

    with Ranks(3, engine, make, **config) as ranks:
        ranks.each(run)


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

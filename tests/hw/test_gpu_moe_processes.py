"""GraphAllToAll of several processes on one true GPU, which map each other's rows: CUDA's virtual memory management."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import pytest

import crossrail as xr
from crossrail.errors import CrossrailError
from crossrail.moe import EngineGroup
from crossrail.moe.graph import GraphAllToAll
from tests.moe.graph_rounds import whole_round
from tests.moe.test_torch_gpu import CONFIG, TCP, batches_of
from tests.support.limits import WAIT_S
from tests.support.seeds import Seed

resource_tracker.ensure_running()  # it keeps a descriptor, from the first spawn on

pytestmark = [pytest.mark.hw, pytest.mark.timeout(180)]

RANKS = 2
ENDLESS = 1 << 30


def run_rank(pipe: Connection, rank: int, options: dict[str, Any], seed: int, rounds: int) -> None:
    """Of a process of its own. Sends its address, takes all; then sends how it reaches the others, and each round."""
    random = np.random.default_rng(seed)
    with xr.Engine(f"rank-{rank}", **options) as engine:
        pipe.send(engine.address.to_bytes())
        addresses = [xr.Address.from_bytes(one) for one in pipe.recv()]
        try:
            with (
                EngineGroup(engine, addresses) as group,
                GraphAllToAll(engine, group, device="cuda:0", timeout_s=WAIT_S, **CONFIG) as part,
            ):
                pipe.send(part.explain())
                for number in range(rounds):
                    try:
                        # As users do it: on the default stream the whole process waits in the copy.
                        whole_round(part, rank, batches_of(random, RANKS), lambda sums: sums.cpu().numpy())
                    except AssertionError:  # rounds that have ended are empty; why, is told by the next call
                        part.check()
                        raise
                    pipe.send(number)
        except CrossrailError as error:
            pipe.send(type(error).__name__)
    pipe.send("ended")


@contextmanager
def ranks_of(options: dict[str, Any], seed: int, rounds: int) -> Iterator[list[tuple[BaseProcess, Connection]]]:
    context = multiprocessing.get_context("spawn")
    ranks = []
    try:
        for rank in range(RANKS):
            ours, theirs = context.Pipe()
            child = context.Process(target=run_rank, args=(theirs, rank, options, seed, rounds), daemon=True)
            child.start()
            theirs.close()
            ranks.append((child, ours))
        addresses = [told(pipe) for _, pipe in ranks]
        for _, pipe in ranks:
            pipe.send(addresses)
        yield ranks
    finally:
        for child, pipe in ranks:
            child.kill()
            child.join(WAIT_S)
            pipe.close()


def told(pipe: Connection) -> Any:
    assert pipe.poll(3 * WAIT_S), "the rank says nothing"
    return pipe.recv()


@pytest.mark.parametrize("options", [{}, TCP], ids=["shm", "tcp"])
def test_rounds_are_exact(options: dict[str, Any], seed: Seed) -> None:
    with ranks_of(options, int(seed.rng().integers(1 << 30)), 8) as ranks:
        for rank, (_, pipe) in enumerate(ranks):
            explained = told(pipe)
            way = "by the engine, tcp: " if options else "kernels write to their memory"
            assert f"ranks {1 - rank}: {way}" in explained
            assert ("rows: in memory of the host, pinned for cuda:0" in explained) == bool(options)
            assert [told(pipe) for _ in range(9)] == [*range(8), "ended"]


def test_a_killed_rank_ends_the_others_rounds_and_nothing_else(seed: Seed) -> None:
    """Whose kernels may be writing to its memory, which is there as long as they have it."""
    with ranks_of({}, int(seed.rng().integers(1 << 30)), ENDLESS) as ranks:
        (_, pipe), (victim, other) = ranks
        told(pipe)
        while told(pipe) != 3:
            pass
        victim.kill()
        other.close()
        seen = 3
        while isinstance(said := told(pipe), int):
            seen = said
        assert said == "PeerLost" and seen < ENDLESS
        assert told(pipe) == "ended"

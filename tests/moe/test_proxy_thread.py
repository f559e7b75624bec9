"""proxy="thread": rows for ranks that share no memory are posted by a thread of the proxy's own."""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np
import pytest

import crossrail as xr
from crossrail import _core, sim
from crossrail.moe import AllToAll, EngineGroup
from crossrail.moe.outcome import Outcome
from tests.conftest import EngineFactory
from tests.moe.batches import Batch, draw
from tests.moe.rank import BLOCK, CONFIG, EXPERTS, HIDDEN, TOKENS, TOP_K
from tests.moe.ranks import Ranks, run_ranks
from tests.moe.test_rounds import whole_round
from tests.moe.test_sim import Town
from tests.support.limits import NEVER_S, WAIT_S, eventually
from tests.support.seeds import Seed
from tests.support.threads import tasks_named

FAR: dict[str, Any] = {"node_size": 1, "private_tokens": 1, **CONFIG}  # so few that there are remainders
TCP = {"transport": "tcp", "rails": ["127.0.0.1"]}


def batches_of(seed: Seed, ranks: int) -> list[Batch]:
    random = seed.rng()
    return [draw(random, TOKENS, HIDDEN, EXPERTS, TOP_K, BLOCK, 0.1) for _ in range(ranks)]


@pytest.mark.parametrize("engine", [{}, TCP], ids=["shm", "tcp"])
def test_rounds_are_exact(nothing_leaks: None, engine: dict[str, Any], seed: Seed) -> None:
    with Ranks(3, engine, proxy="thread", **FAR) as ranks:
        assert len(tasks_named("crossrail-moe")) == 3
        for _ in range(20):
            batches = batches_of(seed, 3)
            ranks.each(lambda part, rank, batches=batches: whole_round(part, rank, batches))
    assert tasks_named("crossrail-moe") == []


def test_some_ranks_have_a_thread_and_some_have_none(nothing_leaks: None, seed: Seed) -> None:
    batches = batches_of(seed, 2)
    with Ranks(2, None, proxy="caller", **FAR) as ranks:
        ranks.parts[1]._far.start_thread(None)
        ranks.each(lambda part, rank: whole_round(part, rank, batches))


def test_two_rounds_under_way(nothing_leaks: None, seed: Seed) -> None:
    with Ranks(2, None, proxy="thread", **FAR) as ranks:

        def play(part: Any, rank: int) -> None:
            sent = [part.dispatch_send(b[rank].x, b[rank].scales, b[rank].indices, b[rank].weights) for b in both]
            for opened in sent:
                got = part.dispatch_recv(opened)
                part.combine_send(np.zeros((got.rows, HIDDEN), np.float32), got)
            for opened in sent:
                assert not part.combine_recv(opened).any()

        for _ in range(10):
            both = [batches_of(seed, 2) for _ in range(2)]
            ranks.each(play)


def test_it_runs_where_it_is_told(nothing_leaks: None, seed: Seed) -> None:
    cpu = max(os.sched_getaffinity(0))
    with Ranks(2, None, proxy="thread", proxy_cpu=cpu, **FAR) as ranks:
        assert [os.sched_getaffinity(task) for task in tasks_named("crossrail-moe")] == [{cpu}] * 2
        batches = batches_of(seed, 2)
        ranks.each(lambda part, rank: whole_round(part, rank, batches))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"proxy": "thread", "proxy_cpu": 4000}, r"proxy_cpu is 4000, .* it may on \d"),
        ({"proxy": "thread", "proxy_cpu": -1}, "proxy_cpu"),
        ({"proxy": "gpu"}, "proxy is 'gpu', must be one of caller, thread"),
        ({"proxy_cpu": 0}, "proxy_cpu is 0, and proxy is 'caller'"),
    ],
)
def test_what_cannot_be_is_refused(nothing_leaks: None, options: dict[str, Any], words: str) -> None:
    with pytest.raises(xr.UsageError, match=words):
        Ranks(2, None, **options, **FAR)
    assert tasks_named("crossrail-moe") == []


def test_a_rank_whose_thread_cannot_be_is_named_on_all_at_once(nothing_leaks: None, open_engine: EngineFactory) -> None:
    engines = [open_engine(f"rank-{rank}") for rank in range(2)]
    groups = [EngineGroup(engine, [one.address for one in engines]) for engine in engines]

    def make(rank: int) -> str:
        options = {"proxy": "thread", "proxy_cpu": 4000 if rank == 1 else None, "timeout_s": 100 * WAIT_S}
        with pytest.raises(xr.CrossrailError) as caught:
            AllToAll(engines[rank], groups[rank], **(FAR | options))
        return str(caught.value)

    other, bad = run_ranks(2, make)
    assert bad.startswith("proxy_cpu is 4000")
    assert other == f"rank 1 could not be set up: {bad}"
    for group in groups:
        group.close()


def test_there_is_one_thread_at_most(nothing_leaks: None) -> None:
    with Ranks(2, None, proxy="thread", **FAR) as ranks:
        with pytest.raises(xr.UsageError, match="a thread posts already"):
            ranks.parts[0]._far.start_thread(None)
        assert len(tasks_named("crossrail-moe")) == 2


def test_simulated_engines_have_no_threads(seed: Seed) -> None:
    with sim.World(seed.number()) as world, pytest.raises(xr.UsageError, match="simulated engines have no threads"):
        Town(world, 2, "cx7", proxy="thread")


def test_an_engine_closed_in_a_round_ends_it(nothing_leaks: None, seed: Seed) -> None:
    batch = batches_of(seed, 1)[0]
    with Ranks(2, None, proxy="thread", **FAR) as ranks:
        part = ranks.parts[0]
        opened = part.dispatch_send(batch.x, batch.scales, batch.indices)
        timer = threading.Timer(NEVER_S, ranks.engines[0].close)
        timer.start()
        with pytest.raises(xr.EngineClosed):
            part.dispatch_recv(opened)
        timer.join()


def test_who_looks_before_its_own_thread_has_posted_finds_itself_late(nothing_leaks: None, seed: Seed) -> None:
    batches = batches_of(seed, 2)
    cpu = max(os.sched_getaffinity(0))
    with Ranks(2, None, proxy="thread", proxy_cpu=cpu, **FAR) as ranks:
        looked = threading.Barrier(2)

        def play(part: Any, rank: int) -> Outcome | None:
            mine, found = batches[rank], None
            if rank == 0:
                os.sched_setaffinity(0, {cpu})  # of this thread: the one that posts waits for this core, mostly
            else:
                looked.wait(WAIT_S)
            opened = part.dispatch_send(mine.x, mine.scales, mine.indices, mine.weights)
            if rank == 0:
                found = part._far.wait("routes", opened.number, 0.0)
                looked.wait(WAIT_S)
            got = part.dispatch_recv(opened)
            part.combine(np.zeros((got.rows, HIDDEN), np.float32), got)
            return found

        # The other one has not sent either: it is named once our thread has posted.
        eventually(lambda: ranks.each(play)[0] == Outcome("late", 0), "a look before the thread has posted")


@pytest.mark.parametrize("mode", ["raise", "mask"])
def test_a_wait_that_our_own_thread_keeps_names_this_rank_and_can_be_repeated(
    nothing_leaks: None, monkeypatch: pytest.MonkeyPatch, mode: str, seed: Seed
) -> None:
    batches = batches_of(seed, 2)
    options = FAR | ({"on_lost": "mask", "private_tokens": None} if mode == "mask" else {})
    with Ranks(2, None, proxy="thread", **options) as ranks:
        sent = [
            part.dispatch_send(b.x, b.scales, b.indices, b.weights)
            for part, b in zip(ranks.parts, batches, strict=True)
        ]
        part = ranks.parts[0]
        with monkeypatch.context() as patched:
            patched.setattr(part._far, "wait", lambda *_: Outcome("late", 0))
            patched.setattr(part._far, "has_come", lambda *_: False)
            part.timeout_s = NEVER_S
            with pytest.raises(xr.WaitTimeout, match=r"this rank \(0\) has not posted its own part yet") as raised:
                part.dispatch_recv(sent[0])
        assert "rank 1" not in str(raised.value)
        part.timeout_s = WAIT_S

        def finish(part: Any, rank: int) -> None:
            got = part.dispatch_recv(sent[rank])
            part.combine(np.zeros((got.rows, HIDDEN), np.float32), got)

        ranks.each(finish)


def test_who_gives_up_since_it_was_late_itself_says_so(
    nothing_leaks: None, monkeypatch: pytest.MonkeyPatch, seed: Seed
) -> None:
    batches = batches_of(seed, 2)
    with Ranks(2, None, proxy="thread", **FAR) as ranks:
        late, other = ranks.parts
        opened = late.dispatch_send(batches[0].x, batches[0].scales, batches[0].indices)
        with monkeypatch.context() as patched:
            patched.setattr(late._far, "wait", lambda *_: Outcome("late", 0))
            late.timeout_s = NEVER_S
            with pytest.raises(xr.WaitTimeout):
                late.dispatch_recv(opened)
        late.close()
        with pytest.raises(xr.UsageError, match=r"rank 0 .* had not posted its own part in time"):
            whole_round(other, 1, batches)


def test_a_dropped_proxy_ends_its_thread_before_it_lets_go_of_placements(nothing_leaks: None) -> None:
    """The thread may still have orders that go by them."""
    threads: list[list[int]] = []

    class Watched(_core.moe.Placement):
        def __del__(self) -> None:
            threads.append(tasks_named("crossrail-moe"))

    layout = _core.moe.Layout(world=2, experts=2, top_k=1, max_tokens=1, node_of_rank=[0, 1])
    parts = ("routes_in", "routes_out", "rows_in", "results_in", "rows_out", "results_out",
             "routes_parity_bytes", "rows_parity_bytes")  # fmt: skip
    route_bytes = 64 + _core.moe.FAREWELL_BYTES
    memory = _core.moe.FarMemory(**dict.fromkeys(parts, 0), route_bytes=route_bytes, stride_bytes=64, y_bytes=64)
    with xr.Engine("here", transport="shm") as engine:
        proxy = _core.moe.Proxy(engine, layout, 0, memory, engine.alloc(4096), engine.alloc(4096))
        proxy.start_thread(None)
        proxy.send_remainder(1, Watched(layout, np.zeros((2, 2), np.int32)))
        assert len(tasks_named("crossrail-moe")) == 1 and threads == []
        del proxy
        assert threads == [[]]


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # that it has threads when it forks
def test_a_forked_child_is_told_and_can_end(nothing_leaks: None, seed: Seed) -> None:
    batches = batches_of(seed, 2)
    with Ranks(2, None, proxy="thread", **FAR) as ranks:
        child = os.fork()
        if child == 0:
            try:
                ranks.parts[0]._far.stop_thread()
            except Exception as error:
                os._exit(7 if "fork" in str(error) else 8)
            os._exit(9)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        ranks.each(lambda part, rank: whole_round(part, rank, batches))

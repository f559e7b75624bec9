"""GraphAllToAll in host memory, where a half waits in its call: rounds, whom it meets, and what ends it."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from crossrail.errors import CrossrailError, PeerLost, UsageError, WaitTimeout
from crossrail.moe import AllToAll, CapacityExceeded
from crossrail.moe.graph import GraphAllToAll, GraphDispatched
from tests.moe import graph_rounds, test_torch_gpu
from tests.moe.batches import Batch, draw, expected_sums
from tests.moe.graph_rounds import given, made_of, whole_round
from tests.moe.ranks import Ranks, errors_of
from tests.moe.test_torch_gpu import BLOCK, CONFIG, EXPERTS, HIDDEN, TCP, TOKENS, TOP_K, batches_of
from tests.support.limits import WAIT_S
from tests.support.seeds import Seed

SPLIT = (0, 4, EXPERTS - 4)


def has_ended(part: GraphAllToAll) -> bool:
    try:
        return part._thread.proxy.failure() is not None
    except CrossrailError:
        return True


def until_it_ends(part: GraphAllToAll) -> None:
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        part.check()
        time.sleep(0.001)


def dispatch_and_check(part: GraphAllToAll, batch: Batch) -> None:
    """Which, at the latest, says what has ended the rounds: a dispatch whose wait is given up ends as others do."""
    part.dispatch(*given(part, batch))
    part.check()


@pytest.mark.parametrize("engine", [{}, TCP], ids=["shm", "tcp"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"private_tokens": 1},
        {"layout": "grouped", "padding": 4},
        {"proxy_cpu": min(os.sched_getaffinity(0))},
        {"peer_access": False},
        {"peer_access": False, "private_tokens": 1},
        {"experts_per_rank": SPLIT},
        {"experts_per_rank": SPLIT, "private_tokens": 1, "layout": "grouped", "padding": 4},
    ],
    ids=str,
)
def test_rounds_are_exact(engine: dict[str, Any], options: dict[str, Any], seed: Seed) -> None:
    random = seed.rng()
    with Ranks(3, engine, GraphAllToAll, **CONFIG, **options) as ranks:
        explained = ranks.parts[0].explain()
        assert "kernels: reference" in explained
        if not options.get("peer_access", True):
            assert "other ranks: by the engine, peer_access is False" in explained
        elif engine:
            assert "ranks 1, 2: by the engine, tcp: " in explained
        else:
            assert "ranks 1, 2: kernels write to their memory" in explained
        for _ in range(6):
            batches = batches_of(random, 3)
            ranks.each(lambda part, rank, b=batches: whole_round(part, rank, b))


@pytest.mark.parametrize("private_tokens", [None, 1])
def test_ranks_that_write_to_others_themselves_among_those_that_do_not(private_tokens: int | None, seed: Seed) -> None:
    random = seed.rng()

    def make(engine: Any, group: Any, **config: Any) -> Any:
        return GraphAllToAll(engine, group, peer_access=group.rank != 1, **config)

    with Ranks(3, None, make, private_tokens=private_tokens, **CONFIG) as ranks:
        assert sorted(ranks.parts[0]._peers.far.reached) == [1, 2] and not ranks.parts[1]._peers.far.reached
        for _ in range(6):
            batches = batches_of(random, 3)
            ranks.each(lambda part, rank, b=batches: whole_round(part, rank, b))


def test_the_engine_moves_no_rows_to_ranks_that_kernels_reach(seed: Seed) -> None:
    random = seed.rng()
    moved = []
    for peer_access in (True, False):
        with Ranks(2, None, GraphAllToAll, peer_access=peer_access, private_tokens=TOKENS * TOP_K, **CONFIG) as ranks:
            before = ranks.engines[0].stats()["bytes_written"]
            batches = [draw(random, TOKENS, HIDDEN, EXPERTS, TOP_K, BLOCK) for _ in range(2)]
            ranks.each(lambda part, rank, b=batches: whole_round(part, rank, b))
            moved.append(ranks.engines[0].stats()["bytes_written"] - before)
    routes = 4 * EXPERTS
    assert moved[0] == routes < moved[1]


def test_kernels_write_nothing_to_others_once_the_rounds_have_ended(seed: Seed) -> None:
    batch = draw(seed.rng(), 4, HIDDEN, EXPERTS, TOP_K, BLOCK)
    with Ranks(2, None, GraphAllToAll, **CONFIG) as ranks:
        graph_rounds.check_writes_to_others(ranks.parts[0], batch)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_any_number_of_ranks(size: int, seed: Seed) -> None:
    """With five, the last has no expert."""
    random = seed.rng()
    with Ranks(size, None, GraphAllToAll, **CONFIG) as ranks:
        for _ in range(3):
            batches = batches_of(random, size)
            ranks.each(lambda part, rank, b=batches: whole_round(part, rank, b))


@pytest.mark.parametrize("split", [None, SPLIT], ids=str)
@pytest.mark.parametrize("engine", [{}, TCP], ids=["shm", "tcp"])
def test_ranks_of_both_kinds(engine: dict[str, Any], split: tuple[int, ...] | None, seed: Seed) -> None:
    """One with rows in host memory among others whose rounds are on streams."""
    random = seed.rng()

    def make(engine: Any, group: Any, **config: Any) -> Any:
        if group.rank == 1:
            return AllToAll(engine, group, node_size=1, **config)
        return GraphAllToAll(engine, group, **config)

    def run(part: Any, rank: int, batches: list[Batch]) -> None:
        (test_torch_gpu.whole_round if rank == 1 else whole_round)(part, rank, batches)

    config = CONFIG | {"experts_per_rank": split, "private_tokens": TOKENS}
    with Ranks(3, engine, make, layout="grouped", **config) as ranks:
        ranks.parts[1]._memory.device = torch.device("cpu")  # as that test asks
        for _ in range(4):
            batches = batches_of(random, 3)
            ranks.each(lambda part, rank, b=batches: run(part, rank, b))


@pytest.mark.parametrize("engine", [{}, TCP], ids=["shm", "tcp"])
def test_two_rounds_under_way(engine: dict[str, Any], seed: Seed) -> None:
    random = seed.rng()

    def overlapped(part: GraphAllToAll, rank: int, both: list[list[Batch]]) -> None:
        opened = [part.dispatch_send(*given(part, batches[rank])) for batches in both]
        with pytest.raises(UsageError, match=r"takes the place of <GraphRound of .*>, which is open"):
            part.dispatch_send(*given(part, both[0][rank]))
        received = [part.dispatch_recv(one) for one in opened]
        for got, batches in zip(received, both, strict=True):
            graph_rounds.check(part, got, batches)
        for got in reversed(received):
            part.combine_send(made_of(part, got), got)
        for got, batches in zip(received, both, strict=True):
            assert np.array_equal(part.combine_recv(got).numpy(), expected_sums(batches[rank]))

    with Ranks(2, engine, GraphAllToAll, **CONFIG) as ranks:
        for _ in range(4):
            both = [batches_of(random, 2), batches_of(random, 2)]
            ranks.each(lambda part, rank, both=both: overlapped(part, rank, both))


@pytest.mark.parametrize("as_tensor", [True, False])
def test_fewer_tokens_than_rows(as_tensor: bool, seed: Seed) -> None:
    random = seed.rng()
    batch = draw(random, TOKENS, HIDDEN, EXPERTS, TOP_K, BLOCK)
    used = Batch(batch.x[:5], batch.scales[:5], batch.indices[:5], batch.weights[:5])

    def run(part: GraphAllToAll, rank: int) -> None:
        count = torch.tensor([5]) if as_tensor else 5
        got = part.dispatch(*given(part, batch), num_tokens=count)
        graph_rounds.check(part, got, [used, used])
        sums = part.combine(made_of(part, got), got).numpy()
        assert np.array_equal(sums[:5], expected_sums(used)) and not sums[5:].any()

    with Ranks(2, None, GraphAllToAll, **CONFIG) as ranks:
        ranks.each(run)


def test_adds_to_what_there_is_and_takes_other_weights(seed: Seed) -> None:
    batches = batches_of(seed.rng(), 2)

    def run(part: GraphAllToAll, rank: int) -> None:
        x, scales, indices, weights = given(part, batches[rank])
        got = part.dispatch(x, scales, indices.long())
        out = torch.full((len(x), HIDDEN), 3.0)
        assert part.combine(made_of(part, got), got, weights, out=out, accumulate=True) is out
        assert np.array_equal(out.numpy(), 3 + expected_sums(batches[rank]))

    with Ranks(2, None, GraphAllToAll, **CONFIG) as ranks:
        ranks.each(run)


# ---- what ends the rounds


def test_a_round_that_is_not_ended_does_not_hang_the_next_of_its_parity(seed: Seed) -> None:
    """One whose experts failed, and that nobody has any more; the round after it, of the other parity, is whole."""
    batch = draw(seed.rng(), 4, HIDDEN, EXPERTS, TOP_K, BLOCK)
    with Ranks(1, None, GraphAllToAll, **CONFIG) as ranks:
        part = ranks.parts[0]
        part.timeout_s = 0.2
        part.dispatch(*given(part, batch))
        whole_round(part, 0, [batch])
        with pytest.raises(UsageError, match=r"round 3 was begun, and round 1 is not ended after 0\.2 s"):
            dispatch_and_check(part, batch)


def test_sums_are_nan_once_the_rounds_have_ended(seed: Seed) -> None:
    """Of a graph that is replayed nobody asks whether they are to be used."""
    batch = draw(seed.rng(), 4, HIDDEN, EXPERTS, TOP_K, BLOCK)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        with Ranks(1, None, GraphAllToAll, **CONFIG) as ranks:
            part = ranks.parts[0]
            got = part.dispatch(*given(part, batch))
            part.combine_send(made_of(part, got), got)
            out = torch.zeros((4, HIDDEN), dtype=dtype)
            part._thread.stop()
            part._thread.proxy.wait("results", got.round.number.data_ptr(), 0)
            part._steps.sum(out, got.round.routes, got.round.weights, False, got.round.number)
            assert out.isnan().all()


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("engine", [{}, TCP], ids=["shm", "tcp"])
def test_sums_are_right_or_nan_when_the_rounds_end_between_the_halves(
    engine: dict[str, Any], size: int, seed: Seed
) -> None:
    """Of a rank whose thread gave up after rows were told: what others hear of it is true."""
    batches = batches_of(seed.rng(), size)
    before = [Batch(b.x, b.scales, b.indices, b.weights + 1) for b in batches]  # whose results are stale

    def run(part: GraphAllToAll, rank: int) -> None:
        for _ in range(2):
            whole_round(part, rank, before)
        got = part.dispatch(*given(part, batches[rank]))
        y = made_of(part, got) + 1
        if rank == 0:
            part._thread.stop()
        part.combine_send(y, got)
        sums = torch.zeros((len(batches[rank].x), HIDDEN))
        part._thread.wait("results", got.round.number, 0, lambda: None)
        part._steps.sum(sums, got.round.routes, got.round.weights, False, got.round.number)
        batch = batches[rank]
        wanted = expected_sums(batch) + np.where(batch.indices >= 0, batch.weights, 0).sum(axis=1)[:, None]
        assert np.array_equal(sums.numpy(), wanted) or sums.isnan().all()

    with Ranks(size, engine, GraphAllToAll, **CONFIG) as ranks:
        for part in ranks.parts:
            part.timeout_s = 0.5
        ranks.each(run)
        for part in ranks.parts:
            part._is_told = True  # of what was done to it


def test_who_closes_after_its_last_round_ends_no_others_rounds(seed: Seed) -> None:
    """Others may be told later than it knows by signals that the round is over."""
    random = seed.rng()
    for _ in range(8):
        with Ranks(2, None, GraphAllToAll, **CONFIG) as ranks:
            batches = batches_of(random, 2)

            def run(part: GraphAllToAll, rank: int, batches: list[Batch] = batches) -> None:
                whole_round(part, rank, batches)
                if rank == 0:
                    part.close()
                else:
                    time.sleep(0.25)  # a farewell counts after a tenth of a second
                    part.check()

            ranks.each(run)


def test_what_is_mapped_of_others_is_given_back_by_close(seed: Seed) -> None:
    batches = batches_of(seed.rng(), 2)
    with Ranks(2, None, GraphAllToAll, **CONFIG) as ranks:
        mapped = [weakref.ref(theirs) for part in ranks.parts for theirs in part._peers.far.reached.values()]
        ranks.each(lambda part, rank: whole_round(part, rank, batches))
        for part in ranks.parts:
            part.close()
        gc.collect()
        assert [ref() for ref in mapped] == [None, None]


def test_a_round_of_another_is_refused(seed: Seed) -> None:
    batch = draw(seed.rng(), 4, HIDDEN, EXPERTS, TOP_K, BLOCK)
    with Ranks(1, None, GraphAllToAll, **CONFIG) as ranks, Ranks(1, None, GraphAllToAll, **CONFIG) as others:
        part, other = ranks.parts[0], others.parts[0]
        opened = part.dispatch_send(*given(part, batch))
        with pytest.raises(UsageError, match="of another GraphAllToAll"):
            other.dispatch_recv(opened)
        got = part.dispatch_recv(opened)
        none: Any = None
        y = made_of(part, got)
        calls: dict[str, Any] = {
            "combine": partial(part.combine, y),
            "check_combine": part.check_combine,
            "combine_send": partial(part.combine_send, y),
            "combine_recv": part.combine_recv,
        }
        for name, call in calls.items():
            with pytest.raises(UsageError, match=f"^{name} was given NoneType, must be GraphDispatched$"):
                call(none)
        part.combine(made_of(part, got), got)


@pytest.mark.parametrize("engine", [{}, TCP], ids=["shm", "tcp"])
def test_a_rank_that_does_not_come_is_named_after_the_timeout(engine: dict[str, Any], seed: Seed) -> None:
    batches = batches_of(seed.rng(), 3)
    with Ranks(3, engine, GraphAllToAll, **CONFIG, timeout_s=0.5) as ranks:

        def run(part: GraphAllToAll, rank: int) -> None:
            if rank == 1:
                return
            with pytest.raises(WaitTimeout, match=r"rank 1 .* has not sent its dispatch of round 1 within 0.5 s"):
                dispatch_and_check(part, batches[rank])
            with pytest.raises(WaitTimeout, match="make a new one, on all ranks"):
                part.dispatch_send(*given(part, batches[rank]))

        ranks.each(run)


class _Signalled(Exception):
    """What the handler raises, as that of Ctrl-C does."""


@contextmanager
def signalled() -> Iterator[None]:
    """The main thread gets a signal every now and then; the handler raises once, when it is likely to wait."""
    seen: list[int] = []
    is_over = threading.Event()

    def handle(number: int, _frame: object) -> None:
        seen.append(number)
        if len(seen) == 3:
            raise _Signalled

    def send() -> None:
        while not is_over.wait(0.1):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, handle)
    sender = threading.Thread(target=send)
    sender.start()
    try:
        yield
    finally:
        is_over.set()
        sender.join()
        signal.signal(signal.SIGUSR1, before)


def test_a_signal_ends_a_half_that_waits_and_it_may_be_called_again(seed: Seed) -> None:
    batches = batches_of(seed.rng(), 2)
    with Ranks(2, None, GraphAllToAll, **CONFIG) as ranks:
        part = ranks.parts[0]
        opened = part.dispatch_send(*given(part, batches[0]))
        with signalled(), pytest.raises(_Signalled):
            part.dispatch_recv(opened)

        def dispatch(part: GraphAllToAll, rank: int) -> GraphDispatched:
            return part.dispatch_recv(opened) if rank == 0 else part.dispatch(*given(part, batches[1]))

        got = ranks.each(dispatch)
        graph_rounds.check(part, got[0], batches)
        part.combine_send(made_of(part, got[0]), got[0])
        with signalled(), pytest.raises(_Signalled):
            part.combine_recv(got[0])

        def combine(part: GraphAllToAll, rank: int) -> Any:
            return part.combine_recv(got[0]) if rank == 0 else part.combine(made_of(part, got[1]), got[1])

        for rank, sums in enumerate(ranks.each(combine)):
            assert np.array_equal(graph_rounds.to_host(sums), expected_sums(batches[rank]))
        ranks.each(lambda part, rank: whole_round(part, rank, batches))


@pytest.mark.parametrize("engine", [{}, TCP], ids=["shm", "tcp"])
def test_a_rank_that_closes_ends_the_others_rounds(engine: dict[str, Any], seed: Seed) -> None:
    batches = batches_of(seed.rng(), 2)
    with Ranks(2, engine, GraphAllToAll, **CONFIG) as ranks:

        def run(part: GraphAllToAll, rank: int) -> None:
            whole_round(part, rank, batches)
            if rank == 1:
                part.close()
                return
            with pytest.raises(UsageError, match=r"rank 1 .* has closed its AllToAll before its dispatch of round 2"):
                dispatch_and_check(part, batches[rank])

        ranks.each(run)


@pytest.mark.parametrize("engine", [{}, TCP], ids=["shm", "tcp"])
def test_a_lost_rank_ends_the_others_rounds(engine: dict[str, Any], seed: Seed) -> None:
    batches = batches_of(seed.rng(), 3)
    with Ranks(3, engine, GraphAllToAll, **CONFIG) as ranks:
        ranks.each(lambda part, rank: whole_round(part, rank, batches))
        ranks.engines[2].close()

        def run(part: GraphAllToAll, rank: int) -> None:
            if rank == 2:
                return
            with pytest.raises((PeerLost, UsageError), match="rank 2"):
                dispatch_and_check(part, batches[rank])

        ranks.each(run)


@pytest.mark.parametrize("expert", [(1 << 32) + 3, -(1 << 32) - 1])
def test_an_index_beyond_32_bits_is_none_of_an_experts(expert: int, seed: Seed) -> None:
    batch = draw(seed.rng(), 4, HIDDEN, EXPERTS, TOP_K, BLOCK)
    with Ranks(1, None, GraphAllToAll, **CONFIG) as ranks:
        part = ranks.parts[0]
        x, scales, indices, weights = given(part, batch)
        indices = indices.long()
        indices[2, 1] = expert
        part.dispatch_send(x, scales, indices, weights)
        with pytest.raises(UsageError, match=f"token 2, k 1 goes to expert {(1 << 31) - 1}"):
            until_it_ends(part)


@pytest.mark.parametrize("expert", [EXPERTS, -2])
def test_an_index_of_no_expert_ends_the_rounds(expert: int, seed: Seed) -> None:
    batch = draw(seed.rng(), 4, HIDDEN, EXPERTS, TOP_K, BLOCK)
    batch.indices[2, 1] = expert
    with Ranks(1, None, GraphAllToAll, **CONFIG) as ranks:
        part = ranks.parts[0]
        with pytest.raises(UsageError, match=f"token 2, k 1 goes to expert {expert}"):
            dispatch_and_check(part, batch)


def test_more_rows_than_there_is_room_for(seed: Seed) -> None:
    batch = draw(seed.rng(), TOKENS, HIDDEN, EXPERTS, TOP_K, BLOCK)
    batch.indices[:, 0], batch.indices[:, 1:] = 2, -1

    with Ranks(2, None, GraphAllToAll, **CONFIG, capacity_factor=1.0) as ranks:
        errors = errors_of(ranks, lambda part, rank: dispatch_and_check(part, batch), CapacityExceeded)
        assert len({str(error) for error in errors}) == 1
        for part in ranks.parts:
            part.close()  # which has been told


def test_more_rows_than_there_is_room_for_in_a_group_of_both_kinds(seed: Seed) -> None:
    """The other kind waits in its calls for what ends the round, also when its place is taken."""
    batch = draw(seed.rng(), TOKENS, HIDDEN, EXPERTS, TOP_K, BLOCK)
    batch.indices[:, 0], batch.indices[:, 1:] = 2, -1

    def make(engine: Any, group: Any, **config: Any) -> Any:
        if group.rank == 1:
            return AllToAll(engine, group, node_size=1, **config)
        return GraphAllToAll(engine, group, **config)

    def run(part: Any, rank: int) -> None:
        part.dispatch(*given(part, batch))
        if rank != 1:
            part.check()

    options = {"capacity_factor": 1.0, "layout": "masked", "private_tokens": TOKENS}
    with Ranks(3, None, make, **CONFIG, **options) as ranks:
        ranks.parts[1].device = torch.device("cpu")  # as given() asks
        errors = errors_of(ranks, run, CapacityExceeded)
        assert len({str(error) for error in errors}) == 1
        part: Any = ranks.parts[1]
        part._placing.settle(1, 0.0)  # which waits for their results, and has them


@pytest.mark.parametrize("kernel", ["share", "send"])
def test_a_dispatch_whose_launch_fails_ends_the_rounds_and_others_are_told(kernel: str, seed: Seed) -> None:
    batches = batches_of(seed.rng(), 2)

    def refuse(*arguments: object) -> None:
        raise RuntimeError("no memory to compile it")

    def run(part: GraphAllToAll, rank: int) -> None:
        whole_round(part, rank, batches)
        if rank == 0:
            setattr(part._steps.kernels, kernel, refuse)
            with pytest.raises(RuntimeError, match="no memory to compile it"):
                part.dispatch_send(*given(part, batches[rank]))
            with pytest.raises(CrossrailError, match=r"dispatch_send failed after a part of it was sent: .*a new one"):
                part.dispatch_send(*given(part, batches[rank]))
            return
        with pytest.raises(UsageError, match=r"rank 0 .* has closed its AllToAll before its .*dispatch of round 2"):
            dispatch_and_check(part, batches[rank])

    with Ranks(2, None, GraphAllToAll, **CONFIG) as ranks:
        ranks.each(run)


def test_a_dispatch_that_was_cut_short_does_not_hang_those_behind_it(seed: Seed) -> None:
    """As where half of it was captured, and is replayed."""
    batch = draw(seed.rng(), 4, HIDDEN, EXPERTS, TOP_K, BLOCK)
    with Ranks(1, None, GraphAllToAll, **CONFIG) as ranks:
        part = ranks.parts[0]
        part.timeout_s = 0.2
        whole_round(part, 0, [batch])
        part._thread.open(torch.empty(1, dtype=torch.int64), 0)
        with pytest.raises(UsageError, match=r"round 3 was begun, and round 2 has not told its routes after 0\.2 s"):
            dispatch_and_check(part, batch)


def test_a_failure_that_no_call_has_seen_is_raised_by_close(seed: Seed) -> None:
    batch = draw(seed.rng(), 4, HIDDEN, EXPERTS, TOP_K, BLOCK)
    batch.indices[0, 0] = EXPERTS
    with Ranks(1, None, GraphAllToAll, **CONFIG) as ranks:
        part = ranks.parts[0]
        part.dispatch_send(*given(part, batch))
        deadline = time.monotonic() + WAIT_S
        while not has_ended(part):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        with pytest.raises(UsageError, match=f"goes to expert {EXPERTS}"):
            part.close()
        part.close()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda a: a | {"x": a["x"].float()}, "x is of type float32"),
        (lambda a: a | {"x": a["x"][:, :-1]}, "x has strides"),
        (lambda a: a | {"scales": None}, "scales is NoneType, must be a tensor"),
        (lambda a: a | {"indices": a["indices"].float()}, "indices is of type float32, must be of int32 or int64"),
        (lambda a: a | {"indices": a["indices"].numpy()}, "indices is ndarray, must be a tensor of torch on cpu"),
        (lambda a: a | {"weights": a["weights"][:2].contiguous()}, r"weights has shape \[2, 3\]"),
        (lambda a: a | {"num_tokens": 13}, r"num_tokens is 13, must be in 0..4"),
    ],
)
def test_refuses(change: Any, words: str, seed: Seed) -> None:
    batch = draw(seed.rng(), 4, HIDDEN, EXPERTS, TOP_K, BLOCK)
    with Ranks(1, None, GraphAllToAll, **CONFIG) as ranks:
        part = ranks.parts[0]
        arguments = change(dict(zip(("x", "scales", "indices", "weights"), given(part, batch), strict=True)))
        with pytest.raises(UsageError, match=words):
            part.dispatch_send(**arguments)
        whole_round(part, 0, [batch])


def test_halves_out_of_order_are_refused(seed: Seed) -> None:
    batch = draw(seed.rng(), 4, HIDDEN, EXPERTS, TOP_K, BLOCK)
    with Ranks(1, None, GraphAllToAll, **CONFIG) as ranks:
        part = ranks.parts[0]
        opened = part.dispatch_send(*given(part, batch))
        with pytest.raises(UsageError, match="combine_recv of a round that has had dispatch_send"):
            part.combine_recv(opened)
        got = part.dispatch_recv(opened)
        with pytest.raises(UsageError, match="dispatch_recv of a round that has had dispatch_recv"):
            part.dispatch_recv(opened)
        with pytest.raises(UsageError, match="weights has shape"):
            part.combine(made_of(part, got), got, torch.ones(3, 3))
        part.combine(made_of(part, got), got)


@pytest.mark.parametrize("engine", [{"polling": "manual"}], ids=str)
def test_refuses_engines_without_a_thread(engine: dict[str, Any]) -> None:
    with pytest.raises(CrossrailError, match="polling='manual'"):
        Ranks(1, engine, GraphAllToAll, **CONFIG)

"""Exchanges of bytes between the ranks of an EngineGroup."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

import crossrail as xr
from crossrail.moe import AllToAll, EngineGroup
from tests.conftest import EngineFactory
from tests.moe.rank import CONFIG
from tests.moe.ranks import run_ranks
from tests.support.limits import NEVER_S, WAIT_S, eventually


@contextmanager
def waiting(group: EngineGroup, data: bytes) -> Iterator[Future[list[bytes]]]:
    """group.all_gather(data) on a thread of its own; from when what it sent first is in a pool of the others."""
    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(group.all_gather, data, WAIT_S)
        eventually(lambda: any(transfer.done for _, transfer in group._sent), "the first message")
        yield future


def test_all_get_what_each_gave_by_rank_also_when_some_run_ahead(open_engine: EngineFactory) -> None:
    engines = [open_engine(f"rank-{rank}") for rank in range(4)]
    addresses = [engine.address for engine in engines]
    groups = [EngineGroup(engine, addresses) for engine in engines]
    sizes = [0, 1, 50_000, 300_000]

    def exchange(rank: int) -> list[list[bytes]]:
        return [
            groups[rank].all_gather(bytes([number, rank]) * sizes[(rank + number) % 4], WAIT_S) for number in range(5)
        ]

    for told in run_ranks(4, exchange):
        for number, gathered in enumerate(told):
            assert gathered == [bytes([number, rank]) * sizes[(rank + number) % 4] for rank in range(4)]
    for group in groups:
        group.close()


def test_a_rank_that_does_not_come_is_named(open_engine: EngineFactory) -> None:
    here, other = open_engine("rank-0"), open_engine("rank-1")
    with EngineGroup(here, [here.address, other.address]) as group:
        with pytest.raises(xr.WaitTimeout, match=r"nothing arrived from ranks \[1\]"):
            group.all_gather(b"", NEVER_S)
        other.close()
        with pytest.raises(xr.PeerLost, match=r"rank 1 \('rank-1'\) was lost: .*closed.*Next: see whether it runs"):
            group.all_gather(b"", WAIT_S)


@pytest.mark.parametrize("stood_s", [0.0, 3.0])
def test_a_rank_that_was_given_up_and_is_back_takes_part_in_the_next_group(
    open_engine: EngineFactory, stood_s: float
) -> None:
    """As one that was frozen for longer than peer_timeout_s: it is no other engine, and all make another group. Where
    it stood for longer still, its own link is one of before, too, which ends as soon as it is used: in that group.
    """
    tcp: dict[str, Any] = {"transport": "tcp", "rails": ["127.0.0.1"], "peer_timeout_s": 0.5}
    engines = [open_engine("rank-0", **tcp, heartbeat_s=0.1), open_engine("rank-1", **tcp, polling="manual")]
    addresses = [engine.address for engine in engines]

    def gather() -> list[list[bytes]]:
        groups = [EngineGroup(engine, addresses) for engine in engines]
        has_all = threading.Event()

        def exchange(rank: int) -> list[bytes]:
            gathered = groups[rank].all_gather(bytes([rank]), WAIT_S)
            # Else nobody drives it, and what the other sent stays unconfirmed.
            while rank == 1 and not has_all.is_set():
                engines[1].progress()
            has_all.set()
            return gathered

        try:
            return run_ranks(2, exchange)
        finally:
            for group in groups:
                group.close()

    assert gather() == [[b"\0", b"\1"]] * 2
    memory = [engine.alloc(64) for engine in engines]
    engines[0].submit_write(memory[0], memory[1].descriptor)  # to who stands still meanwhile
    eventually(lambda: engines[0].peer_state(addresses[1]) == "lost", "the loss")
    time.sleep(stood_s)

    assert gather() == [[b"\0", b"\1"]] * 2


def test_group_that_cannot_be_made_leaves_it_to_the_one_there_is_to_see_who_is_lost(open_engine: EngineFactory) -> None:
    here, other = open_engine("rank-0"), open_engine("rank-1")
    addresses = [here.address, other.address]
    with EngineGroup(here, addresses) as group:
        here.connect(other.address, WAIT_S)
        other.close()
        eventually(lambda: here.peer_state(addresses[1]) == "lost", "the loss")

        with pytest.raises(xr.UsageError, match="open receive pool"):
            EngineGroup(here, addresses)

        assert here.peer_state(addresses[1]) == "lost"
        with pytest.raises(xr.PeerLost, match="rank 1"):
            group.all_gather(b"", NEVER_S)


def test_addresses_have_our_own_once(open_engine: EngineFactory) -> None:
    here, other = open_engine("rank-0"), open_engine("rank-1")
    for addresses in ([other.address], [here.address, here.address]):
        with pytest.raises(xr.UsageError, match="must have it once"):
            EngineGroup(here, addresses)


@pytest.mark.parametrize("looks", [False, True], ids=["idle", "waiting"])
def test_what_comes_before_its_group_is_made_is_kept_for_it(open_engine: EngineFactory, looks: bool) -> None:
    """As when ranks go on without one that died: one begins while the other still has the group of before."""
    engines = [open_engine(f"rank-{rank}") for rank in range(3)]
    addresses = [engine.address for engine in engines]
    before = [EngineGroup(engine, addresses) for engine in engines[:2]]
    before[1].close()
    with EngineGroup(engines[1], addresses[:2]) as ahead, waiting(ahead, b"early") as gathered:
        if looks:  # the one that is behind is told, the other goes on waiting
            with pytest.raises(
                xr.UsageError, match=r"'rank-1' is in another group now.*rank 2 is nobody there, 'rank-2'"
            ):
                before[0].all_gather(b"", WAIT_S)
        before[0].close()
        with EngineGroup(engines[0], addresses[:2]) as behind:
            assert behind.all_gather(b"late", WAIT_S) == [b"late", b"early"]
        assert gathered.result(WAIT_S) == [b"late", b"early"]


def test_what_is_of_no_group_is_refused_and_does_not_keep_a_group_from_closing(open_engine: EngineFactory) -> None:
    here, other = open_engine("rank-0"), open_engine("rank-1")
    with EngineGroup(here, [here.address, other.address]) as group:
        other.submit_send(here.address, b"hello").wait(WAIT_S)
        with pytest.raises(xr.UsageError, match="'rank-1' is not of a group"):
            group.all_gather(b"", WAIT_S)
        other.submit_send(here.address, b"hello").wait(WAIT_S)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_rank_that_gave_up_waiting_and_begins_anew_meets_those_that_come_late(
    open_engine: EngineFactory, transport: str
) -> None:
    """They do not take what it gave when it waited in vain: nobody says of that exchange that all have given."""
    engines = [open_engine(f"rank-{rank}", transport=transport) for rank in range(2)]
    groups = [EngineGroup(engine, [engine.address for engine in engines]) for engine in engines]
    for _ in range(2):
        with pytest.raises(xr.WaitTimeout, match=r"nothing arrived from ranks \[1\]"):
            AllToAll(engines[0], groups[0], **(CONFIG | {"timeout_s": NEVER_S}))
    run_ranks(2, lambda rank: AllToAll(engines[rank], groups[rank], **CONFIG, timeout_s=WAIT_S).close())
    for group in groups:
        group.close()


class Interrupted:
    """A group whose first exchange is followed by Ctrl-C."""

    def __init__(self, group: EngineGroup) -> None:
        self._group = group
        self.rank = group.rank
        self.size = group.size

    def all_gather(self, data: bytes, timeout_s: float) -> list[bytes]:
        self._group.all_gather(data, timeout_s)
        raise KeyboardInterrupt


def test_a_rank_that_began_anew_between_two_exchanges_is_told_to_all(open_engine: EngineFactory) -> None:
    engines = [open_engine(f"rank-{rank}") for rank in range(2)]
    groups = [EngineGroup(engine, [engine.address for engine in engines]) for engine in engines]

    def begin(rank: int) -> None:
        if rank == 0:
            with pytest.raises(KeyboardInterrupt):
                AllToAll(engines[rank], Interrupted(groups[rank]), **CONFIG, timeout_s=WAIT_S)
        with pytest.raises(xr.CrossrailError, match="is due: a rank gave up and started again"):
            AllToAll(engines[rank], groups[rank], **CONFIG, timeout_s=WAIT_S)
        AllToAll(engines[rank], groups[rank], **CONFIG, timeout_s=WAIT_S).close()

    run_ranks(2, begin)
    for group in groups:
        group.close()


def test_what_comes_before_the_next_group_of_the_same_ranks_is_made_is_kept_for_it(open_engine: EngineFactory) -> None:
    engines = [open_engine(f"rank-{rank}") for rank in range(2)]
    addresses = [engine.address for engine in engines]
    before = [EngineGroup(engine, addresses) for engine in engines]
    assert run_ranks(2, lambda rank: before[rank].all_gather(b"first", WAIT_S)) == [[b"first"] * 2] * 2
    before[0].close()
    with EngineGroup(engines[0], addresses) as ahead, waiting(ahead, b"early") as gathered:
        before[1].close()
        with EngineGroup(engines[1], addresses) as behind:
            assert behind.all_gather(b"late", WAIT_S) == [b"early", b"late"]
        assert gathered.result(WAIT_S) == [b"early", b"late"]


@pytest.mark.parametrize("remakes", [False, True], ids=["with-the-same-group", "with-another"])
def test_a_rank_that_gave_up_its_first_exchange_is_met_in_the_next(open_engine: EngineFactory, remakes: bool) -> None:
    engines = [open_engine(f"rank-{rank}") for rank in range(3)]
    addresses = [engine.address for engine in engines]
    groups = [EngineGroup(engine, addresses) for engine in engines]
    with pytest.raises(xr.WaitTimeout):
        groups[0].all_gather(b"in vain", NEVER_S)
    if remakes:
        groups[0].close()
        groups[0] = EngineGroup(engines[0], addresses)
    assert run_ranks(3, lambda rank: groups[rank].all_gather(bytes([rank]), WAIT_S)) == [[b"\0", b"\1", b"\2"]] * 3
    for group in groups:
        group.close()


@pytest.mark.parametrize("remakes", [False, True], ids=["with-the-same-group", "with-another"])
def test_a_rank_that_gave_up_a_later_exchange_meets_those_that_are_told(
    open_engine: EngineFactory, remakes: bool
) -> None:
    engines = [open_engine(f"rank-{rank}") for rank in range(3)]
    addresses = [engine.address for engine in engines]
    groups = [EngineGroup(engine, addresses) for engine in engines]
    run_ranks(3, lambda rank: groups[rank].all_gather(b"", WAIT_S))
    with pytest.raises(xr.WaitTimeout):
        groups[0].all_gather(b"in vain", NEVER_S)

    def exchange(rank: int) -> list[bytes]:
        if rank > 0:
            with pytest.raises(xr.CrossrailError, match=r"rank 0 \('rank-0'\) gave up and started again"):
                groups[rank].all_gather(b"", WAIT_S)
            if remakes and rank == 1:
                groups[rank].close()
                groups[rank] = EngineGroup(engines[rank], addresses)
        return groups[rank].all_gather(bytes([rank]), WAIT_S)

    assert run_ranks(3, exchange) == [[bytes([rank]) for rank in range(3)]] * 3
    for group in groups:
        group.close()

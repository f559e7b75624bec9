"""Exchanges of bytes between the ranks of an EngineGroup."""

import pytest

import crossrail as xr
from crossrail.moe import AllToAll, EngineGroup
from tests.conftest import EngineFactory
from tests.moe.rank import CONFIG
from tests.moe.ranks import run_ranks
from tests.support.limits import NEVER_S, WAIT_S


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
        with pytest.raises(xr.PeerLost, match="rank 1 "):
            group.all_gather(b"", WAIT_S)


def test_addresses_have_our_own_once(open_engine: EngineFactory) -> None:
    here, other = open_engine("rank-0"), open_engine("rank-1")
    for addresses in ([other.address], [here.address, here.address]):
        with pytest.raises(xr.UsageError, match="must have it once"):
            EngineGroup(here, addresses)


def test_ranks_given_other_addresses_are_found_out(open_engine: EngineFactory) -> None:
    engines = [open_engine(f"rank-{rank}") for rank in range(2)]
    addresses = [engine.address for engine in engines]
    groups = [EngineGroup(engines[0], addresses), EngineGroup(engines[1], addresses[::-1])]

    def exchange(rank: int) -> None:
        with pytest.raises(xr.UsageError, match="other addresses than we were"):
            groups[rank].all_gather(b"", WAIT_S)

    run_ranks(2, exchange)
    for group in groups:
        group.close()


@pytest.mark.parametrize("looks", [False, True], ids=["idle", "waiting"])
def test_what_comes_before_its_group_is_made_is_kept_for_it(open_engine: EngineFactory, looks: bool) -> None:
    """As when ranks go on without one that died: one begins while the other still has the group of before."""
    engines = [open_engine(f"rank-{rank}") for rank in range(3)]
    addresses = [engine.address for engine in engines]
    before = [EngineGroup(engine, addresses) for engine in engines[:2]]
    before[1].close()
    with EngineGroup(engines[1], addresses[:2]) as ahead:
        with pytest.raises(xr.WaitTimeout):
            ahead.all_gather(b"early", NEVER_S)  # what it sent is in the other's pool by now
        if looks:
            with pytest.raises(xr.UsageError, match="'rank-1' is in another group now"):
                before[0].all_gather(b"", WAIT_S)
        before[0].close()
        with EngineGroup(engines[0], addresses[:2]) as behind:
            assert behind.all_gather(b"late", WAIT_S) == [b"late", b"early"]


def test_what_is_of_no_group_is_refused_and_does_not_keep_a_group_from_closing(open_engine: EngineFactory) -> None:
    here, other = open_engine("rank-0"), open_engine("rank-1")
    with EngineGroup(here, [here.address, other.address]) as group:
        other.submit_send(here.address, b"hello").wait(WAIT_S)
        with pytest.raises(xr.UsageError, match="'rank-1' is not of a group"):
            group.all_gather(b"", WAIT_S)
        other.submit_send(here.address, b"hello").wait(WAIT_S)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_rank_that_gave_up_waiting_and_began_anew_is_told_to_all(open_engine: EngineFactory, transport: str) -> None:
    engines = [open_engine(f"rank-{rank}", transport=transport) for rank in range(2)]
    groups = [EngineGroup(engine, [engine.address for engine in engines]) for engine in engines]
    with pytest.raises(xr.WaitTimeout, match=r"nothing arrived from ranks \[1\]"):
        AllToAll(engines[0], groups[0], **(CONFIG | {"timeout_s": NEVER_S}))

    def begin(rank: int) -> None:
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
    with EngineGroup(engines[0], addresses) as ahead:
        with pytest.raises(xr.WaitTimeout):
            ahead.all_gather(b"early", NEVER_S)  # what it sent is in the other's pool by now
        before[1].close()
        with EngineGroup(engines[1], addresses) as behind:
            assert behind.all_gather(b"late", WAIT_S) == [b"early", b"late"]


@pytest.mark.parametrize("remakes", [False, True], ids=["with-the-same-group", "with-another"])
def test_a_rank_that_gave_up_and_made_another_group_meets_those_that_are_told(
    open_engine: EngineFactory, remakes: bool
) -> None:
    engines = [open_engine(f"rank-{rank}") for rank in range(3)]
    addresses = [engine.address for engine in engines]
    with EngineGroup(engines[0], addresses) as first, pytest.raises(xr.WaitTimeout):
        first.all_gather(b"in vain", NEVER_S)
    groups = [EngineGroup(engine, addresses) for engine in engines]

    def exchange(rank: int) -> list[bytes]:
        if rank > 0:
            groups[rank].all_gather(b"", WAIT_S)  # with what the other gave before it gave up
            with pytest.raises(xr.CrossrailError, match=r"rank 0 \('rank-0'\) gave up and started again"):
                groups[rank].all_gather(b"", WAIT_S)
            if remakes and rank == 1:
                groups[rank].close()
                groups[rank] = EngineGroup(engines[rank], addresses)
        return groups[rank].all_gather(bytes([rank]), WAIT_S)

    assert run_ranks(3, exchange) == [[bytes([rank]) for rank in range(3)]] * 3
    for group in groups:
        group.close()

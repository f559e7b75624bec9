"""Exchanges of bytes between the ranks of an EngineGroup."""

import pytest

import crossrail as xr
from crossrail.moe import EngineGroup
from tests.conftest import EngineFactory
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
        with pytest.raises(xr.WaitTimeout, match=r"nothing came of ranks \[1\]"):
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

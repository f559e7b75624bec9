"""Ranks that are not in the same group: they were given other addresses, or what they sent before comes late."""

import threading
from typing import Any

import pytest

import crossrail as xr
from crossrail.moe import AllToAll, EngineGroup
from crossrail.moe.packets import PART_BYTES, Call, Elsewhere, Failed, Kind, Packet, Stray, given, ids_of, name_of
from tests.conftest import EngineFactory
from tests.moe.rank import CONFIG
from tests.moe.ranks import run_ranks
from tests.support.limits import NEVER_S, WAIT_S, eventually

TRANSPORTS: dict[str, dict[str, Any]] = {
    "shm": {"transport": "shm"},
    "tcp": {"transport": "tcp", "rails": ["127.0.0.1"]},
}


@pytest.fixture(params=TRANSPORTS)
def engines(open_engine: EngineFactory, request: pytest.FixtureRequest) -> list[xr.Engine]:
    return [open_engine(f"rank-{rank}", **TRANSPORTS[request.param]) for rank in range(5)]


def addresses_of(engines: list[xr.Engine]) -> list[xr.Address]:
    return [engine.address for engine in engines]


def test_ranks_given_other_addresses_are_told_both_ways(engines: list[xr.Engine]) -> None:
    addresses = addresses_of(engines[:2])
    groups = [EngineGroup(engines[0], addresses), EngineGroup(engines[1], addresses[::-1])]
    ids = [address.incarnation[:8] for address in addresses]

    def exchange(rank: int) -> str:
        with pytest.raises(xr.UsageError, match="other addresses than we were") as caught:
            groups[rank].all_gather(b"", WAIT_S)
        return str(caught.value)

    told = run_ranks(2, exchange)
    for rank, other in ((0, 1), (1, 0)):
        assert f"'rank-{other}' is in another group now" in told[rank]
        assert f"rank 0 is 'rank-{other}' ({ids[other]}) there, 'rank-{rank}' ({ids[rank]}) here" in told[rank]
    for group in groups:
        group.close()


# What rank 4 is given where the others are given ranks 0 to 4.
WRONG = {"order": [1, 0, 2, 3, 4], "one-less": [0, 1, 2, 4], "one-mate": [0, 4]}


@pytest.mark.parametrize("remakes", [False, True], ids=["same-groups", "other-groups"])
@pytest.mark.parametrize("wrong", WRONG)
def test_all_are_told_and_meet_at_once_when_they_are_given_the_right_ones(
    engines: list[xr.Engine], wrong: str, remakes: bool
) -> None:
    addresses = addresses_of(engines)
    groups = [EngineGroup(engine, addresses) for engine in engines[:4]]
    groups.append(EngineGroup(engines[4], [addresses[rank] for rank in WRONG[wrong]]))
    all_told = threading.Barrier(5)

    def begin(rank: int) -> None:
        # Those whom the strayed one does not know are told by those whom it does.
        with pytest.raises(xr.UsageError, match="is in another group now: it was given other addresses than we were"):
            AllToAll(engines[rank], groups[rank], **CONFIG, timeout_s=WAIT_S)
        all_told.wait(WAIT_S)
        if remakes or rank == 4:
            groups[rank].close()
            groups[rank] = EngineGroup(engines[rank], addresses)
        AllToAll(engines[rank], groups[rank], **CONFIG, timeout_s=WAIT_S).close()

    run_ranks(5, begin)
    for group in groups:
        group.close()


@pytest.mark.parametrize("wrong", WRONG)
def test_who_has_not_been_told_goes_on_with_those_who_begin_anew(engines: list[xr.Engine], wrong: str) -> None:
    """Ranks that do not wait for each other between the two attempts: none needs a third one."""
    addresses = addresses_of(engines)

    def begin(rank: int) -> list[bytes]:
        given_first = [addresses[other] for other in WRONG[wrong]] if rank == 4 else addresses
        with EngineGroup(engines[rank], given_first) as group:
            try:
                return group.all_gather(bytes([rank]), WAIT_S)
            except xr.UsageError as error:
                assert "other addresses than we were" in str(error)
        with EngineGroup(engines[rank], addresses) as group:
            return group.all_gather(bytes([rank]), WAIT_S)

    assert run_ranks(5, begin) == [[bytes([rank]) for rank in range(5)]] * 5


def test_ranks_that_change_sides_are_told_again(engines: list[xr.Engine]) -> None:
    """Each has had the group of the other before: that makes neither of them the one that is behind."""
    orders = [addresses_of(engines[:2]), addresses_of(engines[:2])[::-1]]
    both_told = threading.Barrier(2)

    def exchange(rank: int) -> None:
        for attempt in range(3):
            with EngineGroup(engines[rank], orders[(rank + attempt) % 2]) as group:
                with pytest.raises(xr.UsageError, match="other addresses than we were"):
                    group.all_gather(b"", WAIT_S)
            both_told.wait(WAIT_S)

    run_ranks(2, exchange)


def test_an_engine_that_was_opened_anew_is_another_one(engines: list[xr.Engine], open_engine: EngineFactory) -> None:
    """By the same name: ranks 0 and 2 have its new address, rank 1 its old one at first."""
    old = addresses_of(engines[:3])
    engines[2].close()
    anew = [*engines[:2], open_engine("rank-2", **TRANSPORTS[engines[0].address.transports[0]])]
    addresses = addresses_of(anew)
    with EngineGroup(anew[0], addresses) as group, pytest.raises(xr.WaitTimeout):
        group.all_gather(b"in vain", NEVER_S)

    def begin(rank: int) -> list[bytes]:
        with EngineGroup(anew[rank], old if rank == 1 else addresses) as group:
            try:
                return group.all_gather(bytes([rank]), WAIT_S)
            except xr.UsageError as error:
                assert "rank 2 is 'rank-2' (" in str(error)
            except xr.PeerLost:
                assert rank == 1  # its engine finds that nobody is there
        with EngineGroup(anew[rank], addresses) as group:
            return group.all_gather(bytes([rank]), WAIT_S)

    assert run_ranks(3, begin) == [[b"\0", b"\1", b"\2"]] * 3


@pytest.mark.parametrize("receives", [False, True], ids=["no-pool", "full-pool"])
def test_what_a_group_that_failed_has_not_delivered_does_not_disturb_a_later_one(
    engines: list[xr.Engine], receives: bool
) -> None:
    addresses = addresses_of(engines[:3])
    held = engines[2].submit_recvs(1, 1 << 16) if receives else None
    groups = [EngineGroup(engine, addresses) for engine in engines[:2]]
    for group in groups:
        for _ in range(2):
            with pytest.raises(xr.WaitTimeout):
                group.all_gather(b"in vain", NEVER_S)
    if held is not None:
        held.close()
    groups[0].close()
    later = [EngineGroup(engines[rank], [addresses[0], addresses[2]]) for rank in (0, 2)]
    assert run_ranks(2, lambda rank: later[rank].all_gather(bytes([rank]), WAIT_S)) == [[b"\0", b"\1"]] * 2
    for group in (*groups, *later):
        group.close()


def test_what_comes_late_of_a_group_that_a_rank_has_left_is_left_out(engines: list[xr.Engine]) -> None:
    before, now = addresses_of(engines[:3]), addresses_of([engines[0], engines[2]])
    EngineGroup(engines[0], before).close()
    groups = [EngineGroup(engines[0], now), EngineGroup(engines[2], now)]
    late = given(Call(name_of(before), 1, 0), 0, b"of before")[0].to_bytes()
    engines[0].submit_send(now[1], late).wait(WAIT_S)

    def exchange(rank: int) -> list[bytes]:
        if rank == 0:  # after the other has asked where we are, by saying where it is
            eventually(lambda: any(transfer.done for transfer in groups[1]._tells), "the question")
        return groups[rank].all_gather(bytes([rank]), WAIT_S)

    assert run_ranks(2, exchange) == [[b"\0", b"\1"]] * 2
    for group in groups:
        group.close()


def test_that_a_call_failed_before_says_nothing_of_the_next(engines: list[xr.Engine]) -> None:
    addresses = addresses_of(engines[:2])
    groups = [EngineGroup(engine, addresses) for engine in engines[:2]]
    with pytest.raises(xr.WaitTimeout):
        groups[0].all_gather(b"in vain", NEVER_S)
    other = Elsewhere(Call(b"elsewhere", 1, 0), True, ids_of(addresses), ("rank-0", "rank-1"))
    first = Call(name_of(addresses), 1, 0)
    for kind, body in (
        (Kind.ELSEWHERE, other.to_bytes()),
        (Kind.FAILED, Failed(Stray(other.ids[1], other.call), "before").to_bytes()),
        (Kind.HAS_ALL, b""),
    ):
        engines[1].submit_send(addresses[0], Packet(kind, first, 1, 0, 1, body).to_bytes()).wait(WAIT_S)
    assert run_ranks(2, lambda rank: groups[rank].all_gather(bytes([rank]), WAIT_S)) == [[b"\0", b"\1"]] * 2
    for group in groups:
        group.close()


def test_who_waits_elsewhere_is_said_in_full_or_as_far_as_there_is_room(engines: list[xr.Engine]) -> None:
    addresses = addresses_of(engines[:3])
    call = Call(b"12345678", 2, 1)
    said = Elsewhere(call, True, ids_of(addresses), ("rank-0", "rank-1", "rank-2"))
    assert Elsewhere.from_bytes(said.to_bytes()) == said
    assert "rank 1 is 'rank-1' (" in said.difference([addresses[0], addresses[2]])
    assert "rank 3 is nobody there, 'rank-3' (" in said.difference(addresses_of(engines[:4]))
    assert "3 addresses there, 3 here, of the same engines" in said.difference(addresses)
    long_names = said._replace(names=tuple(f"{rank}" * 10_000 for rank in range(3)))
    cut = long_names.to_bytes()
    assert len(cut) == PART_BYTES
    assert (
        Elsewhere.from_bytes(cut).difference(addresses[::-1]).startswith("3 addresses there, 3 here; rank 0 is '0000")
    )
    many = said._replace(ids=said.ids * 1000).to_bytes()
    assert "rank 3 is '?' (" in Elsewhere.from_bytes(many).difference(addresses)


@pytest.mark.parametrize("spoil", ["kind", "part", "elsewhere", "failed"])
def test_what_is_spoilt_is_no_packet(spoil: str) -> None:
    call = Call(b"12345678", 1, 0)
    spoilt = {
        "kind": Packet(Kind.GIVEN, call, 0, 0, 1, b"").to_bytes()[:4] + b"\x09" + bytes(40),
        "part": Packet(Kind.GIVEN, call, 0, 1, 1, b"").to_bytes(),
        "elsewhere": Packet(Kind.ELSEWHERE, call, 0, 0, 1, b"short").to_bytes(),
        "failed": Packet(Kind.FAILED, call, 0, 0, 1, b"short").to_bytes(),
    }
    assert Packet.from_bytes(spoilt[spoil]) is None

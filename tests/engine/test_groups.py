"""Peer groups: peers resolved beforehand, in the caller's order."""

import numpy as np
import pytest

import crossrail as xr
from tests.conftest import EngineFactory
from tests.support.limits import WAIT_S


def test_group_keeps_its_order(engine: xr.Engine, other: xr.Engine) -> None:
    peers = [other.address, engine.address, other.address]

    group = engine.add_peer_group(peers)

    assert len(group) == 3
    assert list(group.peers) == peers


def test_group_says_what_it_is(engine: xr.Engine, other: xr.Engine) -> None:
    group = engine.add_peer_group([other.address, engine.address])
    assert repr(group) == "<PeerGroup of 2 peers>"

    engine.remove_peer_group(group)
    assert repr(group) == "<PeerGroup of 2 peers, removed>"


def test_group_takes_addresses_as_bytes(engine: xr.Engine, other: xr.Engine) -> None:
    group = engine.add_peer_group([other.address.to_bytes()])

    engine.submit_barrier(group, 1).wait(WAIT_S)

    other.imm_counter(1).wait(1, WAIT_S)


def test_peer_named_twice_is_counted_twice(engine: xr.Engine, other: xr.Engine) -> None:
    group = engine.add_peer_group([other.address] * 2)

    engine.submit_barrier(group, 1).wait(WAIT_S)

    other.imm_counter(1).wait(2, WAIT_S)


def test_empty_group_is_refused_or_has_an_empty_barrier(engine: xr.Engine) -> None:
    try:
        group = engine.add_peer_group([])
    except xr.UsageError as error:
        assert "peers" in str(error)
    else:
        engine.submit_barrier(group, 1).wait(WAIT_S)


@pytest.mark.parametrize("peers", [None, 5, [5], ["name"], [b"short"]])
def test_group_of_what_is_no_peer_is_refused(engine: xr.Engine, peers: object) -> None:
    with pytest.raises((xr.UsageError, TypeError)):
        engine.add_peer_group(peers)


def test_removed_group_is_refused(engine: xr.Engine, other: xr.Engine) -> None:
    group = engine.add_peer_group([other.address])

    engine.remove_peer_group(group)

    with pytest.raises(xr.UsageError, match="group"):
        engine.submit_barrier(group, 1)


def test_group_of_another_engine_is_refused(engine: xr.Engine, other: xr.Engine) -> None:
    group = other.add_peer_group([engine.address])

    with pytest.raises(xr.UsageError, match="group"):
        engine.submit_barrier(group, 1)


def test_scatter_needs_targets_of_its_group(engine: xr.Engine, other: xr.Engine) -> None:
    src, here, there = engine.alloc(10), engine.alloc(10), other.alloc(10)
    group = engine.add_peer_group([engine.address, other.address])

    with pytest.raises(xr.UsageError, match="group"):
        scatter(engine, src, [there.descriptor, here.descriptor], group=group)
    with pytest.raises(xr.UsageError, match=r"group|dsts"):
        scatter(engine, src, [here.descriptor], group=group)


def test_scatter_to_a_group_says_that_its_peer_was_forgotten(engine: xr.Engine, other: xr.Engine) -> None:
    src, there = engine.alloc(10), other.alloc(10)
    group = engine.add_peer_group([other.address])
    engine.forget_peer(other.address)

    with pytest.raises(xr.UsageError, match=r"belongs to 'other', which forget_peer\(\) was called for .* new group"):
        scatter(engine, src, [there.descriptor], group=group)

    scatter(engine, src, [there.descriptor], group=engine.add_peer_group([other.address])).wait(WAIT_S)


def test_scatter_to_a_group_says_that_its_peer_is_another_of_that_name(
    engine: xr.Engine, other: xr.Engine, open_engine: EngineFactory
) -> None:
    group = engine.add_peer_group([other.address])
    restarted = open_engine(other.name)

    with pytest.raises(
        xr.UsageError, match="belongs to 'other', the group's peer there is another engine of that name"
    ):
        scatter(engine, engine.alloc(10), [restarted.alloc(10).descriptor], group=group)


@pytest.mark.parametrize(
    ("argument", "value", "words"),
    [
        ("lengths", [1, 2], "lengths.*one for each of 3 targets, not list of length 2$"),
        ("lengths", np.zeros((3, 1), np.int64), "lengths"),
        ("lengths", [1, -2, 3], "lengths.*-2"),
        ("lengths", -1, "lengths.*-1"),
        ("lengths", [0.5, 1, 2], "lengths"),
        ("lengths", 101, "length.*101.*100"),
        ("src_offsets", [1, 2, 3, 4], "src_offsets"),
        ("src_offsets", [0, 0, 100], "src.*offset.*100"),
        ("src_offsets", 2**64 - 1, f"src.*offset.*{2**64 - 1}"),
        ("dst_offsets", [], "dst_offsets"),
        ("dst_offsets", [0, 0, 91], "dst.*offset.*91.*100"),
        ("dst_offsets", [0, 2**63, 0], f"dst.*offset.*{2**63}"),
        ("imm", 2**28, f"imm.*{2**28}.*{2**28 - 1}"),
        ("imm", [1, 2], "imm"),
        ("imm", [1, -2, 3], "imm.*-2"),
        ("imm", [1, 2, 2**28], rf"imm\[2\].*{2**28}.*2\*\*28-1"),
        ("imm", np.zeros((3, 1), np.int64), "imm"),
        ("imm", [1, None, 3], "imm"),
        ("dsts", "text", "dsts"),
        ("dsts", [b"x"] * 3, "dsts"),
    ],
)
def test_scatter_of_wrong_arguments_names_them(engine: xr.Engine, argument: str, value: object, words: str) -> None:
    src, dst = engine.alloc(100), engine.alloc(100)
    arguments = {"dsts": [dst.descriptor] * 3, "lengths": 10, "src_offsets": 0, "dst_offsets": 0} | {argument: value}

    with pytest.raises(xr.UsageError, match=words):
        engine.submit_scatter(src, arguments.pop("dsts"), **arguments)

    assert not dst.array().any()


def test_scatter_to_nobody_is_refused_or_done(engine: xr.Engine) -> None:
    src = engine.alloc(10)

    try:
        transfer = scatter(engine, src, [])
    except xr.UsageError as error:
        assert "dsts" in str(error)
    else:
        transfer.wait(WAIT_S)


def scatter(
    engine: xr.Engine, src: xr.Region, dsts: list[xr.RegionDescriptor], group: xr.PeerGroup | None = None
) -> xr.Transfer:
    return engine.submit_scatter(src, dsts, lengths=1, src_offsets=0, dst_offsets=0, group=group, imm=1)

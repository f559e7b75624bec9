"""Engines with an RDMA transport beside others: which one is taken, and that all of them know the whole engine.

libfabric's tcp stands in for a NIC. What the transport itself does is in tests/contract.
"""

import re
from typing import Any

import pytest

import crossrail as xr
from tests.conftest import EngineFactory
from tests.support.limits import WAIT_S
from tests.support.patterns import pattern

LOOPBACK = ["127.0.0.1"]


def moved(src: xr.Engine, dst: xr.Engine) -> bool:
    """Whether a counted write arrives."""
    source, target = src.alloc(100_000), dst.alloc(100_000)
    source.array()[:] = pattern(3, 100_000)
    src.submit_write(source, xr.RegionDescriptor.from_bytes(bytes(target.descriptor)), imm=1).wait(WAIT_S)
    dst.imm_counter(1).wait(1, WAIT_S)
    return bool((target.array() == source.array()).all())


@pytest.mark.parametrize(
    ("here", "there", "transport", "reason"),
    [
        ("ofi:tcp", "ofi:tcp", "ofi", "requested by transport='ofi:tcp'"),
        ("shm+ofi:tcp", "shm+ofi:tcp", "shm", "same host: shared memory"),
        ("shm+ofi:tcp", "ofi:tcp", "ofi", "the peer has no shm: it asked for ofi:tcp"),
        ("tcp+ofi:tcp", "tcp+ofi:tcp", "ofi", "the peer has no shm: it asked for ofi:tcp"),
        ("tcp+ofi:tcp", "tcp", "tcp", "the peer has no shm: it asked for tcp; it has no ofi"),
        ("tcp", "tcp+ofi:tcp", "tcp", "requested by transport='tcp'"),
        ("auto", "tcp+ofi:tcp", "tcp", "the peer has no shm: it asked for tcp; it has ofi, this engine does not.*"),
    ],
)
def test_fastest_that_both_have_is_taken(
    open_engine: EngineFactory, here: str, there: str, transport: str, reason: str
) -> None:
    one, two = open_engine("one", transport=here, rails=LOOPBACK), open_engine("two", transport=there, rails=LOOPBACK)

    assert moved(one, two)

    explanation = one.explain(two.address)
    assert explanation.transport == transport
    assert re.fullmatch(reason, explanation.reason), explanation.reason


@pytest.mark.parametrize("transport", ["ofi:tcp", "tcp+ofi:tcp", "shm+tcp+ofi:tcp"])
def test_sender_of_a_message_can_be_answered_on_any_way(open_engine: EngineFactory, transport: str) -> None:
    """What a peer is shown when it is connected to is the whole engine's address."""
    one = open_engine("one", transport=transport, rails=LOOPBACK)
    two = open_engine("two", transport="ofi:tcp", rails=LOOPBACK)
    with two.submit_recvs(4, 100) as pool:
        one.submit_send(two.address, b"hello").wait(WAIT_S)
        sender = pool.recv(WAIT_S).peer

    assert sender == one.address
    assert set(sender.transports) == {word.partition(":")[0] for word in transport.split("+")}
    with one.submit_recvs(4, 100) as pool:
        two.submit_send(xr.Address.from_bytes(bytes(sender)), b"and back").wait(WAIT_S)
        assert pool.recv(WAIT_S).data == b"and back"


def test_engines_of_one_rail_and_of_several_talk(open_engine: EngineFactory) -> None:
    one = open_engine("one", transport="ofi:tcp", rails=3)
    two = open_engine("two", transport="ofi:tcp", rails=LOOPBACK)

    assert (one.rails, two.rails) == (3, 1)
    assert moved(one, two) and moved(two, one)
    assert {rail for rail, _ in one.explain(two.address).rails} == {0, 1, 2}


def test_policy_sees_what_is_open(open_engine: EngineFactory) -> None:
    one = open_engine("one", transport="ofi:tcp", rails=LOOPBACK, require="ofi, rdma, rails>=1")
    two = open_engine("two", transport="ofi:tcp", rails=LOOPBACK)
    one.connect(two.address, WAIT_S)

    one.require(two.address, "ofi, rdma")
    with pytest.raises(xr.TransportError, match=r"verbs: the path .* goes over ofi"):
        one.require(two.address, "verbs")


@pytest.mark.parametrize("provider", ["tcp;ofi_rxm", "sockets"])
def test_provider_that_no_other_test_runs_on_is_taken_and_said_to_be_unproven(
    open_engine: EngineFactory, provider: str
) -> None:
    one, two = (open_engine(name, transport=f"ofi:{provider}", rails=LOOPBACK) for name in ("one", "two"))

    assert moved(one, two)

    network = str(one.explain(two.address))
    assert f"{provider} 127.0.0.1 on lo" in network and "crossrail's tests do not run on this provider" in network


def test_address_shows_its_network(open_engine: EngineFactory) -> None:
    engine = open_engine("one", transport="ofi:tcp", rails=2)

    assert engine.address.transports == ("ofi",)
    assert "ofi x 2 (tcp)" in repr(engine.address)
    assert len(engine.address.rail_speeds("ofi")) == 2
    assert engine.address.rail_speeds("tcp") == ()


@pytest.mark.parametrize(
    "word", ["ofi:", "ofi:no-such-provider", "verbs:mlx5", "shm+", "+tcp", "auto+tcp", "tcp+tcp", "ofi+ofi:tcp", "x"]
)
def test_nonsense_is_refused_in_words(word: str) -> None:
    with pytest.raises((xr.UsageError, xr.TransportError), match=r"transport|provider|libfabric"):
        xr.Engine("here", transport=word)


@pytest.mark.parametrize(
    "options",
    [
        {"gid_index": -2},
        {"gid_index": 256},
        {"gid_index": 1 << 40},
        {"gid_index": "3"},
        {"traffic_class": 256},
        {"traffic_class": -1},
        {"traffic_class": 1 << 40},
        {"traffic_class": 1.5},
        {"service_level": 16},
        {"service_level": True},
        {"path_mtu": 1500},
        {"path_mtu": -1},
        {"partition": 0x10000},
        {"partition": 0.5},
        {"chain_length": 0},
        {"chain_length": 33},
    ],
)
def test_options_out_of_bounds_are_refused_by_their_names(options: dict[str, Any]) -> None:
    (field,) = options
    with pytest.raises(xr.UsageError, match=rf"rdma\.{field} "):
        xr.Engine("here", transport="shm", rdma=xr.RdmaOptions(**options))


def test_wrong_secret_is_refused_on_both_sides_in_words(open_engine: EngineFactory) -> None:
    one = open_engine("one", transport="ofi:tcp", rails=LOOPBACK, secret="right")
    two = open_engine("two", transport="ofi:tcp", rails=LOOPBACK, secret="wrong", connect_timeout_s=2.0)

    with pytest.raises(xr.PeerLost, match="secret"):
        two.connect(one.address, WAIT_S)

"""What is tried from habit: the message names the call that does it."""

from __future__ import annotations

import pytest

import crossrail as xr
from tests.conftest import EngineFactory, PeerFactory
from tests.support.limits import WAIT_S, eventually

SOON_S = 0.1


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_bytes_of_a_descriptor_are_not_one_yet(engine: xr.Engine, other: xr.Engine, kind: type) -> None:
    sent = kind(bytes(other.alloc(8).descriptor))

    with pytest.raises(
        xr.UsageError, match=r"dst must be .*RegionDescriptor\.from_bytes\(data\).*, not " + kind.__name__
    ):
        engine.submit_write(engine.alloc(8), sent)


def test_region_is_not_its_descriptor(engine: xr.Engine, other: xr.Engine) -> None:
    with pytest.raises(xr.UsageError, match=r"dst must be a RegionDescriptor \(region\.descriptor at the peer\)"):
        engine.submit_write(engine.alloc(8), other.alloc(8))  # type: ignore[arg-type]


def test_descriptor_is_not_the_address_of_its_owner(engine: xr.Engine, other: xr.Engine) -> None:
    descriptor = other.alloc(8).descriptor

    with pytest.raises(xr.UsageError, match=r"\(descriptor\.owner\)"):
        engine.explain(descriptor)  # type: ignore[arg-type]


def test_name_is_no_address(engine: xr.Engine, other: xr.Engine) -> None:
    with pytest.raises(xr.UsageError, match=r"\(engine\.address at the peer\).* not str"):
        engine.connect(other.name)  # type: ignore[arg-type]


def test_hexadecimal_is_no_bytes(other: xr.Engine) -> None:
    with pytest.raises(xr.UsageError, match=r"not str \(bytes\.fromhex\(text\)"):
        xr.Address.from_bytes(bytes(other.address).hex())  # type: ignore[arg-type]


def test_one_rail_by_name_is_a_list_of_one() -> None:
    with pytest.raises(xr.UsageError, match=r"rails is str, .* as \['eth0', 'eth1'\]"):
        xr.Engine("e", rails="eth0")  # type: ignore[arg-type]


def test_numpy_has_no_bfloat16(engine: xr.Engine) -> None:
    with pytest.raises(xr.UsageError, match=r"numpy has none; take region\.tensor\(\)"):
        engine.alloc(8).array("bfloat16")


def test_message_that_nobody_receives_says_what_it_waits_for(engine: xr.Engine, other: xr.Engine) -> None:
    engine.connect(other.address, WAIT_S)

    with pytest.raises(xr.WaitTimeout, match=r"the peer is connected.* receive buffer free: submit_recvs there"):
        engine.submit_send(other.address, b"nobody receives").wait(SOON_S)


def test_transfer_that_is_late_says_that_the_peer_is_frozen(
    open_engine: EngineFactory, spawn_peer: PeerFactory
) -> None:
    engine, child = open_engine(peer_timeout_s=WAIT_S), spawn_peer()
    there = child.open()
    engine.connect(there.address, WAIT_S)
    child.stop()
    transfer = engine.submit_send(there.address, b"to one that stands still")
    eventually(lambda: engine.peer_state(there.address) == "frozen", "the peer frozen")

    with pytest.raises(xr.WaitTimeout, match=r"0 bytes have moved and the peer is frozen"):
        transfer.wait(SOON_S)

    child.resume()


def test_barrier_that_is_late_names_the_peer_that_does_not_answer(
    open_engine: EngineFactory, other: xr.Engine, spawn_peer: PeerFactory
) -> None:
    engine, child = open_engine(peer_timeout_s=WAIT_S, connect_timeout_s=WAIT_S), spawn_peer()
    there = child.open()
    child.stop()
    group = engine.add_peer_group([other.address, there.address])
    transfer = engine.submit_barrier(group, 1)
    eventually(lambda: engine.peer_state(there.address) != "unknown", "the peer known")

    assert repr(transfer) == "<Transfer barrier of 0 bytes, 2 peers, pending>"
    with pytest.raises(xr.WaitTimeout, match=rf"to 2 peers .*; of this engine's peers '{there.address.name}' is "):
        transfer.wait(SOON_S)

    child.resume()
    transfer.wait(WAIT_S)


def test_count_that_never_comes_says_where_to_look(engine: xr.Engine) -> None:
    with pytest.raises(xr.WaitTimeout, match=r"0 of 1 arrived .*writers' transfers are done, and have imm=7 "):
        engine.imm_counter(7).wait(1, SOON_S)

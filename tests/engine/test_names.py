"""Addresses and descriptors as values: compared, hashed, shown, pickled, sent as bytes or text."""

import copy
import pickle
from collections.abc import Callable

import pytest

import crossrail as xr
from tests.conftest import EngineFactory
from tests.support import sealing
from tests.support.limits import WAIT_S


def test_address_survives_bytes_text_and_pickle(engine: xr.Engine) -> None:
    address = engine.address

    for again in (
        xr.Address.from_bytes(address.to_bytes()),
        xr.Address.from_bytes(bytes(address)),
        xr.Address.from_text(str(address)),
        pickle.loads(pickle.dumps(address)),
    ):
        assert again == address
        assert hash(again) == hash(address)
        assert again.name == address.name
        assert again.incarnation == address.incarnation


def test_address_says_whose_it_is(open_engine: EngineFactory) -> None:
    address = open_engine("worker 7", rails=3).address

    assert len(bytes.fromhex(address.incarnation)) == 16
    assert "worker 7" in repr(address)
    assert str(address) == address.to_bytes().hex()


def test_address_with_endpoints_shows_them() -> None:
    data = sealing.make_address(transports=sealing.SHM | sealing.TCP, endpoints=sealing.ENDPOINTS)
    address = xr.Address.from_bytes(data)

    assert address.transports == ("shm", "tcp")
    assert address.endpoints == ("10.0.0.1:4711", "[::1]:80")
    assert address.rails == 2
    for word in ("shm x 1", "tcp x 2", "10.0.0.1:4711", "[::1]:80"):
        assert word in repr(address)
    assert address.to_bytes() == data


def test_addresses_of_two_engines_differ(open_engine: EngineFactory) -> None:
    one, two = open_engine("same"), open_engine("same")

    assert one.address != two.address
    assert len({one.address, two.address}) == 2
    assert one.address != "same"


def test_descriptor_survives_bytes_and_pickle(engine: xr.Engine) -> None:
    descriptor = engine.alloc(12_345).descriptor

    for again in (
        xr.RegionDescriptor.from_bytes(descriptor.to_bytes()),
        xr.RegionDescriptor.from_bytes(bytes(descriptor)),
        pickle.loads(pickle.dumps(descriptor)),
    ):
        assert again == descriptor
        assert hash(again) == hash(descriptor)
        assert (again.nbytes, again.owner, again.access) == (12_345, engine.address, "write")


@pytest.mark.parametrize("other", [None, "same", b"same", 1, object()])
def test_addresses_and_descriptors_equal_nothing_of_another_type(engine: xr.Engine, other: object) -> None:
    for value in (engine.address, engine.alloc(16).descriptor):
        assert (value == other, other == value) == (False, False)
        assert value != other


@pytest.mark.parametrize("access", ["local", "read", "write"])
def test_descriptor_carries_the_access(engine: xr.Engine, access: str) -> None:
    descriptor = engine.register(bytearray(10), access=access).descriptor

    assert xr.RegionDescriptor.from_bytes(descriptor.to_bytes()).access == access
    assert "10" in repr(descriptor)


def test_pickle_holds_nothing_but_our_bytes(engine: xr.Engine) -> None:
    for value in (engine.address, engine.alloc(10).descriptor):
        assert value.to_bytes() in pickle.dumps(value)


@pytest.mark.parametrize("send", [pickle.dumps, copy.copy, copy.deepcopy])
def test_pickling_or_copying_says_what_to_send_instead(engine: xr.Engine, send: Callable[[object], object]) -> None:
    with pytest.raises(TypeError, match="send peers its address"):
        send(engine)
    with pytest.raises(TypeError, match="send peers its descriptor"):
        send(engine.alloc(10))


def test_descriptors_of_equal_regions_differ(engine: xr.Engine) -> None:
    assert engine.alloc(10).descriptor != engine.alloc(10).descriptor


def test_peers_may_be_named_by_address_or_bytes(engine: xr.Engine, other: xr.Engine) -> None:
    engine.connect(other.address.to_bytes())

    assert engine.peer_state(other.address) == engine.peer_state(other.address.to_bytes()) == "connected"
    assert other.address in engine.peers()
    engine.forget_peer(other.address.to_bytes())
    assert other.address not in engine.peers()


@pytest.mark.parametrize("peer", [None, 5, "other", b"short", b""])
def test_what_is_no_peer_is_refused(engine: xr.Engine, peer: object) -> None:
    for call in (engine.connect, engine.peer_state, engine.forget_peer, engine.explain):
        with pytest.raises((xr.UsageError, TypeError)):
            call(peer)


@pytest.mark.parametrize("text", ["", "zz", "abc", "00" * 20, "päck"])
def test_text_that_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(xr.UsageError):
        xr.Address.from_text(text)


STEERS = "b\x1b[2J\nengine 'a': all is well"


def test_a_name_cannot_steer_who_looks_at_what_it_is_shown_in(open_engine: EngineFactory) -> None:
    engine, peer = open_engine("a"), open_engine(STEERS)
    src, dst = engine.alloc(8), peer.alloc(8)
    descriptor = dst.descriptor
    engine.submit_write(src, descriptor).wait(WAIT_S)
    peer.close()
    failed = engine.submit_write(src, descriptor)
    with pytest.raises(xr.TransferError) as lost:
        failed.wait(WAIT_S)

    assert lost.value.peer == peer.address.name == STEERS
    shown = [str(lost.value), repr(failed), repr(peer.address), repr(descriptor)]
    shown += str(engine.explain(peer.address)).split("\n")
    assert [text for text in shown if not text.isprintable()] == []
    assert all("all is well" in text for text in shown[:5])


def renamed(data: bytes) -> bytes:
    """The address or descriptor of an engine called "other", as of one called "ether": all else is the same."""
    assert data[sealing.NAME_AT :].startswith(b"\5other")
    return sealing.with_bytes(data, sealing.NAME_AT + 1, b"ether")


@pytest.mark.parametrize("true_first", [True, False], ids=["true-first", "changed-first"])
def test_one_incarnation_is_one_engine(open_engine: EngineFactory, true_first: bool) -> None:
    engine, other = open_engine("a"), open_engine("other")
    src, dst = engine.alloc(8), other.alloc(8)
    true = dst.descriptor
    changed = xr.RegionDescriptor.from_bytes(renamed(true.to_bytes()))
    known, wrong = (true, changed) if true_first else (changed, true)
    engine.explain(known.owner)

    for attempt in (lambda: engine.submit_write(src, wrong), lambda: engine.connect(wrong.owner, WAIT_S)):
        with pytest.raises(xr.UsageError, match=f"'{wrong.owner.name}'.* same incarnation as '{known.owner.name}'"):
            attempt()

    engine.forget_peer(wrong.owner)
    engine.submit_write(src, true).wait(WAIT_S)


def test_words_that_have_no_encoding_are_refused() -> None:
    with pytest.raises(xr.UsageError, match=r"rails = .* cannot be encoded"):
        xr.Engine("e", rails=["lo", "\udcff"])
    with xr.Engine("e", transport="shm") as engine, pytest.raises(xr.UsageError, match="is not a numpy dtype"):
        engine.alloc(64).array("\udcff")

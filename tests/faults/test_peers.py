"""Peers over every network that freeze, idle, close or come back; and 10,000 transfers at once."""

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import crossrail as xr
from tests.conftest import EngineFactory, PeerFactory
from tests.contract.setups import why_not
from tests.faults.loopback import NBYTES, loopback, warmed_up
from tests.support.limits import SLOWNESS, WAIT_S, eventually
from tests.support.operations import KINDS
from tests.support.patterns import assert_same_bytes, pattern
from tests.support.process import PeerProcess
from tests.support.tcp_wire import endpoints_of

pytestmark = pytest.mark.timeout(120)


@dataclass(frozen=True)
class Network:
    transport: str
    patience: dict[str, float] = field(default_factory=dict)  # of an engine whose peer is killed: see it in time
    keeps_port: bool = False  # a restarted peer listens where the one before did

    @property
    def one(self) -> dict[str, Any]:
        return loopback(self.transport, 1)

    @property
    def two(self) -> dict[str, Any]:
        return loopback(self.transport, 2)


NETWORKS = [
    Network("tcp", keeps_port=True),
    Network("ofi:tcp", patience={"peer_timeout_s": 3.0}),
]


@pytest.fixture(params=[each for each in NETWORKS if not why_not(each.transport)], ids=lambda each: each.transport)
def network(request: pytest.FixtureRequest) -> Network:
    found: Network = request.param
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_peer_is_lost_after_its_timeout(
    network: Network, open_engine: EngineFactory, child: PeerProcess, kind: str
) -> None:
    engine = open_engine(peer_timeout_s=1.0, **network.two)
    there, operations = warmed_up(engine, child, **network.two)
    child.stop()

    transfers = [operations.submit(kind) for _ in range(3)]
    for transfer in transfers:
        with pytest.raises(xr.PeerLost, match=r"frozen, or cut off|no rail"):
            transfer.wait(WAIT_S)

    assert engine.peer_state(there.address) == "lost"
    child.resume()


@pytest.mark.parametrize("kind", ["write", "read", "send"])
def test_frozen_peer_that_thaws_in_time_goes_on(
    network: Network, open_engine: EngineFactory, child: PeerProcess, kind: str
) -> None:
    engine = open_engine(peer_timeout_s=20.0, **network.two)
    there, operations = warmed_up(engine, child, **network.two)
    events: list[xr.EngineEvent] = []
    engine.on_event(events.append)
    child.stop()
    transfers = [operations.submit(kind) for _ in range(3)]
    eventually(lambda: engine.peer_state(there.address) == "frozen", "the peer frozen")
    assert engine.explain(there.address).note

    child.resume()
    for transfer in transfers:
        transfer.wait(WAIT_S)

    eventually(lambda: engine.peer_state(there.address) == "connected", "the peer thawed")
    if operations.counts(kind):
        there.expect_count(5, 3 * operations.counts(kind))
    eventually(lambda: {"peer-frozen", "peer-thawed"} <= {event.kind for event in events}, "both events")


def test_link_that_idled_longer_than_the_timeout_is_as_good_as_new(
    network: Network, open_engine: EngineFactory
) -> None:
    timeout_s = 1.0 * SLOWNESS  # a busy machine stops everybody for half a second
    engine = open_engine(peer_timeout_s=timeout_s, **network.two)
    src = engine.register(pattern(1, NBYTES))
    ways: list[tuple[xr.Engine, xr.Region, dict[str, int]]] = []  # of which each idles
    for index, how in enumerate(({"rail": 1}, {"rail": 0}, {})):
        other = open_engine(f"other-{index}", **network.two)
        ways.append((other, other.alloc(NBYTES), how))
        engine.submit_write(src, ways[-1][1].descriptor, 8).wait(WAIT_S)
    for nbytes in (100, NBYTES, 100):
        time.sleep(timeout_s + 0.1)  # with nothing to wait for
        for _, dst, how in ways:
            engine.submit_write(src, dst.descriptor, nbytes, imm=1, **how).wait(WAIT_S)

    for other, _, _ in ways:
        other.imm_counter(1).wait(3, WAIT_S)
    assert engine.stats()["peers_lost"] == 0


def test_ten_thousand_transfers_outstanding(network: Network, open_engine: EngineFactory) -> None:
    engine, other = open_engine(**network.two), open_engine("other", **network.two)
    count = 10_000
    src, dst = engine.register(pattern(1, count * 8)), other.register(np.zeros(count * 8, np.uint8))

    transfers = [
        engine.submit_write(src, dst.descriptor, 8, src_offset=8 * i, dst_offset=8 * i, imm=1) for i in range(count)
    ]
    for transfer in transfers:
        transfer.wait(WAIT_S)

    other.imm_counter(1).wait(count, WAIT_S)
    assert other.imm_counter(1).poll() == 0
    assert_same_bytes(dst.array(), pattern(1, count * 8))


def test_region_that_closes_under_writes_takes_no_byte_more(
    network: Network, open_engine: EngineFactory, child: PeerProcess
) -> None:
    engine = open_engine(**network.one)
    there = child.open(**network.one)
    remote = there.memory(NBYTES, "private", fill=1)
    for _ in range(8):
        memory = np.zeros(NBYTES, np.uint8)
        mine = engine.register(memory)
        stream = there.stream("write", remote, [mine.descriptor], imm=1)
        mine.close(WAIT_S)
        memory[:] = 7
        failed = there.caller.call("failed_stream", stream=stream)
        assert set(failed["failures"]) <= {"RemoteRegionClosed"}, failed
        assert (memory == 7).all(), "written after close() had returned"
        engine.imm_counter(1).wait(failed["done"], WAIT_S)
        assert engine.imm_counter(1).poll() == 0


@pytest.mark.parametrize(("kind", "imm"), [("write", 1), ("read", None)])
def test_region_closes_while_a_frozen_peer_is_at_it(
    network: Network, open_engine: EngineFactory, child: PeerProcess, kind: str, imm: int | None
) -> None:
    engine = open_engine(**network.one)
    there = child.open(**network.one)
    remote = there.memory(64 << 20, "private")
    mine = engine.register(np.zeros(64 << 20, np.uint8))
    there.stream(kind, remote, [mine.descriptor], imm=imm, window=2)
    child.stop()

    mine.close(WAIT_S)

    child.resume()


def test_peer_that_comes_back_under_its_name_is_another(
    network: Network, open_engine: EngineFactory, spawn_peer: PeerFactory
) -> None:
    engine = open_engine(**network.patience, **network.one)
    src = engine.register(pattern(1, 10_000))
    first = spawn_peer()
    old = first.open(name="phoenix", **network.one)
    old_memory = old.memory(10_000)
    engine.submit_write(src, old_memory.descriptor).wait(WAIT_S)
    same_place = {"port": endpoints_of(old.address.to_bytes())[0][1]} if network.keeps_port else {}
    first.kill()
    first.wait_dead()

    new = spawn_peer().open(name="phoenix", **same_place, **network.one)
    new_memory = new.memory(10_000)
    with pytest.raises(xr.PeerLost, match="phoenix"):
        engine.submit_write(src, old_memory.descriptor).wait(WAIT_S)
    engine.submit_write(src, new_memory.descriptor, imm=1).wait(WAIT_S)

    new.expect_count(1, 1)
    assert_same_bytes(new_memory.content(), pattern(1, 10_000))

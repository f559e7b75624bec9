"""Peers over tcp that freeze, die, come back, idle or do not receive; and 10,000 transfers at once."""

import itertools
import queue
import socket
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import crossrail as xr
from tests.conftest import EngineFactory, PeerFactory
from tests.support.limits import DEATH_S, WAIT_S, eventually, never
from tests.support.node import RemoteEngine
from tests.support.operations import KINDS, Operations
from tests.support.patterns import assert_same_bytes, pattern
from tests.support.process import PeerProcess
from tests.support.proxy import proxied
from tests.support.tcp_wire import endpoints_of, reset, with_ports

pytestmark = pytest.mark.timeout(120)

NBYTES = 3_000_001
ONE = {"transport": "tcp", "rails": ["127.0.0.1"]}
TWO = {"transport": "tcp", "rails": ["127.0.0.1", "127.0.0.2"]}


@pytest.fixture
def child(spawn_peer: PeerFactory) -> PeerProcess:
    return spawn_peer()


def warmed_up(engine: xr.Engine, child: PeerProcess, **options: object) -> tuple[RemoteEngine, Operations]:
    """Both lanes of every rail connected, then idle."""
    there = child.open(**options)
    there.receive(4, 2000)
    there.call("discard_messages")
    mine, remote = engine.register(pattern(1, NBYTES)), there.memory(NBYTES, "private", fill=1)
    engine.submit_write(mine, remote.descriptor).wait(WAIT_S)
    engine.submit_write(mine, remote.descriptor, 8).wait(WAIT_S)
    return there, Operations(engine, mine, [remote.descriptor], imm=5)


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_peer_is_lost_after_its_timeout(open_engine: EngineFactory, child: PeerProcess, kind: str) -> None:
    engine = open_engine(peer_timeout_s=1.0, **TWO)
    there, operations = warmed_up(engine, child, **TWO)
    child.stop()

    transfers = [operations.submit(kind) for _ in range(3)]
    for transfer in transfers:
        with pytest.raises(xr.PeerLost, match=r"frozen, or cut off|no rail"):
            transfer.wait(WAIT_S)

    assert engine.peer_state(there.address) == "lost"
    child.resume()


def test_trickle_to_a_frozen_peer_does_not_hide_that_it_is_frozen(
    open_engine: EngineFactory, child: PeerProcess
) -> None:
    engine = open_engine(peer_timeout_s=1.0, **ONE)
    _, operations = warmed_up(engine, child, **ONE)
    child.stop()

    deadline = time.monotonic() + WAIT_S
    transfers: list[xr.Transfer] = []
    while not any(transfer.done for transfer in transfers):
        transfers.append(engine.submit_write(operations.region, operations.descriptors[0], 8))
        time.sleep(0.02)
        assert time.monotonic() < deadline, "never noticed"

    for transfer in transfers:
        with pytest.raises(xr.PeerLost):
            transfer.wait(WAIT_S)
    child.resume()


@pytest.mark.parametrize("kind", ["write", "read", "send"])
def test_frozen_peer_that_thaws_in_time_goes_on(open_engine: EngineFactory, child: PeerProcess, kind: str) -> None:
    engine = open_engine(peer_timeout_s=20.0, **TWO)
    there, operations = warmed_up(engine, child, **TWO)
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


def drive(engine: xr.Engine, for_s: float = 0.1) -> None:
    """That of nobody but us, for so long."""
    deadline = time.monotonic() + for_s
    while time.monotonic() < deadline:
        engine.progress()


@pytest.fixture
def ours(open_engine: EngineFactory) -> xr.Engine:
    """Stands still whenever we do, as one whose process is stopped."""
    return open_engine(polling="manual", peer_timeout_s=1.0, connect_timeout_s=1.0, **ONE)


def test_peer_is_not_lost_because_we_stood_still_while_it_kept_us_waiting(
    open_engine: EngineFactory, ours: xr.Engine
) -> None:
    other = open_engine("other", **ONE)
    ours.connect(other.address, WAIT_S)
    message = ours.submit_send(other.address, b"held back")
    drive(ours)

    time.sleep(3)
    with pytest.raises(xr.WaitTimeout):
        message.wait(0.3)
    pool = other.submit_recvs(1, 100)

    message.wait(WAIT_S)
    assert pool.recv(WAIT_S).data == b"held back"


def test_peer_is_not_lost_because_we_stood_still_while_it_was_away(open_engine: EngineFactory, ours: xr.Engine) -> None:
    other = open_engine("other", **ONE)
    target = other.alloc(8)
    with proxied(other.address) as way:
        ours.connect(way.address, WAIT_S)
        way.proxies[0].go_away()
        transfer = ours.submit_write(ours.alloc(8), target.descriptor, imm=1)
        drive(ours)

        time.sleep(3)
        drive(ours)
        way.proxies[0].go_away(False)
        transfer.wait(WAIT_S)

    other.imm_counter(1).wait(1, WAIT_S)


def test_link_that_idled_longer_than_the_timeout_is_as_good_as_new(open_engine: EngineFactory) -> None:
    engine, other = open_engine(peer_timeout_s=0.4, **TWO), open_engine("other", **TWO)
    src, dst = engine.register(pattern(1, NBYTES)), other.alloc(NBYTES)
    engine.submit_write(src, dst.descriptor, 8).wait(WAIT_S)
    for how in ({"rail": 1}, {"rail": 0}, {}):
        time.sleep(0.5)  # longer than the timeout, with nothing to wait for
        engine.submit_write(src, dst.descriptor, 100, imm=1, **how).wait(WAIT_S)
        time.sleep(0.5)
        engine.submit_write(src, dst.descriptor, imm=1, **how).wait(WAIT_S)

    other.imm_counter(1).wait(6, WAIT_S)
    assert engine.stats()["peers_lost"] == 0


def test_receiver_without_buffers_holds_back_messages_only(open_engine: EngineFactory) -> None:
    engine, other = open_engine(**ONE), open_engine("other", **ONE)
    src, dst = engine.register(pattern(1, NBYTES)), other.alloc(NBYTES)
    count = 6000
    messages = [engine.submit_send(other.address, i.to_bytes(2, "little")) for i in range(count)]
    never(lambda: any(message.done for message in messages), "messages that nobody takes", 0.05)

    for _ in range(20):
        engine.submit_write(src, dst.descriptor, 8, imm=1).wait(WAIT_S)
        engine.submit_write(src, dst.descriptor, imm=1).wait(WAIT_S)
        engine.submit_read(src, dst.descriptor, 8).wait(WAIT_S)
    cancelled = messages.pop()
    cancelled.cancel()
    with pytest.raises(xr.TransferCancelled):
        cancelled.wait(WAIT_S)

    received: list[bytes] = []
    with other.submit_recvs(16, 16, on_message=lambda message: received.append(bytes(message.data))):
        for message in messages:
            message.wait(WAIT_S)
        eventually(lambda: len(received) == count - 1, "every message")
    assert sorted(received) == sorted(i.to_bytes(2, "little") for i in range(count - 1))


def test_ten_thousand_transfers_outstanding(open_engine: EngineFactory) -> None:
    engine, other = open_engine(**TWO), open_engine("other", **TWO)
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


def test_region_that_closes_under_writes_takes_no_byte_more(open_engine: EngineFactory, child: PeerProcess) -> None:
    engine = open_engine(**ONE)
    there = child.open(**ONE)
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


def test_region_closes_while_its_writer_is_frozen_in_the_middle(open_engine: EngineFactory, child: PeerProcess) -> None:
    engine = open_engine(**ONE)
    there = child.open(**ONE)
    remote = there.memory(64 << 20, "private")
    mine = engine.register(np.zeros(64 << 20, np.uint8))
    there.stream("write", remote, [mine.descriptor], imm=1, window=2)
    child.stop()

    mine.close(WAIT_S)

    child.resume()


def test_region_closes_while_a_frozen_peer_reads_it(open_engine: EngineFactory, child: PeerProcess) -> None:
    engine = open_engine(**ONE)
    there = child.open(**ONE)
    remote = there.memory(64 << 20, "private")
    mine = engine.register(np.zeros(64 << 20, np.uint8))
    there.stream("read", remote, [mine.descriptor], window=2)
    child.stop()

    mine.close(WAIT_S)

    child.resume()


def test_death_is_seen_at_once(open_engine: EngineFactory, child: PeerProcess) -> None:
    engine = open_engine(**TWO)
    there = child.open(**TWO)
    engine.connect(there.address, WAIT_S)
    transfer = engine.submit_send(there.address, b"nobody receives")

    child.kill()

    with pytest.raises(xr.PeerLost, match="there"):
        transfer.wait(DEATH_S)


def test_peer_that_comes_back_under_its_name_is_another(open_engine: EngineFactory, spawn_peer: PeerFactory) -> None:
    engine = open_engine(**ONE)
    src = engine.register(pattern(1, 10_000))
    first = spawn_peer()
    old = first.open(name="phoenix", **ONE)
    old_memory = old.memory(10_000)
    engine.submit_write(src, old_memory.descriptor).wait(WAIT_S)
    port = endpoints_of(old.address.to_bytes())[0][1]
    first.kill()
    first.wait_dead()

    second = spawn_peer()
    new = second.open(name="phoenix", port=port, **ONE)
    new_memory = new.memory(10_000)
    with pytest.raises(xr.PeerLost, match="phoenix"):
        engine.submit_write(src, old_memory.descriptor).wait(WAIT_S)
    engine.submit_write(src, new_memory.descriptor, imm=1).wait(WAIT_S)

    new.expect_count(1, 1)
    assert_same_bytes(new_memory.content(), pattern(1, 10_000))


def test_who_waits_for_a_connection_is_told_that_the_peer_was_forgotten(open_engine: EngineFactory) -> None:
    here = open_engine("here", connect_timeout_s=1000.0, **ONE)
    there = open_engine("there", polling="manual", **ONE)  # answers nothing
    told: queue.Queue[Exception] = queue.Queue()

    def connect() -> None:
        try:
            here.connect(there.address, timeout_s=None)
        except xr.CrossrailError as error:
            told.put(error)

    waiter = threading.Thread(target=connect)
    waiter.start()
    eventually(lambda: here.peer_state(there.address) == "connecting", "connecting")
    here.forget_peer(there.address)
    try:
        error = told.get(timeout=WAIT_S)
    finally:
        here.close()
        waiter.join()

    assert isinstance(error, xr.PeerLost)
    assert "forgotten on request" in str(error)


def test_peers_that_forget_each_other_again_and_again(open_engine: EngineFactory) -> None:
    here, there = open_engine(peer_timeout_s=1.0, **TWO), open_engine("there", peer_timeout_s=1.0, **TWO)
    mine, yours = here.alloc(100_000), there.alloc(100_000)
    for i in range(60):
        transfers = [here.submit_write(mine, yours.descriptor, 64) for _ in range(10)]
        back = [there.submit_write(yours, mine.descriptor, 64) for _ in range(10)]
        back.append(there.submit_write(yours, mine.descriptor))
        (here if i % 3 else there).forget_peer((there if i % 3 else here).address)
        for transfer in transfers + back:
            try:
                transfer.wait(WAIT_S)
            except xr.PeerLost:
                pass
    here.submit_write(mine, yours.descriptor, imm=3).wait(WAIT_S)
    there.imm_counter(3).wait(1, WAIT_S)


def test_rail_at_whose_address_somebody_else_is_costs_no_peer_that_another_rail_reaches(
    open_engine: EngineFactory,
) -> None:
    engine, there, stranger = (open_engine(name, **TWO) for name in ("here", "there", "stranger"))
    source, target = engine.register(pattern(1, NBYTES)), there.register(np.zeros(NBYTES, np.uint8))
    ports = endpoints_of(there.address.to_bytes())[0][1], endpoints_of(stranger.address.to_bytes())[1][1]
    engine.connect(xr.Address.from_bytes(with_ports(there.address.to_bytes(), ports)), WAIT_S)

    until = time.monotonic() + 1.0  # dozens of refusals
    while time.monotonic() < until:
        engine.submit_write(source, target.descriptor).wait(WAIT_S)

    assert engine.peer_state(there.address) == "connected"
    assert_same_bytes(target.array(), pattern(1, NBYTES))


def wakings() -> int:
    """How often threads of engines went to sleep so far."""
    tasks = [task for task in Path("/proc/self/task").iterdir() if (task / "comm").read_text() == "crossrail-work\n"]
    status = [(task / "status").read_text() for task in tasks]
    return sum(int(text.partition("\nvoluntary_ctxt_switches:")[2].split()[0]) for text in status)


def test_rail_that_stays_away_wakes_an_idle_engine_only_to_try_it(open_engine: EngineFactory) -> None:
    engine, there = (open_engine(name, **TWO) for name in ("here", "there"))
    source, target = engine.register(pattern(1, NBYTES)), there.register(np.zeros(NBYTES, np.uint8))
    with socket.create_server(("127.0.0.2", 0)) as away:
        away.settimeout(WAIT_S)
        ports = endpoints_of(there.address.to_bytes())[0][1], away.getsockname()[1]
        engine.connect(xr.Address.from_bytes(with_ports(there.address.to_bytes(), ports)), WAIT_S)
        engine.submit_write(source, target.descriptor).wait(WAIT_S)  # long enough to want both

        slept = []
        for _ in range(8):  # less and less often, until once a second
            attempt, _ = away.accept()
            slept.append(wakings())
            reset(attempt)

        between = [after - before for before, after in itertools.pairwise(slept)]
        assert min(between[-3:]) < 25, "of 50 looks a second"
    assert engine.peer_state(there.address) == "connected"

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
from tests.conftest import EngineFactory
from tests.faults.loopback import NBYTES, loopback, warmed_up
from tests.support.leaks import anonymous_kib
from tests.support.limits import DEATH_S, WAIT_S, eventually, never
from tests.support.patterns import assert_same_bytes, pattern
from tests.support.process import PeerProcess
from tests.support.proxy import proxied
from tests.support.tcp_wire import endpoints_of, reset, with_ports
from tests.support.threads import tasks_named

pytestmark = pytest.mark.timeout(120)

ONE = loopback("tcp", 1)
TWO = loopback("tcp", 2)


@pytest.mark.parametrize(
    "pause_s", [0.02, 0.002]
)  # its kernel acknowledges after up to 40 ms: several are on their way
def test_trickle_to_a_frozen_peer_does_not_hide_that_it_is_frozen(
    open_engine: EngineFactory, child: PeerProcess, pause_s: float
) -> None:
    engine = open_engine(peer_timeout_s=1.0, **ONE)
    _, operations = warmed_up(engine, child, **ONE)
    child.stop()

    deadline = time.monotonic() + WAIT_S
    transfers: list[xr.Transfer] = []
    while not any(transfer.done for transfer in transfers):
        transfers.append(engine.submit_write(operations.region, operations.descriptors[0], 8))
        time.sleep(pause_s)
        assert time.monotonic() < deadline, "never noticed"

    for transfer in transfers:
        with pytest.raises(xr.PeerLost):
            transfer.wait(WAIT_S)
    child.resume()


def drive(engine: xr.Engine, for_s: float = 0.1) -> None:
    """That of nobody but us, for so long."""
    deadline = time.monotonic() + for_s
    while time.monotonic() < deadline:
        engine.progress()


def drive_until_done(engine: xr.Engine, transfer: xr.Transfer) -> None:
    deadline = time.monotonic() + WAIT_S
    while not transfer.done and time.monotonic() < deadline:
        engine.progress()
    transfer.wait(0)


@pytest.fixture
def ours(open_engine: EngineFactory) -> xr.Engine:
    """Stands still whenever we do, as one whose process is stopped."""
    return open_engine(polling="manual", peer_timeout_s=1.0, connect_timeout_s=1.0, **ONE)


def test_peer_is_not_given_up_because_we_stood_still_while_it_had_no_connection(
    open_engine: EngineFactory, ours: xr.Engine
) -> None:
    other = open_engine("other", **ONE)
    with proxied(ours.address) as path, ours.submit_recvs(2, 100) as pool:
        drive_until_done(ours, other.submit_send(path.address, b"before"))
        path.proxies[0].go_away()
        drive(ours)  # sees that
        path.proxies[0].go_away(False)

        message = other.submit_send(path.address, b"after")
        time.sleep(3)  # its new connection waits for us
        drive_until_done(ours, message)

        assert [bytes(pool.recv(WAIT_S).data) for _ in range(2)] == [b"before", b"after"]


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


def test_death_is_seen_at_once(open_engine: EngineFactory, child: PeerProcess) -> None:
    engine = open_engine(**TWO)
    there = child.open(**TWO)
    engine.connect(there.address, WAIT_S)
    transfer = engine.submit_send(there.address, b"nobody receives")

    child.kill()

    with pytest.raises(xr.PeerLost, match="there"):
        transfer.wait(DEATH_S)


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
    status = [Path(f"/proc/self/task/{task}/status").read_text() for task in tasks_named("crossrail-work")]
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


@pytest.mark.no_sanitizer  # it keeps what is freed
def test_peer_that_idles_again_after_a_burst_keeps_little_memory(open_engine: EngineFactory) -> None:
    hub = open_engine("hub", **ONE)
    peers = [open_engine(f"peer-{i}", **ONE) for i in range(18)]
    source = hub.register(np.ones(16 << 20, np.uint8))
    target = np.zeros(16 << 20, np.uint8)
    regions = [peer.register(target) for peer in peers]
    pages = np.random.default_rng(1).permutation(16384).astype(np.uint32)

    def burst(index: int) -> None:
        under_way = [hub.submit_write(source, regions[index].descriptor, 8) for _ in range(1000)]
        for write in under_way:
            write.wait(WAIT_S)
        hub.submit_paged_writes(source, pages, regions[index].descriptor, pages[::-1].copy(), 1024).wait(WAIT_S)

    for peer in peers:
        hub.connect(peer.address, WAIT_S)
    for index in (0, 1, 0, 1):  # what the hub keeps for itself
        burst(index)
    time.sleep(1.0)
    before = anonymous_kib()

    for index in range(2, len(peers)):
        burst(index)
    time.sleep(1.0)

    # At both sides, which are this process.
    assert (anonymous_kib() - before) / (len(peers) - 2) < 200

"""SIGSTOP and SIGCONT: a frozen peer is not a dead one."""

import time

import numpy as np
import pytest

import crossrail as xr
from tests.conftest import EngineFactory, PeerFactory
from tests.support.limits import DEATH_S, WAIT_S, eventually, never
from tests.support.operations import DATA_KINDS, Operations
from tests.support.patterns import assert_same_bytes, pattern
from tests.support.process import PeerProcess, assert_clean, run_script

NBYTES = 3_000_001
ENTRIES_MAX = 2 * 1024  # of the rings of two rails: kRingEntries in native/transport/shm/layout.h


def fill_ring(engine: xr.Engine, src: xr.Region, target: xr.RegionDescriptor) -> list[xr.Transfer]:
    """Writes that count 3, one after the other, since those posted together share an entry: the last finds no room."""
    transfers = [engine.submit_write(src, target, imm=3)]
    while transfers[-1].done or _ends_soon(transfers[-1]):
        assert len(transfers) <= ENTRIES_MAX, "a ring that is never full"
        transfers.append(engine.submit_write(src, target, imm=3))
    return transfers


def _ends_soon(transfer: xr.Transfer) -> bool:
    try:
        transfer.wait(1.0)
    except xr.WaitTimeout:
        return False
    return True


def test_frozen_peer_is_shown_as_frozen_and_thaws(engine: xr.Engine, child: PeerProcess) -> None:
    events: list[xr.EngineEvent] = []
    engine.on_event(events.append)
    there = child.open()
    engine.connect(there.address, WAIT_S)

    child.stop()
    transfer = engine.submit_send(there.address, b"pending")
    eventually(lambda: engine.peer_state(there.address) == "frozen", "the peer frozen", 5)
    assert not transfer.done
    assert engine.explain(there.address).note

    child.resume()
    eventually(lambda: engine.peer_state(there.address) == "connected", "the peer thawed", 5)
    there.receive(1, 16)
    transfer.wait(WAIT_S)
    assert there.take()[1] == b"pending"
    eventually(lambda: {"peer-frozen", "peer-thawed"} <= {event.kind for event in events}, "both events")


@pytest.mark.parametrize(("path", "kind"), [("auto", "owned"), ("cma", "private")])
def test_frozen_peer_is_shown_as_frozen_when_only_its_ring_is_full(
    open_engine: EngineFactory, child: PeerProcess, path: str, kind: str
) -> None:
    events: list[xr.EngineEvent] = []
    engine = open_engine(private_path=path, rails=2)
    engine.on_event(events.append)
    there = child.open()
    src, remote = engine.alloc(8), there.memory(8, kind)
    engine.submit_write(src, remote.descriptor).wait(WAIT_S)

    child.stop()
    transfers = fill_ring(engine, src, remote.descriptor)
    eventually(lambda: engine.peer_state(there.address) == "frozen", "the peer frozen", 5)
    assert "stopped" in engine.explain(there.address).note
    assert not transfers[-1].done

    child.resume()
    for transfer in transfers:
        transfer.wait(WAIT_S)
    there.expect_count(3, len(transfers))
    eventually(lambda: engine.peer_state(there.address) == "connected", "the peer thawed", 5)
    eventually(lambda: {"peer-frozen", "peer-thawed"} <= {event.kind for event in events}, "both events")


def test_busy_peer_with_a_full_ring_is_not_frozen(open_engine: EngineFactory, child: PeerProcess) -> None:
    engine = open_engine(transport="shm")
    there = child.open(polling="manual")
    src, remote = engine.alloc(8), there.memory(8)
    events: list[xr.EngineEvent] = []
    engine.on_event(events.append)
    engine.connect(there.address, WAIT_S)
    transfers = fill_ring(engine, src, remote.descriptor)

    never(lambda: engine.peer_state(there.address) == "frozen", "a peer frozen whose control plane answers", 1.0)
    assert not transfers[-1].done

    there.expect_count(3, len(transfers))
    for transfer in transfers:
        transfer.wait(WAIT_S)


def test_wait_says_how_much_has_moved_so_far(open_engine: EngineFactory, spawn_peer: PeerFactory) -> None:
    options = {"transport": "tcp", "rails": ["127.0.0.1"]}
    engine = open_engine(**options)
    children = [spawn_peer() for _ in range(2)]
    theres = [child.open(**options) for child in children]
    targets = [there.memory(NBYTES).descriptor for there in theres]
    src = engine.alloc(NBYTES)
    for there in theres:
        engine.connect(there.address, WAIT_S)

    def words() -> str:
        with pytest.raises(xr.WaitTimeout) as error:
            transfer.wait(0.05)
        return str(error.value)

    children[1].stop()
    transfer = engine.submit_scatter(src, targets, lengths=[NBYTES, 10], src_offsets=0, dst_offsets=0)
    eventually(lambda: f": {NBYTES} bytes have moved" in words(), "what the living peer has", WAIT_S)

    children[1].resume()
    transfer.wait(WAIT_S)


def start_connecting(ours: PeerProcess, theirs: PeerProcess, transport: str) -> None:
    """Ours waits no longer than 2 s for an answer of theirs, which is stopped."""
    options = {"transport": transport, "rails": ["127.0.0.1"] if transport == "tcp" else 1}
    ours.open(connect_timeout_s=2.0, **options)
    there = theirs.open(**options)
    theirs.stop()
    ours.start("connect", engine="main", peer=there.address.to_bytes().hex())
    time.sleep(0.3)  # for the first words to be on their way


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_peer_that_answered_while_we_were_stopped_is_not_lost(
    child: PeerProcess, spawn_peer: PeerFactory, transport: str
) -> None:
    theirs = spawn_peer()
    start_connecting(child, theirs, transport)

    child.stop()
    theirs.resume()
    time.sleep(2.5)
    child.resume()

    child.answer()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_peer_that_was_stopped_as_long_as_we_were_is_not_lost(
    child: PeerProcess, spawn_peer: PeerFactory, transport: str
) -> None:
    theirs = spawn_peer()
    start_connecting(child, theirs, transport)

    child.stop()
    time.sleep(2.5)
    child.resume()
    time.sleep(0.3)  # for ours to look at its clock
    theirs.resume()

    child.answer()


def test_idle_frozen_peer_loses_nothing(engine: xr.Engine, child: PeerProcess) -> None:
    there = child.open()
    src, remote = engine.alloc(1000), there.memory(1000)
    engine.submit_write(src, remote.descriptor, imm=1).wait(WAIT_S)

    child.stop()
    time.sleep(0.7)
    child.resume()

    engine.submit_write(src, remote.descriptor, imm=1).wait(WAIT_S)
    there.expect_count(1, 2)


@pytest.mark.parametrize("path", ["staged", "cma"])
@pytest.mark.parametrize("kind", DATA_KINDS)
def test_transfers_to_a_frozen_peer_wait_and_finish(
    open_engine: EngineFactory, child: PeerProcess, kind: str, path: str
) -> None:
    engine = open_engine(private_path=path, rails=2)
    there = child.open(private_path=path)
    mine = engine.register(pattern(1, NBYTES))
    remote = there.memory(NBYTES, "private", fill=1)
    engine.connect(there.address, WAIT_S)
    operations = Operations(engine, mine, [remote.descriptor], imm=5)

    child.stop()
    transfers = [operations.submit(kind) for _ in range(4)]
    never(lambda: any(isinstance(t.exception(), xr.PeerLost) for t in transfers if t.done), "a frozen peer lost", 1.0)
    child.resume()

    for transfer in transfers:
        transfer.wait(WAIT_S)
    if kind != "read":
        there.expect_count(5, 4 * operations.counts(kind))


def test_peer_frozen_in_the_middle_of_a_stream_goes_on_whole(engine: xr.Engine, child: PeerProcess) -> None:
    there = child.open(rails=3)
    src = engine.register(pattern(4, NBYTES))
    remote = there.memory(NBYTES, "private")
    transfers: list[xr.Transfer] = []

    for _ in range(5):
        transfers += [engine.submit_write(src, remote.descriptor, imm=1) for _ in range(10)]
        child.stop()
        time.sleep(0.05)
        child.resume()
    for transfer in transfers:
        transfer.wait(WAIT_S)

    there.expect_count(1, 50)
    assert_same_bytes(remote.content(), pattern(4, NBYTES))


def test_frozen_initiator_does_not_hold_the_target_up(engine: xr.Engine, child: PeerProcess) -> None:
    there = child.open()
    mine, remote = engine.register(np.zeros(NBYTES, np.uint8)), there.memory(NBYTES, "private", fill=1)
    there.stream("write", remote, [mine.descriptor], imm=1)

    child.stop()
    engine.submit_write(mine, mine.descriptor, 100, imm=2).wait(WAIT_S)
    engine.imm_counter(2).wait(1, WAIT_S)

    child.resume()


def test_transfer_to_a_frozen_peer_can_be_cancelled_or_says_why_not(engine: xr.Engine, child: PeerProcess) -> None:
    there = child.open()
    src, remote = engine.register(np.zeros(NBYTES, np.uint8)), there.memory(NBYTES, "private")
    engine.connect(there.address, WAIT_S)
    child.stop()
    transfer = engine.submit_write(src, remote.descriptor, imm=1)
    time.sleep(0.05)

    transfer.cancel()
    child.resume()

    try:
        transfer.wait(WAIT_S)
    except xr.TransferCancelled:
        assert there.count(1) == 0
    else:
        there.expect_count(1, 1)


def test_closing_does_not_wait_for_a_frozen_peer(open_engine: EngineFactory, child: PeerProcess) -> None:
    engine = open_engine()
    there = child.open()
    src, remote = engine.register(np.zeros(NBYTES, np.uint8)), there.memory(NBYTES, "private")
    engine.connect(there.address, WAIT_S)
    child.stop()
    transfer = engine.submit_write(src, remote.descriptor)

    engine.close(0.2)

    assert transfer.done
    assert isinstance(transfer.exception(), xr.EngineClosed | xr.TransferError)
    child.resume()


def test_region_in_use_by_a_frozen_peer_refuses_to_close_and_can_be_closed_later(
    engine: xr.Engine, child: PeerProcess
) -> None:
    there = child.open()
    src, remote = engine.register(np.zeros(NBYTES, np.uint8)), there.memory(NBYTES, "private")
    engine.connect(there.address, WAIT_S)
    child.stop()
    transfer = engine.submit_write(src, remote.descriptor, imm=1)

    with pytest.raises(xr.WaitTimeout):
        src.close(0.05)
    with pytest.raises(xr.UsageError, match="clos"):
        engine.submit_write(src, remote.descriptor)

    child.resume()
    src.close(WAIT_S)
    assert transfer.done
    there.expect_count(1, 1)


def test_forgetting_a_frozen_peer_ends_its_transfers(engine: xr.Engine, child: PeerProcess) -> None:
    there = child.open()
    src, remote = engine.register(np.zeros(NBYTES, np.uint8)), there.memory(NBYTES, "private")
    engine.connect(there.address, WAIT_S)
    child.stop()
    transfer = engine.submit_write(src, remote.descriptor)

    engine.forget_peer(there.address)

    with pytest.raises(xr.PeerLost):
        transfer.wait(DEATH_S)  # not only when some connection attempt times out
    child.resume()


def test_frozen_peer_that_is_killed_is_lost(engine: xr.Engine, child: PeerProcess) -> None:
    there = child.open()
    engine.connect(there.address, WAIT_S)
    child.stop()
    transfer = engine.submit_send(there.address, b"pending")
    eventually(lambda: engine.peer_state(there.address) == "frozen", "the peer frozen", 5)

    child.kill()

    with pytest.raises(xr.PeerLost):
        transfer.wait(WAIT_S)
    assert engine.peer_state(there.address) == "lost"


HUB = """
import sys
import crossrail as xr
with xr.Engine("hub", transport="shm") as engine:
    region = engine.alloc(64)
    print(region.descriptor.to_bytes().hex(), flush=True)
    engine.imm_counter(1).wait(int(sys.argv[1]), 30)
    print("counted", flush=True)
    sys.stdin.readline()
"""


def test_more_peers_that_came_meanwhile_than_strangers_are_kept_are_all_let_in() -> None:
    """shm: they have said who they are, and it is the engine which has not looked."""
    script = run_script(
        """
    import os, resource, signal, subprocess, sys, time
    import crossrail as xr

    MANY = 80  # each comes twice: it asks whether it would be let in, and connects
    HARD = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (HARD, HARD))

    def await_all(condition, engines):
        deadline = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < deadline
            for engine in engines:
                engine.progress()

    def peers_watched():  # by its pidfd, once a connection is there
        links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
        return sum("pidfd" in os.readlink(link) for link in links if os.path.islink(link))

    hub = subprocess.Popen(
        [sys.executable, "-c", sys.argv[1], str(MANY)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    target = xr.RegionDescriptor.from_bytes(bytes.fromhex(hub.stdout.readline()))
    engines = [xr.Engine(f"{i}", transport="shm", polling="manual", connect_timeout_s=30) for i in range(MANY)]
    sources = [engine.alloc(64) for engine in engines]
    os.kill(hub.pid, signal.SIGSTOP)
    transfers = [engine.submit_write(source, target, imm=1) for engine, source in zip(engines, sources, strict=True)]
    await_all(lambda: peers_watched() == MANY, [])
    os.kill(hub.pid, signal.SIGCONT)

    await_all(lambda: all(transfer.done for transfer in transfers), engines)

    assert [transfer.status for transfer in transfers] == ["done"] * MANY
    assert hub.stdout.readline() == "counted\\n"
    for engine in engines:
        engine.close()
    hub.communicate("end\\n")
    """,
        HUB,
        timeout_s=4 * WAIT_S,
    )

    assert_clean(script)

"""Peers over ofi (libfabric's tcp) that die, freeze, come back, refuse; and libraries that are not there."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import crossrail as xr
from tests.conftest import EngineFactory, PeerFactory
from tests.contract.setups import why_not
from tests.support.limits import DEATH_S, WAIT_S, eventually
from tests.support.node import RemoteEngine
from tests.support.operations import KINDS, Operations
from tests.support.patterns import assert_same_bytes, pattern
from tests.support.process import PeerProcess
from tests.support.streams import Stream

NBYTES = 3_000_001
ONE = {"transport": "ofi:tcp", "rails": ["127.0.0.1"]}
TWO = {"transport": "ofi:tcp", "rails": ["127.0.0.1", "127.0.0.2"]}

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(bool(why_not("ofi:tcp")), reason=why_not("ofi:tcp") or "-"),
]


@pytest.fixture
def child(spawn_peer: PeerFactory) -> PeerProcess:
    return spawn_peer()


def warmed_up(engine: xr.Engine, child: PeerProcess, **options: object) -> tuple[RemoteEngine, Operations]:
    there = child.open(**options)
    there.receive(4, 2000)
    there.call("discard_messages")
    mine, remote = engine.register(pattern(1, NBYTES)), there.memory(NBYTES, "private", fill=1)
    engine.submit_write(mine, remote.descriptor).wait(WAIT_S)
    return there, Operations(engine, mine, [remote.descriptor], imm=5)


def transfer_failed(transfer: xr.Transfer) -> bool:
    """False: it was done. Fails unless it was the peer's loss that made it fail."""
    try:
        transfer.wait(WAIT_S)
    except xr.PeerLost:
        return True
    return False


def test_peer_is_not_lost_because_we_stood_still_while_we_connected(open_engine: EngineFactory) -> None:
    ours = open_engine(polling="manual", connect_timeout_s=1.0, peer_timeout_s=2.0, **ONE)
    other = open_engine("other", **ONE)
    target = other.alloc(8)
    transfer = ours.submit_write(ours.alloc(8), target.descriptor, imm=1)
    ours.progress()

    time.sleep(2.5)
    transfer.wait(WAIT_S)

    other.imm_counter(1).wait(1, WAIT_S)


@pytest.mark.parametrize("kind", KINDS)
def test_killed_target_ends_every_transfer_as_lost(open_engine: EngineFactory, child: PeerProcess, kind: str) -> None:
    engine = open_engine(peer_timeout_s=3.0, **TWO)
    there, operations = warmed_up(engine, child, **TWO)
    stream = Stream(operations, kind)
    stream.wait_until_flowing()

    child.kill()

    eventually(lambda: stream.ended, f"the stream of {kind} ended by the death of its target", WAIT_S)
    failures = [outcome for outcome in stream.finish() if outcome is not None]
    assert failures
    assert all(isinstance(failure, xr.PeerLost) for failure in failures), failures
    assert engine.peer_state(there.address) == "lost"


@pytest.mark.parametrize("kind", ["write", "read", "send"])
def test_killed_peer_is_lost_without_waiting_for_its_timeout(
    open_engine: EngineFactory, child: PeerProcess, kind: str
) -> None:
    engine = open_engine(peer_timeout_s=600.0, connect_timeout_s=600.0, **TWO)
    there, operations = warmed_up(engine, child, **TWO)
    child.kill()

    transfer = operations.submit(kind)  # of a write, the bytes may have been placed before the death
    while not transfer_failed(transfer):
        transfer = operations.submit(kind)
    assert engine.peer_state(there.address) == "lost"


def test_death_of_a_peer_that_nobody_waits_for_is_noticed(open_engine: EngineFactory, child: PeerProcess) -> None:
    engine = open_engine(peer_timeout_s=600.0, connect_timeout_s=600.0, **TWO)
    there, _ = warmed_up(engine, child, **TWO)
    child.kill()

    eventually(lambda: engine.peer_state(there.address) == "lost", "the idle peer's death noticed", WAIT_S)


def test_engine_that_has_ended_is_not_waited_for(open_engine: EngineFactory, child: PeerProcess) -> None:
    engine = open_engine(peer_timeout_s=600.0, connect_timeout_s=600.0, **TWO)
    there = child.open(**TWO)
    child.kill()
    child.wait_dead()

    with pytest.raises(xr.PeerLost, match="nobody is at its address"):
        engine.connect(there.address, WAIT_S)


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_peer_is_lost_after_its_timeout(open_engine: EngineFactory, child: PeerProcess, kind: str) -> None:
    engine = open_engine(peer_timeout_s=1.0, **TWO)
    there, operations = warmed_up(engine, child, **TWO)
    child.stop()

    transfers = [operations.submit(kind) for _ in range(3)]
    for transfer in transfers:
        with pytest.raises(xr.PeerLost):
            transfer.wait(WAIT_S)

    assert engine.peer_state(there.address) == "lost"
    child.resume()


@pytest.mark.parametrize("kind", ["write", "read", "send"])
def test_frozen_peer_that_thaws_in_time_goes_on(open_engine: EngineFactory, child: PeerProcess, kind: str) -> None:
    engine = open_engine(peer_timeout_s=20.0, **TWO)
    there, operations = warmed_up(engine, child, **TWO)
    child.stop()
    transfers = [operations.submit(kind) for _ in range(3)]
    eventually(lambda: engine.peer_state(there.address) == "frozen", "the peer frozen")

    child.resume()
    for transfer in transfers:
        transfer.wait(WAIT_S)

    eventually(lambda: engine.peer_state(there.address) == "connected", "the peer thawed")
    if operations.counts(kind):
        there.expect_count(5, 3 * operations.counts(kind))


def test_link_that_idled_longer_than_the_timeout_is_as_good_as_new(open_engine: EngineFactory) -> None:
    engine, other = open_engine(peer_timeout_s=0.4, **TWO), open_engine("other", **TWO)
    src, dst = engine.register(pattern(1, NBYTES)), other.alloc(NBYTES)
    for _ in range(3):
        engine.submit_write(src, dst.descriptor, 100, imm=1).wait(WAIT_S)
        time.sleep(0.5)  # longer than the timeout, with nothing to wait for

    other.imm_counter(1).wait(3, WAIT_S)
    assert engine.stats()["peers_lost"] == 0


def test_region_that_closes_under_writes_takes_no_byte_more(open_engine: EngineFactory, child: PeerProcess) -> None:
    engine = open_engine(**ONE)
    there = child.open(**ONE)
    remote = there.memory(NBYTES, "private", fill=1)
    for _ in range(5):
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


@pytest.mark.parametrize("kind", ["write", "read"])
def test_region_closes_while_a_frozen_peer_is_at_it(open_engine: EngineFactory, child: PeerProcess, kind: str) -> None:
    engine = open_engine(**ONE)
    there = child.open(**ONE)
    remote = there.memory(64 << 20, "private")
    mine = engine.register(np.zeros(64 << 20, np.uint8))
    there.stream(kind, remote, [mine.descriptor], window=2)
    child.stop()

    mine.close(WAIT_S)

    child.resume()


def test_death_of_an_idle_peer_is_seen_when_it_matters(open_engine: EngineFactory, child: PeerProcess) -> None:
    engine = open_engine(peer_timeout_s=3.0, **TWO)
    there = child.open(**TWO)
    engine.connect(there.address, WAIT_S)
    child.kill()
    child.wait_dead()

    with pytest.raises(xr.PeerLost, match="there"):
        engine.submit_send(there.address, b"nobody receives").wait(DEATH_S + 10)


def test_peer_that_comes_back_under_its_name_is_another(open_engine: EngineFactory, spawn_peer: PeerFactory) -> None:
    engine = open_engine(peer_timeout_s=3.0, **ONE)
    src = engine.register(pattern(1, 10_000))
    first = spawn_peer()
    old_memory = first.open(name="phoenix", **ONE).memory(10_000)
    engine.submit_write(src, old_memory.descriptor).wait(WAIT_S)
    first.kill()
    first.wait_dead()

    new = spawn_peer().open(name="phoenix", **ONE)
    new_memory = new.memory(10_000)
    with pytest.raises(xr.PeerLost, match="phoenix"):
        engine.submit_write(src, old_memory.descriptor).wait(WAIT_S)
    engine.submit_write(src, new_memory.descriptor, imm=1).wait(WAIT_S)

    new.expect_count(1, 1)
    assert_same_bytes(new_memory.content(), pattern(1, 10_000))


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
    assert_same_bytes(dst.array(), pattern(1, count * 8))


def test_other_engines_do_not_notice_that_a_peer_refuses(open_engine: EngineFactory) -> None:
    engine, one, two = open_engine(**TWO), open_engine("one", **TWO), open_engine("two", **TWO)
    src, closed, good = engine.register(pattern(1, NBYTES)), one.alloc(NBYTES), two.alloc(NBYTES)
    descriptor = closed.descriptor
    engine.submit_write(src, descriptor, imm=1).wait(WAIT_S)
    closed.close()
    for _ in range(5):
        refused = engine.submit_write(src, descriptor, imm=1)
        writes = [engine.submit_write(src, good.descriptor, 100_000, imm=2) for _ in range(20)]
        with pytest.raises(xr.RemoteRegionClosed):
            refused.wait(WAIT_S)
        for write in writes:
            write.wait(WAIT_S)

    two.imm_counter(2).wait(100, WAIT_S)
    assert one.imm_counter(1).poll() == 1


# --- the library ---


def opened_with(library: str, transport: str = "ofi:tcp") -> subprocess.CompletedProcess[str]:
    """A fresh interpreter, since a library is opened once in a process's life."""
    script = f"import crossrail as xr\nxr.Engine('e', transport={transport!r}).close()"
    env = os.environ | {"CROSSRAIL_LIBFABRIC": library}
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, env=env)


def test_library_that_is_not_there_is_named_with_what_to_do() -> None:
    done = opened_with("/nowhere/libfabric.so.1")
    assert done.returncode != 0
    assert "TransportError" in done.stderr
    assert "/nowhere/libfabric.so.1" in done.stderr
    assert "pip install crossrail[libfabric]" in done.stderr


def test_library_that_is_another_one_is_refused() -> None:
    libc = next(line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/libc.so.6" in line)
    done = opened_with(libc)
    assert "is no libfabric" in done.stderr


@pytest.mark.parametrize(
    ("transport", "words"),
    [
        ("ofi", "EFA"),
        ("ofi:nonsense", "nonsense"),
        ("ofi:shm", "refused"),
    ],
)
def test_provider_without_device_says_what_is_missing(open_engine: EngineFactory, transport: str, words: str) -> None:
    with pytest.raises((xr.TransportError, xr.UsageError), match=words):
        open_engine(transport=transport)


def test_rail_that_is_no_address_is_named(open_engine: EngineFactory) -> None:
    with pytest.raises(xr.UsageError, match=r"10\.99\.99\.99"):
        open_engine(transport="ofi:tcp", rails=["10.99.99.99"])

"""Peers over ofi (libfabric's tcp) that die, freeze, come back, refuse; and libraries that are not there."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import crossrail as xr
from tests.conftest import EngineFactory
from tests.contract.setups import why_not
from tests.faults.loopback import NBYTES, loopback, warmed_up
from tests.support.limits import DEATH_S, PROGRAM_S, WAIT_S, eventually
from tests.support.operations import KINDS
from tests.support.patterns import pattern
from tests.support.process import PeerProcess
from tests.support.streams import Stream

ONE = loopback("ofi:tcp", 1)
TWO = loopback("ofi:tcp", 2)

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(bool(why_not("ofi:tcp")), reason=why_not("ofi:tcp") or "-"),
]


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


def test_death_of_an_idle_peer_is_seen_when_it_matters(open_engine: EngineFactory, child: PeerProcess) -> None:
    engine = open_engine(peer_timeout_s=3.0, **TWO)
    there = child.open(**TWO)
    engine.connect(there.address, WAIT_S)
    child.kill()
    child.wait_dead()

    with pytest.raises(xr.PeerLost, match="there"):
        engine.submit_send(there.address, b"nobody receives").wait(DEATH_S + 10)


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
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=PROGRAM_S, env=env)


def test_library_that_is_not_there_is_named_with_what_to_do() -> None:
    done = opened_with("/nowhere/libfabric.so.1")
    assert done.returncode != 0
    assert "TransportError" in done.stderr
    assert "/nowhere/libfabric.so.1" in done.stderr
    assert "pip install crossrail[libfabric]" in done.stderr


def test_library_that_is_another_one_is_refused() -> None:
    libc = next(line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/libc.so.6" in line)
    done = opened_with(libc)
    assert "is not libfabric" in done.stderr


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

"""SIGKILL of a peer in the middle of every kind of operation, from either side."""

import threading
import time

import numpy as np
import pytest

import crossrail as xr
from tests.conftest import EngineFactory, PeerFactory
from tests.contract.setups import why_not
from tests.support.leaks import open_fds
from tests.support.limits import DEATH_S, WAIT_S, eventually
from tests.support.operations import KINDS, Operations
from tests.support.process import PeerProcess
from tests.support.seeds import Seed
from tests.support.streams import Stream

NBYTES = 1_000_003
ROUNDS = 3
NETWORKS = tuple(network for network in ("tcp", "ofi:tcp") if not why_not(network))
PATHS = ("mapped", "staged", "cma", *NETWORKS)

# What moves no memory has one path over shm.
CASES = [
    (kind, path) for kind in KINDS for path in PATHS if path in ("mapped", *NETWORKS) or kind not in ("barrier", "send")
]


def options_of(path: str) -> dict[str, object]:
    if path in NETWORKS:
        return {"transport": path, "rails": ["127.0.0.1", "127.0.0.2", "127.0.0.3"]}
    return {"rails": 3, "private_path": "auto" if path == "mapped" else path}


def memory_here(engine: xr.Engine, path: str) -> xr.Region:
    return engine.alloc(NBYTES) if path == "mapped" else engine.register(np.zeros(NBYTES, np.uint8))


def check_failure(failure: Exception | None, peer: str, kind: str, transfers: list[xr.Transfer]) -> None:
    assert isinstance(failure, xr.PeerLost), f"{failure!r} instead of PeerLost"
    assert peer in str(failure)
    assert failure.op == transfers[0].kind
    assert failure.nbytes == transfers[0].nbytes
    assert 0 <= failure.nbytes_retired <= failure.nbytes
    assert failure.op in str(failure), f"no word of {kind} in: {failure}"


@pytest.mark.parametrize(("kind", "path"), CASES)
def test_killed_target_ends_every_transfer_as_lost(
    open_engine: EngineFactory, spawn_peer: PeerFactory, seed: Seed, kind: str, path: str
) -> None:
    engine = open_engine(**options_of(path))
    mine = memory_here(engine, path)
    for round_number in range(ROUNDS):
        child = spawn_peer()
        there = child.open(name=f"victim-{round_number}", **options_of(path))
        remote = there.memory(NBYTES, "mapped" if path == "mapped" else "private")
        there.receive(8, 1000)
        there.call("discard_messages")
        stream = Stream(Operations(engine, mine, [remote.descriptor], imm=1), kind)
        stream.wait_until_flowing()

        killed_at = kill_soon(child, seed, round_number)
        eventually(lambda stream=stream: stream.ended, f"the stream of {kind} ended by the death of its target")
        outcomes = stream.finish()

        report_latency(f"{kind} over {path}", stream, killed_at)
        failures = [outcome for outcome in outcomes if outcome is not None]
        assert failures, "every transfer to a dead peer was done"
        for failure in failures:
            check_failure(failure, there.address.name, kind, stream.transfers)
        assert set(stream.completions.values()) == {1}
        assert engine.peer_state(there.address) == "lost"
        lost_at_once(engine, mine, remote.descriptor)
        child.close()
    still_works(engine, mine)


def kill_soon(child: PeerProcess, seed: Seed, *stream: int) -> float:
    """Kills after 0..20 ms of the seed's choice; returns when."""
    time.sleep(float(seed.rng(*stream).uniform(0, 0.02)))
    killed_at = time.monotonic()
    child.kill()
    return killed_at


def report_latency(what: str, stream: Stream, killed_at: float) -> None:
    assert stream.failed_at is not None, "the stream never failed"
    latency_s = stream.failed_at - killed_at
    print(f"death seen by {what} after {latency_s * 1000:.1f} ms")
    assert latency_s < DEATH_S


def lost_at_once(engine: xr.Engine, mine: xr.Region, target: xr.RegionDescriptor) -> None:
    with pytest.raises(xr.PeerLost):
        engine.submit_write(mine, target).wait(DEATH_S)


def still_works(engine: xr.Engine, mine: xr.Region) -> None:
    engine.submit_write(mine, mine.descriptor, 100, dst_offset=200, imm=77).wait(WAIT_S)
    engine.imm_counter(77).wait(1, WAIT_S)
    assert engine.stats()["transfers_inflight"] == 0
    mine.close(WAIT_S)


@pytest.mark.parametrize(("kind", "path"), CASES)
def test_killed_initiator_leaves_the_target_well(
    open_engine: EngineFactory, spawn_peer: PeerFactory, seed: Seed, kind: str, path: str
) -> None:
    engine = open_engine(**options_of(path))
    mine = memory_here(engine, path)
    with engine.submit_recvs(8, 1000, on_message=lambda _: None):
        for round_number in range(ROUNDS):
            fd_count = len(open_fds())
            child = spawn_peer()
            there = child.open(name=f"writer-{round_number}", **options_of(path))
            remote = there.memory(NBYTES, "mapped" if path == "mapped" else "private")
            there.stream(kind, remote, [mine.descriptor], imm=1)

            kill_soon(child, seed, round_number)
            child.close()

            eventually(lambda n=fd_count: len(open_fds()) <= n, "nothing kept of a dead peer")
        still_works(engine, mine)


def test_counts_of_a_dead_peer_stay(engine: xr.Engine, spawn_peer: PeerFactory) -> None:
    child = spawn_peer()
    there = child.open()
    mine, remote = engine.alloc(1000), there.memory(1000, fill=1)
    for _ in range(5):
        there.operate("write", remote, [mine.descriptor], imm=3)

    child.kill()
    child.wait_dead()

    eventually(lambda: engine.imm_counter(3).poll() == 5, "all that it has written counted")
    engine.imm_counter(3).wait(5, WAIT_S)


def test_death_is_seen_by_one_who_only_waits_for_a_transfer(engine: xr.Engine, spawn_peer: PeerFactory) -> None:
    child = spawn_peer()
    there = child.open()
    engine.connect(there.address, WAIT_S)
    transfer = engine.submit_send(there.address, b"nobody receives")
    killed_at: list[float] = []

    def kill() -> None:
        killed_at.append(time.monotonic())
        child.kill()

    timer = threading.Timer(0.2, kill)
    timer.start()
    with pytest.raises(xr.PeerLost, match="there"):
        transfer.wait(WAIT_S)

    latency_s = time.monotonic() - killed_at[0]
    timer.join()
    print(f"death seen by a sleeping waiter after {latency_s * 1000:.1f} ms")
    assert latency_s < DEATH_S


async def test_death_is_seen_by_one_who_awaits(engine: xr.Engine, spawn_peer: PeerFactory) -> None:
    child = spawn_peer()
    there = child.open()
    engine.connect(there.address, WAIT_S)
    transfer = engine.submit_send(there.address, b"nobody receives")

    child.kill()

    with pytest.raises(xr.PeerLost):
        await transfer


def test_death_is_an_event_and_a_warning(
    engine: xr.Engine, spawn_peer: PeerFactory, caplog: pytest.LogCaptureFixture
) -> None:
    events: list[xr.EngineEvent] = []
    child, second = spawn_peer(), spawn_peer()
    for there in (child.open(name="victim"), second.open(name="victim-2")):
        engine.connect(there.address, WAIT_S)
    engine.on_event(events.append)

    child.kill()
    eventually(lambda: any(event.kind == "peer-lost" for event in events), "the event of the death", DEATH_S)
    assert [event.peer for event in events if event.kind == "peer-lost"] == ["victim"]

    with xr.Engine("without listener") as silent:
        address = second.open(name="victim-3").address
        silent.connect(address, WAIT_S)
        second.kill()
        eventually(lambda: silent.explain(address).state == "lost", "the death", DEATH_S)
    assert any(r.levelname == "WARNING" and "victim-3" in r.getMessage() for r in caplog.records)


@pytest.mark.parametrize("network", [None, *NETWORKS])
def test_who_is_only_written_to_hears_of_a_death_once_it_has_connected(
    open_engine: EngineFactory, spawn_peer: PeerFactory, network: str | None
) -> None:
    options: dict[str, object] = {} if network is None else {"transport": network, "rails": ["127.0.0.1"]}
    engine, child = open_engine(**options), spawn_peer()
    there = child.open(name="writer", **options)
    mine, remote = engine.alloc(1000), there.memory(1000, fill=1)
    events: list[xr.EngineEvent] = []
    engine.on_event(events.append)
    there.operate("write", remote, [mine.descriptor], imm=3)
    engine.imm_counter(3).wait(1, WAIT_S)
    assert events == [] and engine.peers() == []

    engine.connect(there.address, WAIT_S)
    child.kill()

    eventually(lambda: [event.kind for event in events] == ["peer-connected", "peer-lost"], "the death")


def test_peer_that_exits_like_a_crash_is_lost(engine: xr.Engine, spawn_peer: PeerFactory) -> None:
    child = spawn_peer()
    there = child.open()
    engine.connect(there.address, WAIT_S)
    transfer = engine.submit_send(there.address, b"nobody receives")

    child.start("exit_now")

    with pytest.raises(xr.PeerLost):
        transfer.wait(WAIT_S)


@pytest.mark.parametrize("path", PATHS)
def test_death_of_one_peer_spares_the_others(
    open_engine: EngineFactory, spawn_peer: PeerFactory, seed: Seed, path: str
) -> None:
    engine = open_engine(**options_of(path))
    mine = memory_here(engine, path)
    victim, survivor = spawn_peer(), spawn_peer()
    streams = []
    for child in (victim, survivor):
        there = child.open(name=f"peer-{child.pid}", **options_of(path))
        remote = there.memory(NBYTES, "mapped" if path == "mapped" else "private")
        streams.append(Stream(Operations(engine, mine, [remote.descriptor], imm=1), "write"))
        streams[-1].wait_until_flowing()

    kill_soon(victim, seed)
    eventually(lambda: streams[0].ended, "the victim's stream ended", WAIT_S)
    flowing_from = len(streams[1].transfers)
    eventually(lambda: len(streams[1].transfers) > flowing_from + 20, "the survivor's stream flows on")

    streams[0].finish()
    assert set(streams[1].finish()) == {None}


def test_scatter_with_one_dead_target_names_it(engine: xr.Engine, spawn_peer: PeerFactory) -> None:
    children = [spawn_peer() for _ in range(3)]
    theres = [child.open(name=f"member-{i}") for i, child in enumerate(children)]
    targets = [there.memory(1000) for there in theres]
    src = engine.alloc(1000)
    for there in theres:
        engine.connect(there.address, WAIT_S)

    children[1].kill()
    children[1].wait_dead()
    transfer = engine.submit_scatter(
        src, [t.descriptor for t in targets], lengths=1000, src_offsets=0, dst_offsets=0, imm=4
    )

    with pytest.raises(xr.PeerLost, match="member-1"):
        transfer.wait(WAIT_S)
    for i in (0, 2):
        assert theres[i].count(4) in (0, 1)  # one lost target ends the transfer: the others got theirs or nothing


def test_connecting_to_a_dead_peer_fails(engine: xr.Engine, spawn_peer: PeerFactory) -> None:
    child = spawn_peer()
    there = child.open(name="dead")
    child.kill()
    child.wait_dead()

    with pytest.raises(xr.PeerLost, match="dead"):
        engine.connect(there.address, WAIT_S)


def test_peer_that_dies_before_it_answers_is_lost(engine: xr.Engine, spawn_peer: PeerFactory) -> None:
    child = spawn_peer()
    there = child.open()
    remote = there.memory(1000)
    child.stop()
    transfer = engine.submit_write(engine.alloc(1000), remote.descriptor)
    time.sleep(0.05)

    child.kill()

    with pytest.raises(xr.PeerLost):
        transfer.wait(WAIT_S)


def test_many_departures_leave_nothing_behind(engine: xr.Engine, spawn_peer: PeerFactory) -> None:
    mine = engine.alloc(100_000)
    child = spawn_peer()
    for i in range(30):
        there = child.open(name=f"engine-{i}")
        remote = there.memory(100_000)
        engine.submit_write(mine, remote.descriptor, imm=1).wait(WAIT_S)
        there.close()
        eventually(lambda a=there.address: engine.peer_state(a) == "lost", "the loss", DEATH_S)
        engine.forget_peer(there.address)

    assert engine.peers() == []
    assert engine.stats()["transfers_inflight"] == 0

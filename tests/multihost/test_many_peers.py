"""Hundreds and a thousand peers of one engine."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import crossrail as xr
from tests.conftest import EngineFactory, PeerFactory
from tests.support.limits import WAIT_S, eventually
from tests.support.node import RemoteEngine, RemoteMemory
from tests.support.process import PeerProcess

PEERS = 1000
CHILDREN = 4
CONNECTED_S = 10.0
KIB_PER_PEER = 64
WRITES = 3000
SLOWDOWN_MAX = 3.0  # shared machines are noisy
SILENT = 300  # of each of two processes: more have not the descriptors everywhere
ATTEMPTS_MAX = 256  # at a time, of those without an answer the ones of the last half second
FIRST_LOT_S = 0.45


def resident_kib() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0])


def writes_per_s(engine: xr.Engine, mine: xr.Region, remote: RemoteMemory, enough: float = float("inf")) -> float:
    """8-byte writes, 32 under way; the best of three runs, and if that is not enough, of as many as 30 s allow: others
    use the machine too, and not all the time."""

    def run() -> float:
        started = time.monotonic()
        window: list[xr.Transfer] = []
        for _ in range(WRITES):
            window.append(engine.submit_write(mine, remote.descriptor, 8))
            if len(window) == 32:
                window.pop(0).wait(WAIT_S)
        for transfer in window:
            transfer.wait(WAIT_S)
        return WRITES / (time.monotonic() - started)

    best, until = max(run() for _ in range(3)), time.monotonic() + 30
    while enough < float("inf") and best <= enough and time.monotonic() < until:
        best = max(best, run())
    return best


def open_many(child: PeerProcess) -> list[RemoteEngine]:
    return [child.open(f"engine-{i}", transport="tcp", rails=["127.0.0.1"]) for i in range(PEERS // CHILDREN)]


@pytest.mark.no_sanitizer
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_thousand_peers_connect_idle_and_do_not_disturb(open_engine: EngineFactory, spawn_peer: PeerFactory) -> None:
    hub = open_engine(transport="tcp", rails=["127.0.0.1"])
    active = spawn_peer().open(transport="tcp", rails=["127.0.0.1"])
    mine, remote = hub.alloc(4096), active.memory(4096)
    alone = writes_per_s(hub, mine, remote)
    children = [spawn_peer() for _ in range(CHILDREN)]
    with ThreadPoolExecutor(CHILDREN) as pool:
        peers = [peer for opened in pool.map(open_many, children) for peer in opened]
    threads, before_kib = threading.active_count(), resident_kib()

    started = time.monotonic()
    group = hub.add_peer_group([peer.address for peer in peers])
    hub.submit_barrier(group, 1).wait(3 * CONNECTED_S)
    connected_s = time.monotonic() - started
    for peer in peers[:: PEERS // 10]:
        peer.expect_count(1, 1)
    kib = (resident_kib() - before_kib) / PEERS
    among = writes_per_s(hub, mine, remote, enough=alone / SLOWDOWN_MAX)

    print(
        f"{PEERS} peers: connected in {connected_s:.1f} s, {kib:.1f} KiB each; beside them {among:.0f} writes/s, ",
        end="",
    )
    print(f"alone {alone:.0f}")
    assert all(hub.peer_state(peer.address) == "connected" for peer in peers)
    assert threading.active_count() == threads
    assert connected_s <= CONNECTED_S
    assert kib <= KIB_PER_PEER
    assert among > alone / SLOWDOWN_MAX


def open_silent(children: list[PeerProcess]) -> list[xr.Address]:
    """Connections to them are taken by their kernel, and get no answer."""
    addresses = []
    for child in children:
        opened = [child.open(f"engine-{i}", transport="tcp", rails=["127.0.0.1"]) for i in range(SILENT)]
        addresses += [engine.address for engine in opened]
        child.stop()
    return addresses


@pytest.mark.no_sanitizer
def test_connecting_to_hundreds_goes_by_turns(open_engine: EngineFactory, spawn_peer: PeerFactory) -> None:
    children = [spawn_peer(), spawn_peer()]
    addresses = open_silent(children)
    hub = open_engine(transport="tcp", rails=["127.0.0.1"])
    before = len(os.listdir("/proc/self/fd"))

    started, most = time.monotonic(), 0
    barrier = hub.submit_barrier(hub.add_peer_group(addresses), 1)
    while True:
        count = len(os.listdir("/proc/self/fd"))
        if time.monotonic() - started > FIRST_LOT_S:
            break
        most = max(most, count)
    eventually(lambda: len(os.listdir("/proc/self/fd")) >= before + ATTEMPTS_MAX, "the first connections")
    for child in children:
        child.resume()
    barrier.wait(WAIT_S)

    assert most <= before + ATTEMPTS_MAX
    assert all(hub.peer_state(address) == "connected" for address in addresses)


@pytest.mark.no_sanitizer
def test_time_to_connect_is_not_spent_waiting_for_others(open_engine: EngineFactory, spawn_peer: PeerFactory) -> None:
    children = [spawn_peer(), spawn_peer()]
    addresses = open_silent(children)
    alive = spawn_peer().open(transport="tcp", rails=["127.0.0.1"])
    # 512 of the 600 before it have their second first, in two lots.
    hub = open_engine(transport="tcp", rails=["127.0.0.1"], connect_timeout_s=1.0)

    barrier = hub.submit_barrier(hub.add_peer_group([*addresses, alive.address]), 1)
    alive.expect_count(1, 1)
    with pytest.raises(xr.PeerLost):
        barrier.wait(WAIT_S)

    assert hub.peer_state(alive.address) == "connected"
    eventually(lambda: {hub.peer_state(address) for address in addresses} == {"lost"}, "all others are given up")

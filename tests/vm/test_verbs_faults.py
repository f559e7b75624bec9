"""Engines over verbs while cables are pulled, packets lost, and peers stopped and killed."""

import hashlib
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import crossrail as xr
from tests.conftest import EngineFactory, PeerFactory
from tests.support.limits import WAIT_S, eventually, never
from tests.support.node import LocalNode, RemoteEngine
from tests.support.operations import Operations
from tests.support.patterns import assert_same_bytes, pattern
from tests.vm.conftest import Cables, run

NBYTES = 1 << 20
OURS = ["rxe0", "rxe1"]
THEIRS = ["rxe2", "rxe3"]
NOTICED_S = 30.0  # a NIC gives up after seconds, and the processors are emulated
KINDS = ("write", "read", "paged_writes", "send")


class Flow:
    """Operations of one kind from this engine to one in a child, submitted between the steps of a test."""

    def __init__(self, here: xr.Engine, there: RemoteEngine, kind: str) -> None:
        self.there, self.kind = there, kind
        self.mine = here.register(pattern(1, NBYTES).copy())
        self.remote = there.memory(NBYTES, "private", fill=1)
        self.operations = Operations(here, self.mine, [self.remote.descriptor], imm=1, page_bytes=32 << 10)
        self.transfers: list[xr.Transfer] = []
        if kind == "send":
            there.receive(64, 1000)

    def submit(self, count: int) -> None:
        self.transfers += [self.operations.submit(self.kind) for _ in range(count)]

    def expect_all_done_and_counted_once(self) -> None:
        for transfer in self.transfers:
            transfer.wait(NOTICED_S)
        if counts := len(self.transfers) * self.operations.counts(self.kind):
            self.there.wait_count(1, counts, NOTICED_S)
            assert self.there.count(1) == 0
        if self.kind == "send":
            for _ in self.transfers:
                assert self.there.take()[1] == bytes(1000)
        if self.kind == "write":
            assert self.remote.digest() == hashlib.sha256(self.mine.array()).hexdigest()
        if self.kind == "read":
            assert_same_bytes(self.mine.array(), pattern(1, NBYTES))
        self.transfers.clear()


OpenThere = Callable[..., RemoteEngine]


@pytest.fixture
def open_there(nothing_leaks: None) -> Iterator[OpenThere]:
    """Opens engines for the other side, in this process: to start a child takes seconds here."""
    node = LocalNode()
    yield lambda key="main", **options: RemoteEngine(node, key, transport="verbs", **({"rails": THEIRS} | options))
    node.shutdown()


def flow(open_engine: EngineFactory, open_there: OpenThere, kind: str, **options: object) -> Flow:
    return Flow(open_engine(transport="verbs", rails=OURS, **options), open_there(**options), kind)


@pytest.mark.parametrize("end", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_rail_that_fails_loses_nothing_and_comes_back(
    open_engine: EngineFactory, open_there: OpenThere, cables: Cables, kind: str, end: int
) -> None:
    moving = flow(open_engine, open_there, kind)
    moving.submit(16)
    time.sleep(0.05)

    cables.pull(end)
    moving.submit(16)
    moving.expect_all_done_and_counted_once()

    cables.plug(end)
    carried = received_bytes(2)
    if kind in ("write", "paged_writes"):
        eventually(lambda: again(moving) and received_bytes(2) - carried > NBYTES, "bytes on the rail again", NOTICED_S)


def test_one_of_three_rails_fails_towards_a_single_one(
    open_engine: EngineFactory, open_there: OpenThere, cables: Cables
) -> None:
    here = open_engine(transport="verbs", rails=["rxe0"])
    moving = Flow(here, open_there(rails=["rxe1", "rxe2", "rxe3"]), "write")
    moving.submit(16)
    moving.transfers[0].wait(NOTICED_S)

    cables.pull(2)
    moving.submit(16)
    moving.expect_all_done_and_counted_once()

    cables.plug(2)
    again(moving)


def again(moving: Flow) -> bool:
    moving.submit(2)
    moving.expect_all_done_and_counted_once()
    return True


def received_bytes(nic: int) -> int:
    return int(Path(f"/sys/class/net/nic{nic}/statistics/rx_bytes").read_text())


def test_all_rails_down_and_up_again(open_engine: EngineFactory, open_there: OpenThere, cables: Cables) -> None:
    moving = flow(open_engine, open_there, "write", peer_timeout_s=30)
    moving.submit(8)

    for nic in (0, 1):
        cables.pull(nic)
    moving.submit(4)
    never(lambda: moving.transfers[-1].done, "a transfer without a rail", 1.5)
    for nic in (0, 1):
        cables.plug(nic)

    moving.expect_all_done_and_counted_once()


def test_peer_out_of_reach_is_lost_in_time(open_engine: EngineFactory, open_there: OpenThere, cables: Cables) -> None:
    moving = flow(open_engine, open_there, "write", peer_timeout_s=3)
    moving.submit(2)
    moving.expect_all_done_and_counted_once()
    for nic in (2, 3):
        cables.pull(nic)

    moving.submit(2)

    started = time.monotonic()
    for transfer in moving.transfers:
        with pytest.raises(xr.PeerLost):
            transfer.wait(NOTICED_S)
    assert time.monotonic() - started < 3 + 10


def test_peer_that_was_never_there_is_not_connected(
    open_engine: EngineFactory, open_there: OpenThere, cables: Cables
) -> None:
    here = open_engine(transport="verbs", rails=OURS, connect_timeout_s=2)
    there = open_there()
    target = there.memory(1000)
    for nic in (2, 3):
        cables.pull(nic)

    with pytest.raises(xr.PeerLost):
        here.submit_write(here.alloc(1000), target.descriptor).wait(NOTICED_S)


@pytest.mark.parametrize("spoilt", [("loss", "2%"), ("delay", "200us", "reorder", "5%"), ("duplicate", "10%")])
def test_bad_network_loses_nothing(
    open_engine: EngineFactory, open_there: OpenThere, cables: Cables, spoilt: tuple[str, ...]
) -> None:
    for nic in range(4):
        cables.spoil(nic, *spoilt)
    for kind in KINDS:
        here, there = open_engine(transport="verbs", rails=OURS), open_there(kind)
        moving = Flow(here, there, kind)
        moving.submit(4)
        moving.expect_all_done_and_counted_once()


@pytest.mark.parametrize("kind", KINDS)
def test_killed_peer_ends_every_transfer(open_engine: EngineFactory, spawn_peer: PeerFactory, kind: str) -> None:
    here = open_engine(transport="verbs", rails=OURS, peer_timeout_s=3)
    child = spawn_peer()
    moving = Flow(here, child.open(transport="verbs", rails=THEIRS), kind)
    moving.submit(20)

    child.kill()

    lost = 0
    for transfer in moving.transfers:
        try:
            transfer.wait(NOTICED_S)
        except xr.PeerLost:
            lost += 1
    assert lost > 0
    again = spawn_peer().open(transport="verbs", rails=THEIRS)  # others never notice
    with here.alloc(NBYTES) as source:
        here.submit_write(source, again.memory(NBYTES).descriptor, imm=2).wait(WAIT_S)
    again.expect_count(2, 1)


def test_frozen_peer_is_shown_and_thaws(open_engine: EngineFactory, spawn_peer: PeerFactory) -> None:
    here = open_engine(transport="verbs", rails=OURS, peer_timeout_s=60)
    child = spawn_peer()
    there = child.open(transport="verbs", rails=THEIRS)
    here.connect(there.address, WAIT_S)

    child.stop()
    transfer = here.submit_send(there.address, b"pending")
    eventually(lambda: here.peer_state(there.address) == "frozen", "the peer frozen", NOTICED_S)
    child.resume()
    there.receive(1, 16)

    transfer.wait(WAIT_S)
    assert there.take()[1] == b"pending"
    eventually(lambda: here.peer_state(there.address) == "connected", "the peer thawed", NOTICED_S)


def test_same_name_restarted_is_another(open_engine: EngineFactory, spawn_peer: PeerFactory) -> None:
    here = open_engine(transport="verbs", rails=OURS, peer_timeout_s=3)
    first = spawn_peer()
    old = first.open(transport="verbs", rails=THEIRS, name="twin")
    stale = old.memory(1000).descriptor
    here.connect(old.address, WAIT_S)
    first.kill()
    first.wait_dead()

    new = spawn_peer().open(transport="verbs", rails=THEIRS, name="twin")
    source = here.alloc(1000)

    here.submit_write(source, new.memory(1000).descriptor, imm=1).wait(WAIT_S)
    new.expect_count(1, 1)
    with pytest.raises(xr.PeerLost):
        here.submit_write(source, stale).wait(NOTICED_S)


def test_other_secret_is_refused(open_engine: EngineFactory, open_there: OpenThere) -> None:
    here = open_engine(transport="verbs", rails=OURS, secret="one", connect_timeout_s=3)
    there = open_there(secret="two")

    with pytest.raises(xr.PeerLost):
        here.connect(there.address, WAIT_S)


def test_port_that_is_down_at_the_start_is_used_later(
    open_engine: EngineFactory, open_there: OpenThere, cables: Cables
) -> None:
    cables.pull(1)
    state = Path("/sys/class/infiniband/rxe1/ports/1/state")
    eventually(lambda: "DOWN" in state.read_text(), "the port down")
    moving = flow(open_engine, open_there, "write")
    moving.submit(4)
    moving.expect_all_done_and_counted_once()

    cables.plug(1)
    carried = received_bytes(3)

    eventually(lambda: again(moving) and received_bytes(3) - carried > NBYTES, "bytes on the rail", NOTICED_S)


def test_ten_thousand_transfers_outstanding(open_engine: EngineFactory, open_there: OpenThere) -> None:
    here = open_engine(transport="verbs", rails=OURS)
    there = open_there()
    source, target = here.alloc(64), there.memory(64)

    transfers = [here.submit_write(source, target.descriptor, imm=1) for _ in range(10_000)]

    for transfer in transfers:
        transfer.wait(NOTICED_S)
    there.expect_count(1, 10_000)


def test_memory_that_may_not_be_locked_is_said_with_the_remedy() -> None:
    script = """
        import resource, numpy, os
        import crossrail as xr
        xr.Engine, xr.TransportError  # loads all of it, while this process may read it
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (8 << 20, 8 << 20))
        os.setgid(65534); os.setuid(65534)  # root may lock what it likes
        with xr.Engine("small", transport="verbs", rails=["rxe0"]) as engine:
            try:
                engine.register(numpy.zeros(64 << 20, numpy.uint8))
            except xr.TransportError as error:
                print(error)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "ulimit -l" in done.stdout, done.stdout + done.stderr


def test_unknown_rail_is_a_usage_error_that_lists_what_is_there() -> None:
    with pytest.raises(xr.UsageError, match=r"mlx5_9.*rxe0:1 on nic0 10\.77\.0\.1"):
        xr.Engine("here", transport="verbs", rails=["mlx5_9"])


def test_region_larger_than_one_work_request(open_engine: EngineFactory, open_there: OpenThere) -> None:
    """Soft-RoCE takes 8 MiB at once."""
    here = open_engine(transport="verbs", rails=["rxe0"])
    there = open_there(rails=["rxe2"])
    source = here.register(np.random.default_rng(1).integers(0, 256, 20 << 20, np.uint8))
    target = there.memory(20 << 20, "private")

    here.submit_write(source, target.descriptor, imm=1).wait(60)

    there.expect_count(1, 1)
    assert target.digest() == hashlib.sha256(source.array()).hexdigest()


def test_stale_descriptor_tried_again_and_again_fails_nothing_of_its_targets(open_engine: EngineFactory) -> None:
    here = open_engine(transport="verbs", rails=OURS[:1])
    there = open_engine(transport="verbs", rails=THEIRS[:1])
    mine, live, theirs = here.alloc(4096), here.alloc(8 * NBYTES), there.alloc(8 * NBYTES)
    stale = there.alloc(4096)
    here.submit_write(mine, stale.descriptor).wait(WAIT_S)
    stale.close()

    innocent = there.submit_write(theirs, live.descriptor, imm=1)
    refused = 0
    while not innocent.done or refused < 20:
        with pytest.raises(xr.TransferError):
            here.submit_write(mine, stale.descriptor).wait(NOTICED_S)
        refused += 1

    innocent.wait(NOTICED_S)
    here.imm_counter(1).wait(1, NOTICED_S)


def test_peers_that_stand_still_keep_no_message_from_others(open_engine: EngineFactory) -> None:
    still = [open_engine(transport="verbs", rails=[rail], polling="manual") for rail in ("rxe1", "rxe2")]
    awake = open_engine(transport="verbs", rails=["rxe3"])
    pool = awake.submit_recvs(8, 4096)
    senders = [open_engine(transport="verbs", rails=["rxe0"], message_bytes_max=256 << 10) for _ in range(2)]
    for sender in senders:
        for peer in (*still, awake):
            source, target = sender.alloc(8), peer.alloc(8)
            met = sender.submit_write(source, target.descriptor)
            eventually(lambda met=met: moved(still) and met.done, "the peers met", NOTICED_S)
            met.wait(0)

    waiting = [s.submit_send(peer.address, bytes(256 << 10)) for _ in range(4) for s in senders for peer in still]
    time.sleep(1)
    senders[0].submit_send(awake.address, b"on").wait(NOTICED_S)

    assert not any(transfer.done for transfer in waiting)
    pool.close()


def moved(engines: list[xr.Engine]) -> bool:
    for engine in engines:
        engine.progress()
    return True


def test_silent_neighbours_keep_nobody_waiting_who_answers(open_engine: EngineFactory, cables: Cables) -> None:
    silent = [open_engine(transport="verbs", rails=["rxe3"]) for _ in range(8)]
    addresses = [engine.address for engine in silent]
    for engine in silent:
        engine.close()
    live = open_engine(transport="verbs", rails=["rxe2"])
    cables.pull(3)
    run("ip", "neigh", "flush", "to", "10.77.0.4")
    here = open_engine(transport="verbs", rails=["rxe0"])
    for address in addresses:
        here.submit_send(address, b"hello")

    started = time.monotonic()
    here.connect(live.address, NOTICED_S)

    assert time.monotonic() - started < 5

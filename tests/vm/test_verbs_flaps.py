"""Two engines that write to, read from and talk to each other over verbs while links go up and down between them."""

from pathlib import Path

import pytest

import crossrail as xr
from tests.conftest import EngineFactory, PeerFactory
from tests.support.limits import WAIT_S, eventually
from tests.support.operations import Operations
from tests.support.patterns import assert_same_bytes, pattern
from tests.support.seeds import Seed
from tests.vm.conftest import Cables

ONE, OTHER = ["rxe0", "rxe1"], ["rxe2", "rxe3"]
NICS = 4
SIZES = (1000, 64 << 10, 1 << 20)
KINDS = ("write", "paged_writes", "read", "send")
DONE_S = 60.0  # a NIC gives up after seconds, again and again, and the processors are emulated


class Target:
    """What operations of one kind and size put into memory of the other engine (reads: into ours)."""

    def __init__(self, here: xr.Engine, there: xr.Engine, kind: str, nbytes: int, imm: int) -> None:
        self.kind = kind
        mine, theirs = self.regions = here.alloc(nbytes), there.alloc(nbytes)
        self.operations = Operations(here, mine, [theirs.descriptor], imm=imm, page_bytes=nbytes // 4)
        source, target = (theirs, mine) if kind == "read" else (mine, theirs)
        source.array()[:] = pattern(nbytes, nbytes)
        self.bytes = target.array()
        self.expected = source.array().copy()
        if kind == "paged_writes":
            pages = self.operations.pages
            self.expected.reshape(4, -1)[pages[::-1]] = source.array().reshape(4, -1)[pages]

    def submit(self) -> xr.Transfer:
        return self.operations.submit(self.kind)

    def expect_written(self) -> None:
        assert_same_bytes(self.bytes, self.expected)
        self.bytes[:] = 0


class Traffic:
    """Operations of all kinds and sizes from one engine to the other, and what the other got of them."""

    def __init__(self, here: xr.Engine, there: xr.Engine, imm: int) -> None:
        self.here, self.there = here, there
        self.counter = there.imm_counter(imm)
        self.messages = there.submit_recvs(64, 100)
        self.targets = {
            (kind, size): Target(here, there, kind, size, imm)
            for kind in ("write", "paged_writes", "read")
            for size in SIZES
        }
        self.transfers: list[xr.Transfer] = []
        self.used: set[tuple[str, int]] = set()
        self.counts = self.sent = self.numbered = 0

    def submit(self, kind: str, size: int) -> None:
        if kind == "send":
            self.transfers.append(self.here.submit_send(self.there.address, b"%d" % (self.numbered + self.sent)))
            self.sent += 1
            return
        target = self.targets[kind, size]
        self.transfers.append(target.submit())
        self.counts += target.operations.counts(kind)
        self.used.add((kind, size))

    def expect_all_done_and_counted_once(self) -> None:
        for transfer in self.transfers:
            transfer.wait(DONE_S)
        if self.counts:
            self.counter.wait(self.counts, DONE_S)
        assert self.counter.poll() == 0
        messages = sorted(int(self.messages.recv(WAIT_S).data) for _ in range(self.sent))
        assert messages == list(range(self.numbered, self.numbered + self.sent))
        assert self.messages.poll() == []
        for used in self.used:
            self.targets[used].expect_written()
        self.numbered += self.sent
        self.counts = self.sent = 0
        self.transfers.clear()
        self.used.clear()


def received_bytes(nic: int) -> int:
    return int(Path(f"/sys/class/net/nic{nic}/statistics/rx_bytes").read_text())


@pytest.mark.timeout(300)
def test_links_that_flap_at_random_lose_nothing_and_every_rail_comes_back(
    open_engine: EngineFactory, cables: Cables, seed: Seed
) -> None:
    one = open_engine(transport="verbs", rails=ONE, peer_timeout_s=120)
    other = open_engine(transport="verbs", rails=OTHER, peer_timeout_s=120)
    both = [Traffic(one, other, imm=1), Traffic(other, one, imm=2)]
    draw = seed.rng()

    for _ in range(3):
        cables.spoil(int(draw.integers(NICS)), *draw.choice(["loss 1%", "corrupt 1%", "duplicate 5%"]).split())
        for _ in range(8):
            for traffic in both:
                traffic.submit(str(draw.choice(KINDS)), int(draw.choice(SIZES)))
            nic = int(draw.integers(NICS))
            cables.pull(nic)
            if draw.random() < 0.7:
                cables.plug(nic)
        cables.repair()
        for traffic in both:
            traffic.expect_all_done_and_counted_once()

    carried = [received_bytes(nic) for nic in range(NICS)]

    def all_carry_again() -> bool:
        for traffic in both:
            for _ in range(4):
                traffic.submit("write", SIZES[-1])
            traffic.expect_all_done_and_counted_once()
        return all(received_bytes(nic) - carried[nic] > SIZES[-1] for nic in range(NICS))

    eventually(all_carry_again, "bytes on every rail", DONE_S)


@pytest.mark.timeout(300)
def test_peers_killed_while_links_flap_end_what_is_for_them_and_nothing_else(
    open_engine: EngineFactory, spawn_peer: PeerFactory, cables: Cables, seed: Seed
) -> None:
    here = open_engine(transport="verbs", rails=ONE, peer_timeout_s=10)
    survivor = open_engine(transport="verbs", rails=OTHER, peer_timeout_s=120)
    traffic = Traffic(survivor, here, imm=1)
    draw = seed.rng()

    for _ in range(3):
        child = spawn_peer()
        doomed = child.open(transport="verbs", rails=OTHER)
        source = here.alloc(SIZES[1])
        operations = Operations(here, source, [doomed.memory(SIZES[1]).descriptor], imm=2, page_bytes=SIZES[1] // 4)
        here.connect(doomed.address, DONE_S)
        ending = []
        for step in range(6):
            nic = int(draw.integers(NICS))
            cables.pull(nic)
            ending += [operations.submit(kind) for kind in ("write", "paged_writes", "read")]
            traffic.submit(str(draw.choice(KINDS)), int(draw.choice(SIZES)))
            if step == 3:
                child.kill()
            cables.plug(nic)
        cables.repair()

        traffic.expect_all_done_and_counted_once()
        lost = 0
        for transfer in ending:
            try:
                transfer.wait(DONE_S)
            except xr.PeerLost:
                lost += 1
        assert lost > 0
        source.close()

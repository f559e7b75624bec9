"""The way of private memory changes once on each link, when both have been measured: also in the middle of a write."""

from __future__ import annotations

import time

import numpy as np
import pytest

import crossrail as xr
from tests.conftest import EngineFactory, PeerFactory
from tests.support.limits import SLOWNESS, WAIT_S, eventually
from tests.support.node import RemoteEngine, RemoteMemory
from tests.support.patterns import pattern
from tests.support.process import PeerProcess

RAILS = 4
SLICE_BYTES = 1 << 18
MEASURED_BYTES = RAILS * 8 * SLICE_BYTES  # of each write by which the staged way is measured: more than rings hold
CAUGHT_BYTES = RAILS * 3 * SLICE_BYTES  # of one that it changes under: last slices are posted a turn after the others
CAUGHT, MARK = 7, 8
CHANGES = 3  # in the middle of a write
ENGINES = 40  # at most, to see as many


def way_to(engine: xr.Engine, there: RemoteEngine) -> str:
    return engine.explain(there.address).paths[0].path


def drive(engine: xr.Engine, *transfers: xr.Transfer) -> None:
    deadline = time.monotonic() + WAIT_S
    while not all(transfer.done for transfer in transfers):
        engine.progress()
        assert time.monotonic() < deadline, "hangs"


class Sender:
    """Writes until the way has changed, each time cancelling one that a peer who stands still has not begun.

    ahead_bytes: written before all others; how many they are decides when the way changes.
    done: of those, how many were all the same. changed_within: whether it changed under the last of them.
    """

    def __init__(
        self, engine: xr.Engine, child: PeerProcess, there: RemoteEngine, target: RemoteMemory, ahead_bytes: int
    ) -> None:
        self.engine, self.child, self.there, self.target = engine, child, there, target
        self.source = engine.register(pattern(1, MEASURED_BYTES))
        self.done = 0
        self.changed_within = False
        drive(engine, self.write(ahead_bytes))

    def run(self) -> None:
        for _ in range(100):
            self.child.stop()
            measured = self.write(MEASURED_BYTES)
            self.turns()
            self.child.resume()
            time.sleep(0.005 * SLOWNESS)  # it takes what the rings hold; we learn of that below
            self.child.stop()
            caught = self.write(CAUGHT_BYTES, imm=CAUGHT)
            self.turns()
            self.changed_within = way_to(self.engine, self.there) != "staged"
            caught.cancel()
            self.engine.progress()
            self.child.resume()
            drive(self.engine, measured, caught)
            self.done += caught.status == "done"
            if way_to(self.engine, self.there) != "staged":
                return
        raise AssertionError("the way never changed")

    def write(self, nbytes: int, **how: int) -> xr.Transfer:
        return self.engine.submit_write(self.source, self.target.descriptor, length=nbytes, **how)

    def turns(self) -> None:
        for _ in range(10):
            self.engine.progress()


@pytest.mark.timeout(120)
def test_cancelled_writes_are_not_counted_when_the_way_changes_under_them(
    open_engine: EngineFactory, spawn_peer: PeerFactory
) -> None:
    child = spawn_peer()
    there = child.open(transport="shm", rails=RAILS)
    target = there.memory(MEASURED_BYTES, "private")
    changes = done = 0
    for number in range(ENGINES):
        engine = open_engine(f"sender-{number}", transport="shm", rails=RAILS, polling="manual")
        sender = Sender(engine, child, there, target, ahead_bytes=1 + number * SLICE_BYTES % MEASURED_BYTES)
        sender.run()
        drive(engine, *(sender.write(0, imm=MARK, rail=rail) for rail in range(RAILS)))  # behind what rings still hold
        there.expect_count(MARK, RAILS)
        engine.close()
        done += sender.done
        changes += sender.changed_within
        if changes == CHANGES:
            break
    assert changes == CHANGES, "it changed between writes only"
    assert (there.count(CAUGHT), there.call("stats")["imm_units_received"] % 48) == (done, 0)


@pytest.mark.parametrize("busy_rail", [0, 1])
def test_what_is_taken_back_of_a_write_is_its_tail_though_the_way_changed_within_it(
    open_engine: EngineFactory, spawn_peer: PeerFactory, busy_rail: int
) -> None:
    """One rail has delivered its part. On the other first slices wait behind another write; later ones could pass."""
    there = spawn_peer().open(transport="shm", rails=2, polling="manual")
    target = there.memory(80 << 20, "private")
    engine = open_engine(transport="shm", rails=2, polling="manual")
    before, caught_bytes = np.zeros(64 << 20, np.uint8), 8 << 20
    junk, source = engine.register(before), engine.register(np.full(caught_bytes, 9, np.uint8))

    def turn() -> bool:
        there.call("progress")
        for _ in range(20):
            engine.progress()
        return True

    def turns(*transfers: xr.Transfer, peers: int) -> None:
        for _ in range(peers):
            turn()
        eventually(lambda: all(transfer.done for transfer in transfers) or not turn(), "their end")

    almost = engine.submit_write(junk, target.descriptor, 31 << 20)  # of 32 MiB, by which the staged way is measured
    turns(almost, peers=400)
    other = engine.submit_write(junk, target.descriptor, 64 << 20, rail=busy_rail)
    turns(peers=0)
    write = engine.submit_write(source, target.descriptor, dst_offset=64 << 20, imm=CAUGHT)
    turns(peers=4)
    write.cancel()
    turns(other, write, peers=800)

    whole = np.array_equal(np.frombuffer(target.content(64 << 20, caught_bytes), np.uint8), source.array())
    assert (write.status == "done", there.count(CAUGHT)) == (whole, int(whole))

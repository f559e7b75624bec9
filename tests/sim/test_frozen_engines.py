"""Engines that stand still: what of it is theirs, and what is not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import crossrail as xr
from crossrail import sim
from tests.support.limits import PROGRAM_S

REPOSITORY = Path(__file__).resolve().parents[2]

# The writer is frozen with a write under way, some parts of which have landed when the wire is cut; the target's region
# is dropped while nobody can end the writer's path.
_DROPS_WHILE_FROZEN = """
import gc
import numpy as np
from crossrail import sim
nic = sim.NicProfile("slow", gbps=0.1, latency_us=20, completion_us=20, jitter_us=200_000)
with sim.World(3) as world:
    hosts = world.host("a", nic), world.host("b", nic)
    a, b = hosts[0].engine("a"), hosts[1].engine("b")
    src, dst = a.register(np.zeros(8 << 20, "u1")), b.register(np.zeros(8 << 20, "u1"))
    a.submit_write(src, dst.descriptor).wait(20)
    a.submit_write(src, dst.descriptor, imm=1)
    world.run(0.2)
    world.freeze(a, for_s=30)
    world.partition([hosts[0]], [hosts[1]])
    world.run(2)
    b.close()
    del dst, b
    gc.collect()
    hosts[1].engine("again")
    print("opened")
"""


def test_a_region_is_dropped_while_the_writer_of_a_work_on_its_way_there_is_frozen() -> None:
    child = subprocess.run(
        [sys.executable, "-c", _DROPS_WHILE_FROZEN],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=PROGRAM_S,
        check=True,
    )

    assert child.stdout.strip() == "opened"


def test_time_in_which_an_engine_stood_still_is_not_its_nics() -> None:
    """It has broken a path off, and sees 12 s later that its NIC did so at once: behind much other news."""
    nic = sim.NicProfile("far", gbps=100, latency_us=20_000, completion_us=20_000, ordered=True)
    errors: list[str] = []
    for seed in range(4):
        with sim.World(seed) as world:
            target, *sources = (world.host(name, nic) for name in ("b", "a0", "a1", "a2"))
            b = target.engine("b", peer_timeout_s=60)
            b.on_event(lambda event: errors.append(event.detail) if event.kind == "protocol-error" else None)
            dst = b.alloc(1 << 20)
            writers = [host.engine(host.name, peer_timeout_s=60) for host in sources]
            regions = [writer.alloc(1 << 20) for writer in writers]
            for writer, src in zip(writers, regions, strict=True):
                writer.submit_write(src, dst.descriptor, imm=1).wait(5)
                b.submit_write(dst, src.descriptor).wait(5)
            world.run(1)
            world.fail_works(target, count=1)
            transfers = [b.submit_write(dst, regions[0].descriptor, 64)]
            for writer, src in zip(writers[1:], regions[1:], strict=True):
                transfers += [writer.submit_write(src, dst.descriptor, 64, imm=2) for _ in range(600)]
            world.run(0.0202)  # its failure is told, and its path is being broken off

            world.freeze(b, for_s=12)
            world.run(40)

            assert {transfer.status for transfer in transfers} == {"done"}
    assert errors == []


def test_an_own_port_that_is_down_is_named_when_a_peer_is_not_reached() -> None:
    with sim.World(1) as world:
        hosts = world.host("a"), world.host("b")
        a, b = hosts[0].engine("a", connect_timeout_s=2), hosts[1].engine("b")
        src, dst = a.alloc(4096), b.alloc(4096)
        world.rail_down(hosts[0], 0)

        with pytest.raises(xr.PeerLost, match=r"our NIC a/0 is down: unplugged"):
            a.submit_write(src, dst.descriptor).wait(30)


@pytest.mark.parametrize("rails", [1, 2])
def test_a_peer_is_not_called_frozen_because_our_own_ports_are_down(rails: int) -> None:
    with sim.World(1) as world:
        hosts = world.host("a", f"{rails}xplain"), world.host("b", f"{rails}xplain")
        a, b = hosts[0].engine("a", peer_timeout_s=10), hosts[1].engine("b", peer_timeout_s=10)
        src, dst = a.alloc(4096), b.alloc(4096)
        a.submit_write(src, dst.descriptor).wait(5)
        world.run(5)
        for rail in range(rails):
            world.rail_down(hosts[0], rail)
        world.run(1)
        transfer = a.submit_write(src, dst.descriptor)

        states = states_while(world, a, b, transfer)

        assert states == {"connected"}
        with pytest.raises(xr.PeerLost, match=r"no path to it for 10.*our NIC a/[01] is down: unplugged"):
            transfer.wait(0)


def test_a_port_that_comes_back_in_time_costs_nothing() -> None:
    with sim.World(1) as world:
        hosts = world.host("a", "plain"), world.host("b", "plain")
        a, b = hosts[0].engine("a", peer_timeout_s=10), hosts[1].engine("b", peer_timeout_s=10)
        src, dst = a.alloc(4096), b.alloc(4096)
        a.submit_write(src, dst.descriptor).wait(5)
        world.rail_down(hosts[0], 0, at_s=world.now_s + 1, for_s=9)
        world.run(2)
        transfer = a.submit_write(src, dst.descriptor)

        states = states_while(world, a, b, transfer)

        assert states == {"connected"}
        transfer.wait(0)


def states_while(world: sim.World, here: xr.Engine, there: xr.Engine, transfer: xr.Transfer) -> set[str]:
    """What `here` thought of `there` until the transfer ended."""
    states = set()
    while not transfer.done and world.now_s < 60:
        states.add(here.peer_state(there.address))
        world.run(0.25)
    return states

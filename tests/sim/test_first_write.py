"""What the first write to a peer costs, in round trips: the handshake's and its own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from crossrail import sim

ONE_WAY_US = 10_000
ROUND_TRIP_S = 2 * ONE_WAY_US / 1e6
NIC = sim.NicProfile("far", gbps=400, latency_us=ONE_WAY_US, completion_us=ONE_WAY_US)


def round_trips(nic: sim.NicProfile, rails: int, *, from_first: bool, writes: bool) -> float:
    """Until one of two strangers is connected to the other, or until its first write, which connects, is done."""
    with sim.World(1) as world:
        first, second = (world.host(name, [nic] * rails).engine(name) for name in ("first", "second"))
        writer, target = (first, second) if from_first else (second, first)
        source = writer.register(np.ones(4096, "u1"))
        region = target.register(np.zeros(4096, "u1"))
        if writes:
            writer.submit_write(source, region.descriptor, imm=1).wait(20)
        else:
            writer.connect(target.address, 20)
        return world.now_s / ROUND_TRIP_S


@pytest.mark.parametrize("rails", [1, 3])
@pytest.mark.parametrize("ordered", [True, False])
def test_first_write_takes_one_round_trip_beyond_the_handshake(rails: int, ordered: bool) -> None:
    nic = replace(NIC, ordered=ordered, names_imm_paths=ordered)

    connects = [round_trips(nic, rails, from_first=way, writes=False) for way in (True, False)]
    writes = [round_trips(nic, rails, from_first=way, writes=True) for way in (True, False)]

    # One of the two leads and offers a path at once; the other has to knock first.
    assert sorted(connects) == pytest.approx([1, 2], abs=0.05)
    for connect, write in zip(connects, writes, strict=True):
        assert write - connect == pytest.approx(1, abs=0.05)

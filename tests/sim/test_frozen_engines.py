"""Engines that stand still: what of it is theirs, and what is not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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
        timeout=20,
        check=True,
    )

    assert child.stdout.strip() == "opened"

"""Hosts that do not agree on the time, to hours, and whose clocks jump: nothing is told on wall clocks."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import moved_clock
from tests.support.kv_processes import Asking, Services, killed_prefiller_costs_time_and_nothing_else, monolithic
from tests.support.limits import PROGRAM_S, eventually

HOUR_S = 3600
AHEAD_S = {"router": 30 * HOUR_S, "p0": -26 * HOUR_S, "p1": 7 * 60, "d0": -8 * HOUR_S}
LEASES = 2
# The library that moves clocks is loaded before any sanitizer's, which refuse that.
pytestmark = pytest.mark.no_sanitizer


@pytest.fixture(params=["auto", "tcp"])
def services(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Services]:
    made = Services(tmp_path / "stderr", request.param)
    made.environments = {name: moved_clock.environment(ahead_s) for name, ahead_s in AHEAD_S.items()}
    try:
        made.add_router()
        for name, role in (("p0", "prefiller"), ("p1", "prefiller"), ("d0", "decoder")):
            made.add(role, name)
        made.joined("p0", "p1", "d0")
        yield made
    finally:
        made.close()


def test_clocks_are_moved_and_jump() -> None:
    program = "import time\nfor _ in range(5): print(time.time(), time.monotonic()); time.sleep(0.5)"
    run = subprocess.run(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, timeout=PROGRAM_S, check=True,
        env=os.environ | moved_clock.environment(-26 * HOUR_S),
    )  # fmt: skip

    lines = [[float(word) for word in line.split()] for line in run.stdout.splitlines()]

    ahead_h = {round((wall_s - time.time()) / HOUR_S) for wall_s, _ in lines}
    assert ahead_h == {-28, -24}
    assert [since_boot_s for _, since_boot_s in lines] == sorted(since_boot_s for _, since_boot_s in lines)


async def test_requests_are_served_and_a_killed_prefiller_is_replaced(services: Services) -> None:
    await killed_prefiller_costs_time_and_nothing_else(services)


async def test_nodes_stay_members_through_jumps_and_a_silent_one_is_missed(services: Services) -> None:
    lease_s = 3.0  # of Services' router
    await asyncio.sleep(LEASES * lease_s)  # in each of whose seconds the clocks jump

    assert set(services.nodes()) == {"p0", "p1", "d0"} and "has lost" not in services.complaints()
    services.signal("p0", signal.SIGSTOP)
    eventually(lambda: set(services.nodes()) == {"p1", "d0"}, "the stopped one is missed", pause_s=0.05)
    assert Asking(services).result() == await monolithic()

"""Rails add up: each carries what its speed allows, over rails that are slow enough for any machine's cores.

What they gain in time is printed (-s), never asserted: it is the machine's as much as ours.
"""

import statistics
import time
from collections import deque

import pytest

import crossrail as xr
from tests.multihost.conftest import Network, NetworkFactory
from tests.support.limits import WAIT_S

pytestmark = pytest.mark.no_sanitizer

NBYTES = 64 << 20
RUNS = 3


class Course:
    """64 MiB here and there, and how long they take."""

    def __init__(self, net: Network, limits_mbit: list[int]) -> None:
        self.net = net
        self.rails = len(limits_mbit)
        self.mine, self.remote = net.source(NBYTES), net.target(NBYTES)
        for host in (net.a, net.b):
            for rail, mbit in enumerate(limits_mbit):
                host.limit(rail, mbit)
        self.run("write", nbytes=1 << 20)  # connects all

    def run(self, kind: str, rail: int | None = None, nbytes: int = NBYTES) -> float:
        started = time.monotonic()
        self.submit(kind, rail, nbytes).wait(2 * WAIT_S)
        return time.monotonic() - started

    def writes(self, nbytes: int, in_flight: int, total_bytes: int) -> None:
        """One after another, so many at a time."""
        under_way: deque[xr.Transfer] = deque()
        for _ in range(total_bytes // nbytes):
            if len(under_way) == in_flight:
                under_way.popleft().wait(2 * WAIT_S)
            under_way.append(self.submit("write", None, nbytes))
        for transfer in under_way:
            transfer.wait(2 * WAIT_S)

    def shares(self, kind: str) -> list[float]:
        """Of the bytes that one run puts on the netdevs, each rail's part."""
        before = self.carried()
        self.run(kind)
        moved = [after - earlier for earlier, after in zip(before, self.carried(), strict=True)]
        return [nbytes / sum(moved) for nbytes in moved]

    def carried(self) -> list[int]:
        return [self.net.a.sent_bytes(rail) + self.net.a.received_bytes(rail) for rail in range(self.rails)]

    def median(self, kind: str) -> float:
        return statistics.median(self.run(kind) for _ in range(RUNS))

    def submit(self, kind: str, rail: int | None, nbytes: int) -> xr.Transfer:
        target = self.remote.descriptor
        if kind == "write":
            return self.net.here.submit_write(self.mine, target, nbytes, imm=1, rail=rail)
        return self.net.here.submit_read(self.mine, target, nbytes, rail=rail)


def course(network: NetworkFactory, limits_mbit: list[int]) -> Course:
    return Course(network(rails=len(limits_mbit)), limits_mbit)


@pytest.mark.parametrize(
    ("kind", "rails", "mbit"),
    [("write", 2, 300), ("write", 3, 200), ("write", 4, 200), ("read", 2, 300), ("read", 4, 200)],
)
def test_rails_of_one_speed_share_evenly(network: NetworkFactory, kind: str, rails: int, mbit: int) -> None:
    run = course(network, [mbit] * rails)

    shares = run.shares(kind)

    one_s = 2 * run.run(kind, rail=0, nbytes=NBYTES // 2)
    all_s = run.median(kind)
    print(f"{kind}: {rails} rails {one_s / all_s:.2f} times as fast as one ({NBYTES / all_s / 1e6:.0f} MB/s)")
    assert min(shares) >= 0.5 / rails, shares


@pytest.mark.parametrize("kind", ["write", "read"])
def test_rails_of_unequal_speed_share_by_speed(network: NetworkFactory, kind: str) -> None:
    run = course(network, [150, 450])

    slow, fast = run.shares(kind)

    slow_s, fast_s = (4 * run.run(kind, rail=rail, nbytes=NBYTES // 4) for rail in range(2))
    both_s = run.median(kind)
    share = (NBYTES / both_s) / (NBYTES / slow_s + NBYTES / fast_s)
    print(f"{kind}: {share:.3f} of the sum of both rails")
    assert 1.5 <= fast / slow <= 6, (slow, fast)


@pytest.mark.parametrize(("nbytes", "in_flight"), [(8 << 10, 16), (64 << 10, 16), (1 << 20, 1), (4 << 20, 2)])
def test_slow_rail_is_left_to_the_fast_ones(network: NetworkFactory, nbytes: int, in_flight: int) -> None:
    """Whatever comes first, and however short: once it is known to be slow it carries little."""
    run = course(network, [8, 240, 240])
    begun_s = time.monotonic()
    while time.monotonic() - begun_s < 1.5:  # it becomes known
        run.writes(nbytes, in_flight, 2 << 20)

    before = run.carried()
    begun_s = time.monotonic()
    run.writes(nbytes, in_flight, 24 << 20)
    print(f"{nbytes} bytes, {in_flight} in flight: {24 / (time.monotonic() - begun_s):.0f} MiB/s")
    slow, *fast = (after - earlier for earlier, after in zip(before, run.carried(), strict=True))

    assert slow <= 0.15 * sum(fast), (slow, fast)
    assert min(fast) >= 0.2 * sum(fast), (slow, fast)

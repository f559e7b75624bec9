"""Rails add up: measured as ratios in one run, over rails that are slow enough for any machine's cores."""

import statistics
import time

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
        self.mine, self.remote = net.source(NBYTES), net.target(NBYTES)
        for host in (net.a, net.b):
            for rail, mbit in enumerate(limits_mbit):
                host.limit(rail, mbit)
        self.run("write", nbytes=1 << 20)  # connects all

    def run(self, kind: str, rail: int | None = None, nbytes: int = NBYTES) -> float:
        started = time.monotonic()
        self.submit(kind, rail, nbytes).wait(2 * WAIT_S)
        return time.monotonic() - started

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
    ("kind", "rails", "mbit", "factor"),
    [
        ("write", 2, 300, 1.9),
        ("write", 3, 200, 2.8),
        ("write", 4, 200, 3.7),
        ("read", 2, 300, 1.9),
        ("read", 4, 200, 3.7),
    ],
)
def test_rails_of_one_speed_add_up(network: NetworkFactory, kind: str, rails: int, mbit: int, factor: float) -> None:
    run = course(network, [mbit] * rails)

    one_s = 2 * run.run(kind, rail=0, nbytes=NBYTES // 2)
    all_s = run.median(kind)

    print(f"{kind}: {rails} rails {one_s / all_s:.2f} times as fast as one ({NBYTES / all_s / 1e6:.0f} MB/s)")
    assert one_s / all_s >= factor


@pytest.mark.parametrize("kind", ["write", "read"])
def test_rails_of_unequal_speed_add_up(network: NetworkFactory, kind: str) -> None:
    run = course(network, [150, 450])

    slow_s, fast_s = (4 * run.run(kind, rail=rail, nbytes=NBYTES // 4) for rail in range(2))
    both_s = run.median(kind)

    share = (NBYTES / both_s) / (NBYTES / slow_s + NBYTES / fast_s)
    print(f"{kind}: {share:.3f} of the sum of both rails")
    assert share >= 0.9

"""What tests of `doctor --peer` share: a measurement over loopback."""

from crossrail.doctor.reach.measure import Matrix, measure
from crossrail.doctor.reach.rails import Rail

LOOPBACK = Rail("lo", "127.0.0.1", 65536, None)


def rails(loopback: bool) -> list[Rail]:
    return [LOOPBACK] if loopback else [Rail("eth0", "192.0.2.1", 1500, None)]


def run(port: int, *, version: str = "1.0", seconds: float = 0.05, target: str = "127.0.0.1") -> Matrix:
    return measure(target, port, rails, version, seconds=seconds)

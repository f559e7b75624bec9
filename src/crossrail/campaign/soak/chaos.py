"""The faults of one soak round: the whole schedule is drawn from a seed beforehand, so that it can be repeated."""

from __future__ import annotations

import random
from dataclasses import dataclass

from crossrail.campaign.soak.records import SEATS


@dataclass(frozen=True)
class Fault:
    """What happens to a seat, and how long after the round's begin.

    how_long_s: its duration, or the time until there is a successor.
    """

    at_s: float
    kind: str
    seat: int
    how_long_s: float = 0.0
    seed: int = 0


# How many of each in a round, on average.
_PER_ROUND = {
    "kill": 1.5, "freeze": 2.0, "reopen": 0.5, "revoke": 1.0, "close-region": 0.7, "pool": 0.7, "forget": 0.5,
}  # fmt: skip
_PER_ROUND_TCP = {"cut": 3.0}
_PER_ROUND_RAILS = {"rail-down": 1.0}
KINDS = (*_PER_ROUND, *_PER_ROUND_TCP, *_PER_ROUND_RAILS)
_LONG_FREEZES = 0.05  # for which a frozen peer is given up, where that is so
_LONG_S = 4.0


def schedule(draw: random.Random, for_s: float, transport: str, *, has_rails: bool, spared: int) -> list[Fault]:
    """The faults in order of time. spared: a seat that is not killed, and whose engine is not closed."""
    rates = dict(_PER_ROUND)
    if transport == "tcp":
        rates |= _PER_ROUND_TCP | (_PER_ROUND_RAILS if has_rails else {})
    found: list[Fault] = []
    for kind, rate in rates.items():
        whole, rest = divmod(rate, 1)
        for _ in range(int(whole) + (draw.random() < rest)):
            at_s, seat, seed = draw.uniform(0.05, 0.95) * for_s, draw.randrange(SEATS), draw.getrandbits(32)
            if kind in ("kill", "reopen") and seat == spared:
                seat = (seat + 1 + draw.randrange(SEATS - 1)) % SEATS
            found.append(Fault(at_s, kind, seat, _how_long_s(draw, kind), seed))
    return sorted(found, key=lambda fault: fault.at_s)


def _how_long_s(draw: random.Random, kind: str) -> float:
    if kind == "freeze" and draw.random() < _LONG_FREEZES:
        return _LONG_S
    return float(10 ** draw.uniform(-3, 0) if kind != "pool" else draw.uniform(0.01, 1.0))

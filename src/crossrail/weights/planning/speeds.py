"""How fast trainers are relative to each other: the weights that plans use, and what an update showed of them.

No clock and no engine: the same input gives the same speeds, and so the same plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import isfinite
from statistics import median_high, median_low

import numpy as np

from crossrail._options import check_numbers
from crossrail.errors import UsageError
from crossrail.weights.dtypes import ITEM_BYTES, dtype_code
from crossrail.weights.planning.boxes import Ints, volume
from crossrail.weights.planning.plan import Plan

SLOWEST = 1 / 64  # of the fastest: what is slower is planned for as if it were this
_COST = 64  # of a byte at the fastest trainer: costs are whole, so plans do not depend on how floats are added up
_SAME = 0.25  # a speed that changed by less is the one that it was: noise makes no new plan


def check_speeds(speeds: Mapping[int, float]) -> None:
    """UsageError for an invalid speed."""
    if not isinstance(speeds, Mapping):
        raise UsageError(f"speeds is {speeds!r}, must be speeds by rank, such as {{0: 0.5}}")
    check_numbers(**{f"speeds: that of trainer {rank}": speed for rank, speed in speeds.items()})
    for rank, speed in speeds.items():
        if not (isfinite(speed) and speed > 0):
            raise UsageError(f"speeds: trainer {rank} has {speed}; must be above 0, 1 is as fast as one not named")


def costs_of(ranks: tuple[int, ...], speeds: Mapping[int, float]) -> Ints:
    """The cost of a byte at each trainer, as whole numbers; those not named have speed 1.

    UsageError for an unknown trainer.
    """
    check_speeds(speeds)
    if unknown := sorted(set(speeds) - set(ranks)):
        raise UsageError(f"speeds: there is no trainer {unknown[0]}")
    speed = np.array([speeds.get(rank, 1.0) for rank in ranks])
    relative = np.maximum(speed / speed.max(), SLOWEST)
    costs: Ints = np.rint(_COST / relative).astype(np.int64)
    return costs


def written_bytes(plan: Plan) -> dict[int, int]:
    """Bytes that each trainer writes in an update."""
    sender = np.searchsorted(plan.trainers, plan.tasks["trainer"][plan.writes["task"]])
    return _sums(plan, sender, plan.writes["nbytes"])


def moved_bytes(plan: Plan) -> dict[int, int]:
    """Bytes that leave each trainer in an update: what it writes, and what others read from it."""
    written, gathers = written_bytes(plan), plan.gathers
    if not len(gathers):
        return written
    item = ITEM_BYTES[[dtype_code(param.dtype) for param in plan.params]]
    nbytes = volume(gathers["start"], gathers["stop"]) * item[plan.parts["param"][gathers["part"]]]
    away = gathers["trainer"] != plan.tasks["trainer"][plan.parts["task"][gathers["part"]]]
    read = _sums(plan, np.searchsorted(plan.trainers, gathers["trainer"][away]), nbytes[away])
    return {rank: nbytes + read[rank] for rank, nbytes in written.items()}


def _sums(plan: Plan, trainer: Ints, nbytes: Ints) -> dict[int, int]:
    sums = np.bincount(trainer, weights=nbytes, minlength=len(plan.trainers)).astype(np.int64)
    return dict(zip(plan.trainers, sums.tolist(), strict=True))


def measured(
    moved: Mapping[int, int], busy_s: Mapping[int, float], known: Mapping[int, float], straggler_ratio: float
) -> dict[int, float]:
    """Speeds of the slow trainers after an update, relative to the median; trainers that are not slow are left out.

    moved: moved_bytes(). busy_s: time that each trainer spent converting or writing, excluding waits for others. known:
    the speeds that the update was planned with.

    A trainer becomes slow when it was busy straggler_ratio times as long as the median, and each of its bytes took that
    many times as long as well: one that is late only because it has more to do is not slow. It stays slow while the
    latter holds. The speed of a trainer that had nothing to do, or that changed by less than a quarter, stays as it
    was.
    """
    rates = {rank: moved[rank] / busy_s[rank] for rank in busy_s if moved.get(rank) and busy_s[rank] > 0}
    if not rates:
        return dict(known)
    rate = median_high(rates.values())
    busy = median_low([busy_s[rank] for rank in rates])
    speeds = {rank: speed for rank, speed in known.items() if rank in busy_s and rank not in rates}
    for rank in sorted(rates):
        speed = max(rates[rank] / rate, SLOWEST)
        is_late = rank in known or busy_s[rank] >= straggler_ratio * busy
        if is_late and speed * straggler_ratio <= 1:
            before = known.get(rank, 0.0)
            speeds[rank] = before if abs(speed - before) <= _SAME * before else speed
    return dict(sorted(speeds.items()))


class Pace:
    """A controller's record of its trainers' speeds. Threads: one.

    given: PlanOptions.speeds, which do not change. straggler_ratio: as in measured(), or None: nothing is measured.
    """

    def __init__(self, given: Mapping[int, float], straggler_ratio: float | None) -> None:
        if straggler_ratio is not None:
            check_numbers(straggler_ratio=straggler_ratio)
        if straggler_ratio is not None and not (isfinite(straggler_ratio) and straggler_ratio > 1):
            raise UsageError(f"straggler_ratio={straggler_ratio} must be above 1, or None: nothing is measured")
        self._given = dict(given)
        self._ratio = straggler_ratio
        self._measured: dict[int, float] = {}

    def of(self, ranks: Iterable[int]) -> dict[int, float]:
        """The speeds to plan with: those of these trainers that are not as fast as the others."""
        known = self._measured | self._given
        return {rank: known[rank] for rank in sorted(ranks) if rank in known}

    def note(self, plan: Plan, busy_s: Mapping[int, float]) -> None:
        """Records an update that was done by this plan. busy_s: as in measured()."""
        if self._ratio is not None:
            self._measured = measured(moved_bytes(plan), busy_s, self._measured, self._ratio)

    def forget(self, rank: int) -> None:
        """This trainer is gone: who comes under its rank is another."""
        self._measured.pop(rank, None)

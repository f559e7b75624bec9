"""The options of `crossrail weights rl`, and the inference ranks that it serves with."""

from __future__ import annotations

from dataclasses import dataclass

from crossrail.errors import UsageError

_SEED_MAX = (1 << 31) - 1


@dataclass(frozen=True)
class Serving:
    """An inference rank. label: for people."""

    label: str
    tp: int
    quantised: bool


SERVED = (Serving("bf16 TP 2", 2, False), Serving("fp8", 1, True))


@dataclass(frozen=True)
class RlOptions:
    """batch: completions of each inference rank for a step. Equal seed, trainers and batch: equal rewards."""

    steps: int = 10
    trainers: int = 4
    batch: int = 32
    seed: int = 1
    transport: str = "auto"

    def __post_init__(self) -> None:
        for name, least in (("steps", 0), ("trainers", 1), ("batch", 1)):
            if getattr(self, name) < least:
                raise UsageError(f"{name}={getattr(self, name)} must be {least} or more")
        if not 0 <= self.seed <= _SEED_MAX:
            raise UsageError(f"seed={self.seed} must be in 0..{_SEED_MAX}")
        if self.batch * len(SERVED) % self.trainers:
            raise UsageError(
                f"{len(SERVED)} x batch={self.batch} completions cannot be shared by trainers={self.trainers}"
            )

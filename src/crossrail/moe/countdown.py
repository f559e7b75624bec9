"""A timeout that several waits share."""

from __future__ import annotations

import crossrail as xr


class Countdown:
    """timeout_s: all of it, from now on, by the engine's clock; left_s: what is left, 0 at least. Any thread."""

    def __init__(self, engine: xr.Engine, timeout_s: float) -> None:
        self._engine = engine
        self._ends_at_s = engine._now_s + timeout_s

    @property
    def left_s(self) -> float:
        return max(0.0, self._ends_at_s - self._engine._now_s)

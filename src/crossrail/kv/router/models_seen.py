"""Which models a router's nodes have, or had not long ago."""

from __future__ import annotations

import math
from typing import get_args

from crossrail.kv.messages import Role
from crossrail.kv.router.membership import Membership


class ModelsSeen:
    """Models that nodes have, or had within the last keep_s: their nodes may come back, and requests wait for them.

    Until keep_s after start() no model counts as unknown: nodes may still join. Times: the event loop's clock.
    """

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._started_s = math.inf
        self._seen_s: dict[str, float] = {}

    def start(self, now_s: float) -> None:
        """Nodes may join from now on."""
        self._started_s = now_s

    def look(self, now_s: float, keep_s: float) -> None:
        """Call this regularly."""
        for role in get_args(Role):
            self._seen_s |= {member.record.model: now_s for member in self._membership.members(role)}
        self._seen_s = {model: seen_s for model, seen_s in self._seen_s.items() if now_s - seen_s <= keep_s}

    def is_unknown(self, model: str, now_s: float, keep_s: float) -> bool:
        self.look(now_s, keep_s)
        return model not in self._seen_s and now_s - self._started_s > keep_s

    def names(self) -> list[str]:
        return sorted(self._seen_s)

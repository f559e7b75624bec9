"""Keeps room at a decoder for one request that has waited long; otherwise smaller requests, from whichever router,
would always be the first to fit.
"""

from __future__ import annotations

import math

# Then others get a turn: how long a request waits is its own router's choice, not that of others.
KEPT_IN_A_ROW_S = 10.0
_YIELDED_S = 1.0


class KeptRoom:
    """Threads: the event loop's. Times: its clock. Requests are identified with their router, since two may use one
    name.

    kept_s: for how long room is kept after the router's last message. A router asks more than once a second, except
    while it waits for another decoder that is silent; a dead one says nothing.

    Invariant: at most one request has room kept, the first that asked, until it has started, was not heard from for
    kept_s, or has had it for KEPT_IN_A_ROW_S. It can get it again once another request has started, or after a second.
    """

    def __init__(self, kept_s: float) -> None:
        self._kept_s = kept_s
        self._of: tuple[bytes, str] | None = None
        self._since_s = self._until_s = -math.inf
        self._yielding: tuple[bytes, str] | None = None
        self._yielding_until_s = -math.inf

    def ask(self, router: bytes, request: str, now_s: float) -> bool:
        """The request has waited long, and waits for room here. Returns whether its turn is over, so that others may
        start.
        """
        asker = (router, request)
        if self.is_for_another(router, request, now_s) or (asker == self._yielding and now_s < self._yielding_until_s):
            return False
        if self._of != asker or now_s >= self._until_s:
            self._since_s = now_s
        elif now_s - self._since_s >= KEPT_IN_A_ROW_S:
            self._yielding, self._yielding_until_s = asker, now_s + _YIELDED_S
            return self.end(router, request)
        self._of, self._until_s = asker, now_s + self._kept_s
        return False

    def is_for_another(self, router: bytes, request: str, now_s: float) -> bool:
        return now_s < self._until_s and self._of != (router, request)

    def start(self, router: bytes, request: str) -> bool:
        """The request has started: like end(), and a request that yielded its turn need not yield any longer."""
        if self._yielding != (router, request):
            self._yielding = None
        return self.end(router, request)

    def end(self, router: bytes, request: str) -> bool:
        """The request has started or is not wanted any more. Returns whether room was kept for it: others may have been
        refused.
        """
        was_kept = self._of == (router, request)
        if was_kept:
            self._of, self._until_s = None, -math.inf
        return was_kept

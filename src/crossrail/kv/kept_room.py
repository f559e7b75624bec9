"""What comes back at a decoder is kept for one request that has waited long, so that it starts although smaller ones
would always fit, whichever routers they come from."""

from __future__ import annotations

import math

# After its router's last word. That one asks some three times a second; when it gives up, or dies, it says nothing.
_KEPT_S = 1.0


class KeptRoom:
    """Threads: the event loop's. Times: its clock. Requests are those of a router, since two may have given one name.

    Invariant: one has it at most, the first that asked, until it has started or was not heard of for a second.
    """

    def __init__(self) -> None:
        self._of: tuple[bytes, str] | None = None
        self._until_s = -math.inf

    def ask(self, router: bytes, request: str, now_s: float) -> None:
        """This one has waited long, and waits for room here."""
        if not self.is_for_another(router, request, now_s):
            self._of, self._until_s = (router, request), now_s + _KEPT_S

    def is_for_another(self, router: bytes, request: str, now_s: float) -> bool:
        return now_s < self._until_s and self._of != (router, request)

    def end(self, router: bytes, request: str) -> bool:
        """It has started, or nobody wants it any more. Whether room was kept for it: others may have been refused."""
        was_kept = self._of == (router, request)
        if was_kept:
            self._of, self._until_s = None, -math.inf
        return was_kept

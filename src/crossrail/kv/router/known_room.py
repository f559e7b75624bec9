"""What a router knows of the room at a decoder: what that refused and took lately. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

# How long a refusal is believed if the decoder says nothing else; doubled each time up to the maximum, which is less
# than the time for which a decoder keeps room without a message (its _KEPT_S).
_REFUSED_S, _REFUSED_S_MAX = 0.2, 0.6
# Concurrent offers to one decoder. After a refusal only one, plus one for each that it accepts while another is in
# flight: a request on offer at a full decoder misses its turn at the others.
_OFFERS, _OFFERS_MAX = 8, 64

_TRIES = 3  # probes with one request, then with all


@dataclass(frozen=True)
class Refusal:
    """By a decoder, or on its behalf. for_s: how long it is believed if the decoder says nothing else;
    None: as usual.
    """

    why: str
    for_s: float | None = None


@dataclass
class KnownRoom:
    """What is known of a decoder's room.

    refused_tokens: the smallest request that it had no room for since its last news. is_tried: offer one all the same,
    as a probe. until_s: when to probe, on the event loop's clock. offers: number in flight, and its limit.
    """

    refused_tokens: float = math.inf
    said: str = ""
    is_tried: bool = False
    until_s: float = math.inf
    offers: int = 0
    offers_max: int = _OFFERS
    _pause_s: float = _REFUSED_S
    _taken_in_a_row: int = 0
    _tries: int = 0  # probes since the last news

    def may_take(self, tokens: int) -> bool:
        """Whether it has not refused a request that needs no more room, or is to be probed."""
        return tokens < self.refused_tokens or self.is_tried

    def offered(self) -> None:
        """An offer is in flight."""
        self.offers += 1
        self.is_tried = False

    def refused(self, tokens: int, refusal: Refusal, now_s: float) -> None:
        """The decoder has no room for so many tokens."""
        self.refused_tokens = min(self.refused_tokens, tokens)
        self.said = refusal.why
        self.until_s = now_s + (self._pause_s if refusal.for_s is None else refusal.for_s)
        self._pause_s = min(2 * self._pause_s, _REFUSED_S_MAX)
        self.offers_max, self._taken_in_a_row = 1, 0

    def taken(self, tokens: int) -> None:
        """The decoder had room for so many tokens."""
        if tokens >= self.refused_tokens:
            self.news()
        self._pause_s = _REFUSED_S
        self._taken_in_a_row += 1
        self.offers_max = min(max(self.offers_max, self._taken_in_a_row), _OFFERS_MAX)

    def news(self) -> None:
        """The decoder may have more room than before."""
        self.refused_tokens = self.until_s = math.inf
        self._tries = 0

    def try_one(self) -> None:
        """Allows a probe: the decoder may have more room, though nothing says so."""
        self.is_tried = self.refused_tokens < math.inf

    def try_again(self) -> None:
        """A probe because the refusal is old; now and then of all requests, since the one offered may be
        the largest.
        """
        self._tries += 1
        if self._tries == _TRIES:
            self.news()
        self.try_one()
        self.until_s = math.inf

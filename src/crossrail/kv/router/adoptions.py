"""Requests that decoders still run, or have ended, for an earlier router."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from crossrail.kv import messages as m
from crossrail.kv.router.membership import Member
from crossrail.kv.router.requests import Running

# Ended requests kept per decoder: as many as a decoder keeps, 4096 with their end acknowledged and 4096 without.
_ADOPTIONS_KEPT = 8192
_GONE = b""  # the address of no decoder


@dataclass
class Adopted:
    """A request of an earlier router that is gone. Kept for clients that ask for it by name.

    running: set once its decoder has asked for a prefiller; records which had no room, and since when.
    """

    decoder: bytes
    tokens: list[int] = field(default_factory=list)
    end: m.End | None = None
    running: Running | None = None

    def take(self, first: int, tokens: list[int], end: m.End | None) -> None:
        if first <= len(self.tokens):  # repeated messages may be late and hold no more than is here
            self.tokens += tokens[len(self.tokens) - first :]
        self.end = end or self.end


class Adoptions:
    """Adopted requests. Per decoder, ended ones are dropped in the order in which they ended. Running ones are never
    dropped: their decoder would be told that nobody wants them. Decoders that are gone count as one, and their requests
    as ended.

    Invariant: each name in _ended is in _requests; no name is in _ended twice.
    """

    def __init__(self) -> None:
        self._requests: dict[str, Adopted] = {}
        self._ended: dict[bytes, dict[str, None]] = {}  # by decoder, for each that has joined with requests

    def get(self, request: str) -> Adopted | None:
        return self._requests.get(request)

    def add(self, request: str, decoder: bytes, has_ended: bool) -> None:
        """A decoder that joins has this request, perhaps again. If two requests have the same name the first stays."""
        adopted = self._requests.setdefault(request, Adopted(decoder))
        if adopted.decoder != decoder:
            return
        ended = self._ended.setdefault(decoder, {})
        self._ended.get(_GONE, {}).pop(request, None)
        if has_ended:
            self._end(request, ended)
        else:
            ended.pop(request, None)

    def take(self, request: str, decoder: bytes, first: int, tokens: list[int], end: m.End | None) -> bool:
        """Like Adopted.take(). False: the request is unknown, or not this decoder's."""
        adopted = self._requests.get(request)
        if adopted is None or adopted.decoder != decoder:
            return False
        adopted.take(first, tokens, end)
        if end is not None and decoder in self._ended:
            self._ended.get(_GONE, {}).pop(request, None)
            self._end(request, self._ended[decoder])
        return True

    def as_running(self, lost: m.PrefillerLost, decoder: Member) -> Running | None:
        """A stand-in for choosing another prefiller: its prompt is unknown. None: this decoder has no such request."""
        adopted = self._requests.get(lost.request)
        if adopted is None or adopted.decoder != decoder.address:
            return None
        if adopted.running is None or adopted.running.placement != lost.placement:
            nothing = np.zeros(0, np.int32)
            adopted.running = Running(lost.request, nothing, m.Sampling(), [], math.inf, placement=lost.placement)
        adopted.running.decoder = decoder
        return adopted.running

    def on_gone(self, decoder: bytes) -> None:
        """Until it joins again, nobody reports how this decoder's requests end."""
        ended = self._ended.pop(decoder, None)
        if ended is None:
            return
        running = [name for name, adopted in self._requests.items() if adopted.decoder == decoder and name not in ended]
        for request in (*ended, *running):
            self._end(request, self._ended.setdefault(_GONE, {}))

    def _end(self, request: str, ended: dict[str, None]) -> None:
        ended.setdefault(request)
        if len(ended) > _ADOPTIONS_KEPT:
            first = next(iter(ended))
            del ended[first], self._requests[first]

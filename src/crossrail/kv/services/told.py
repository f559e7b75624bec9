"""Requests whose end a router has acknowledged: the router may still die before it has told its client."""

from __future__ import annotations

from collections import deque

from crossrail.control.deadlines import loop_time_s
from crossrail.kv.services.serving import Serving

_TOKEN_BYTES, _SPAN_BYTES = 32, 200  # of what is generated, and of timelines: as Python keeps them


class Told:
    """Those of the last keep_s; of these the latest that are `most` and take bytes_max, if there are more.

    Threads: the event loop's.
    """

    def __init__(self, keep_s: float, most: int, bytes_max: int) -> None:
        self._keep_s = keep_s
        self._most = most
        self._bytes_max = bytes_max
        self._kept: deque[tuple[float, int, Serving]] = deque()  # when it came, what it takes
        self._bytes = 0

    def add(self, serving: Serving) -> None:
        nbytes = serving.context.nbytes
        nbytes += _TOKEN_BYTES * len(serving.tokens) + _SPAN_BYTES * len(serving.timeline.spans)
        self._kept.append((loop_time_s(), nbytes, serving))
        self._bytes += nbytes
        self._forget()

    def latest(self) -> list[Serving]:
        self._forget()
        return [serving for _, _, serving in self._kept]

    def _forget(self) -> None:
        old_s = loop_time_s() - self._keep_s
        while self._kept and (
            self._kept[0][0] <= old_s or len(self._kept) > self._most or self._bytes > self._bytes_max
        ):
            self._bytes -= self._kept.popleft()[1]

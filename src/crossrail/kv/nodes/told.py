"""Ended requests whose router has acknowledged the end: the router may still die before it tells the client."""

from __future__ import annotations

from collections import deque

from crossrail.control.deadlines import loop_time_s
from crossrail.kv.nodes.serving import Serving

_TOKEN_BYTES, _SPAN_BYTES = 32, 200  # per generated token, and per span: as Python stores them


class Told:
    """Requests told within the last keep_s; of these only the latest, at most `most` of them and bytes_max in total.

    Threads: the event loop's.
    """

    def __init__(self, keep_s: float, most: int, bytes_max: int) -> None:
        self._keep_s = keep_s
        self._most = most
        self._bytes_max = bytes_max
        self._kept: deque[tuple[float, int, Serving]] = deque()  # when it was added, and its size
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

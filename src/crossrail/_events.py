"""Where an engine's events go: to the user's function, otherwise to the log."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from crossrail._notify import log, log_raised
from crossrail._text import plain
from crossrail.peers import EngineEvent

LEVELS = {
    "peer-connected": logging.DEBUG,
    "peer-thawed": logging.INFO,
    "peer-lost": logging.WARNING,
    "peer-left": logging.INFO,
    "peer-slow": logging.INFO,
    "peer-frozen": logging.WARNING,
    "stalled": logging.WARNING,
    "checksum-mismatch": logging.ERROR,
    "transport-absent": logging.WARNING,
    "protocol-error": logging.ERROR,
    "imm-overflow": logging.ERROR,
}
_LOST_KNOWN_MAX = 1024


class EventSink:
    """Takes the events of one engine, of this name.

    fn: the user's function; None: events are logged. It may be called on any thread that delivers.
    """

    def __init__(self, engine_name: str) -> None:
        self.fn: Callable[[EngineEvent], object] | None = None
        self._engine_name = engine_name
        self._after: list[Callable[[], None]] = []
        self._known_lost: dict[str, None] = {}  # by name, oldest first

    def call_after(self, fn: Callable[[], None]) -> None:
        """Calls fn after each delivery. It must not raise."""
        self._after.append(fn)

    def deliver(self, events: Iterable[tuple[str, str, str]]) -> None:
        """events: kind, peer and detail of each."""
        for kind, peer, detail in events:
            fn = self.fn
            if fn is not None:
                try:
                    fn(EngineEvent(kind, peer, detail))
                except BaseException:  # nothing else delivers the rest of this batch
                    log_raised(self._engine_name, "on_event")
            else:
                about = f" of peer {peer!r}" if peer else ""
                why = f": {plain(detail)}" if detail else ""  # it may contain names that peers chose
                log.log(self._level_of(kind, peer), "engine %r: %s%s%s", self._engine_name, kind, about, why)
        for after in self._after:
            after()

    def _level_of(self, kind: str, peer: str) -> int:
        """The log level of an event. Repeated failures to reach the same peer are a warning only the first time."""
        if kind == "peer-connected":
            self._known_lost.pop(peer, None)
        elif kind == "peer-lost":
            if peer in self._known_lost:
                return logging.INFO
            self._known_lost[peer] = None
            if len(self._known_lost) > _LOST_KNOWN_MAX:
                del self._known_lost[next(iter(self._known_lost))]
        return LEVELS[kind]

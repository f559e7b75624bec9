"""Chrome traces: what happened when, on tracks, for ui.perfetto.dev or chrome://tracing.

The format is Google's "Trace Event Format" in its JSON object form. This module knows nothing of engines: anything with
times can be written with it.

    with ChromeTrace.create("run.json") as trace:
        rail = trace.track("node0", "rail 0")
        trace.span(rail, "write 4 KiB", start_ns, end_ns, {"peer": "node1"})
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import NamedTuple, TextIO

from crossrail._closing import Closing


class Track(NamedTuple):
    """A track of the trace, made by ChromeTrace.track."""

    process: int
    thread: int


class ChromeTrace(Closing):
    """Writes events as they come: nothing is kept but the names of tracks, so a trace may be longer than memory.

    Times are whole nanoseconds of any one clock, in any order. The same calls give the same bytes. One thread at a
    time.
    Lifecycle: 1. open. 2. close() writes the end of the file; before that it is no valid JSON.
    Owner of the stream: the caller.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._processes: dict[str, int] = {}
        self._tracks: dict[tuple[str, str], Track] = {}
        self._next_id = 0
        self._first = True
        self._open = True
        stream.write('{"displayTimeUnit":"ns","traceEvents":[')

    @classmethod
    @contextmanager
    def create(cls, path: str | PathLike[str]) -> Iterator[ChromeTrace]:
        """Writes to a file of that name, which is replaced, and closes it at the end of the block. Raises OSError."""
        with Path(path).open("w", encoding="utf-8", newline="\n") as stream, cls(stream) as trace:
            yield trace

    def track(self, process: str, thread: str) -> Track:
        """The track of this name in the group `process`; shown in the order in which they are first asked for."""
        known = self._tracks.get((process, thread))
        if known is not None:
            return known
        group = self._processes.get(process)
        if group is None:
            group = self._processes[process] = len(self._processes) + 1
            self._name(group, 0, "process", process, group)
        made = self._tracks[process, thread] = Track(group, len(self._tracks) + 1)
        self._name(group, made.thread, "thread", thread, made.thread)
        return made

    def span(
        self, track: Track, name: str, start_ns: int, end_ns: int, about: Mapping[str, object] | None = None
    ) -> None:
        """A span from start to end. Spans of one track must not overlap, except that one may lie within another."""
        self._event("X", track, start_ns, name, about, f',"dur":{_micros(max(end_ns - start_ns, 0))}')

    def overlapping_span(
        self, track: Track, name: str, start_ns: int, end_ns: int, about: Mapping[str, object] | None = None
    ) -> None:
        """A span that may overlap others of its track. Viewers stack these by name on lines of their own."""
        identity = f',"cat":"span","id":{self._identity()}'
        self._event("b", track, start_ns, name, about, identity)
        self._event("e", track, max(start_ns, end_ns), name, None, identity)

    def instant(self, track: Track, name: str, at_ns: int, about: Mapping[str, object] | None = None) -> None:
        """A single moment of a track."""
        self._event("i", track, at_ns, name, about, ',"s":"t"')

    def counter(self, track: Track, name: str, at_ns: int, values: Mapping[str, float]) -> None:
        """Curves of the track's group: from this moment on each has this value."""
        self._event("C", track, at_ns, name, values, "")

    def flow(self, name: str, source: Track, start_ns: int, target: Track, end_ns: int) -> None:
        """An arrow between two spans, each found by its track and a moment that it covers."""
        identity = f',"cat":"flow","id":{self._identity()}'
        self._event("s", source, start_ns, name, None, identity)
        self._event("f", target, end_ns, name, None, identity + ',"bp":"e"')

    def close(self) -> None:
        """Ends the file. Idempotent."""
        if not self._open:
            return
        self._open = False
        self._stream.write("\n]}\n")

    def _identity(self) -> int:
        self._next_id += 1
        return self._next_id

    def _name(self, process: int, thread: int, what: str, name: str, order: int) -> None:
        track = Track(process, thread)
        self._event("M", track, 0, f"{what}_name", {"name": name}, "")
        self._event("M", track, 0, f"{what}_sort_index", {"sort_index": order}, "")

    def _event(
        self, phase: str, track: Track, at_ns: int, name: str, about: Mapping[str, object] | None, rest: str
    ) -> None:
        separator = "\n" if self._first else ",\n"
        self._first = False
        args = f',"args":{json.dumps(about, separators=(",", ":"))}' if about else ""
        self._stream.write(
            f'{separator}{{"ph":"{phase}","pid":{track.process},"tid":{track.thread},"ts":{_micros(at_ns)},'
            f'"name":{json.dumps(name)}{rest}{args}}}'
        )


def _micros(nanoseconds: int) -> str:
    """The format's unit, exactly: a float would lose nanoseconds of long runs."""
    whole, rest = divmod(nanoseconds, 1000)
    return f"{whole}.{rest:03d}"

"""Flight recordings for people: selected entries, and their picture as a Chrome trace."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence

from crossrail.errors import UsageError
from crossrail.flight import FlightDump, FlightEntry
from crossrail.observe import arrivals
from crossrail.observe.chrome import ChromeTrace, Track

_BEGIN_WORKS = ("posted", "sent")
_END_WORKS = ("retired", "withdrawn")
_END_TRANSFER = ("done", "failed", "cancelled")
_INSTANT_NS = 1  # how long a moment is, for arrows to have something to point at


def select(
    dump: FlightDump, *, peer: str | None = None, rail: str | None = None, last: int | None = None
) -> list[FlightEntry]:
    """Entries by time. peer: of this one; rail: of this ring, "tcp:0", or "0" for rail 0 of every transport.

    last: so many. A transfer's own entries name no peer if it has several. Raises UsageError for a peer or rail that is
    not in the dump.
    """
    entries: Iterable[FlightEntry] = dump.entries
    if peer is not None:
        names = {known.name for known in dump.peers}
        if peer not in names:
            raise UsageError(f"peer {peer!r} is not in the recording; there are: {_listed(names)}")
        entries = (entry for entry in entries if entry.peer == peer)
    if rail is not None:
        rings = {ring for ring in dump.rings if rail in (ring, ring.rpartition(":")[2])}
        if not rings:
            raise UsageError(f"rail {rail!r} is not in the recording; there are: {_listed(dump.rings)}")
        entries = (entry for entry in entries if entry.ring in rings)
    chosen = list(entries)
    return chosen if last is None else chosen[max(0, len(chosen) - last) :]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in sorted(names)) or "none"


def write_chrome(parts: Sequence[tuple[FlightDump, Sequence[FlightEntry]]], trace: ChromeTrace) -> None:
    """Draws recordings with their entries: a track for each rail and one for the engine, transfers and works as spans.

    Entries are by time. What was begun and has not ended reaches to the dump, and its name says so. Arrows lead from a
    transfer's submit to its works and its completion; where the recordings are of engines that move bytes to each
    other, also to where its immediate was counted (crossrail.observe.arrivals says how sure that is). Times are on the
    clock of the first; clocks of different hosts are as far apart as their wall clocks.
    """
    shifts = arrivals.shifts_ns([dump for dump, _ in parts])
    pictures = [_Picture(dump, trace, shift) for (dump, _), shift in zip(parts, shifts, strict=True)]
    for picture, (_, entries) in zip(pictures, parts, strict=True):
        picture.draw(entries)
    for begun, counted in arrivals.match(parts):
        pictures[begun.dump].arrow_to(pictures[counted.dump], begun.entry, counted.entry)


class _Picture:
    def __init__(self, dump: FlightDump, trace: ChromeTrace, shift_ns: int = 0) -> None:
        self._dump = dump
        self._shift_ns = shift_ns  # of the clock of the trace
        self._trace = trace
        self._process = f"{dump.engine} ({dump.pid})"
        self._transfers: dict[int, FlightEntry] = {}  # submitted, not ended
        self._works: dict[tuple[str, int], deque[FlightEntry]] = defaultdict(deque)  # by ring and transfer: not ended

    def draw(self, entries: Sequence[FlightEntry]) -> None:
        for ring in self._dump.rings:
            self._track(ring)
        for entry in entries:
            at_ns = self._at(entry)
            self._trace.span(self._track(entry.ring), _named(entry), at_ns, at_ns + _INSTANT_NS, self._about(entry))
            self._follow(entry)
        for begun in self._transfers.values():
            self._span(begun, self._dump.now_ns, "not ended")
        for works in self._works.values():
            for begun in works:
                self._span(begun, self._dump.now_ns, "not ended")
        for note in self._dump.notes:
            about = {"peer": note.peer, "detail": note.detail}
            self._trace.instant(self._track("engine"), note.kind, note.time_ns + self._shift_ns, about)

    def _follow(self, entry: FlightEntry) -> None:
        if entry.state == "submitted":
            self._transfers[entry.transfer] = entry
        elif entry.state in _BEGIN_WORKS and entry.ring != "engine":
            self._works[entry.ring, entry.transfer].append(entry)
            self._arrow(self._transfers.get(entry.transfer), entry)
        elif entry.state == "moved":
            self._arrow(self._transfers.get(entry.transfer), entry)
        elif entry.state in _END_WORKS:
            self._end_works(entry)
        elif entry.state in _END_TRANSFER:
            for ring in self._dump.rings:  # of what failed, works end unrecorded
                for works in self._works.pop((ring, entry.transfer), ()):
                    self._span(works, entry.time_ns, entry.state)
            begun = self._transfers.pop(entry.transfer, None)
            if begun is not None:
                self._span(begun, entry.time_ns, entry.state)
                self._arrow(begun, entry)

    def _end_works(self, entry: FlightEntry) -> None:
        """Works of one transfer on one rail end in about the order in which they began.

        If the end is in the engine's ring, the rail is not recorded.
        """
        rings = list(self._dump.rings) if entry.ring == "engine" else [entry.ring]
        left = entry.count
        for ring in rings:
            begun = self._works[ring, entry.transfer]
            while begun and left > 0:
                first = begun.popleft()
                self._span(first, entry.time_ns, entry.state)
                left -= first.count

    def _span(self, begun: FlightEntry, end_ns: int, ending: str) -> None:
        name = f"{begun.op} #{begun.transfer}" + ("" if ending in ("done", "retired") else f", {ending}")
        about = {**self._about(begun), "ended": ending}
        self._trace.overlapping_span(self._track(begun.ring), name, self._at(begun), end_ns + self._shift_ns, about)

    def _arrow(self, source: FlightEntry | None, target: FlightEntry) -> None:
        if source is not None:
            name = f"{target.op} #{target.transfer}"
            self._trace.flow(
                name, self._track(source.ring), self._at(source), self._track(target.ring), self._at(target)
            )

    def arrow_to(self, other: _Picture, begun: FlightEntry, counted: FlightEntry) -> None:
        """An arrow from a submit to where it was counted, perhaps in another engine."""
        name = f"{begun.op} #{begun.transfer} counted"
        self._trace.flow(name, self._track(begun.ring), self._at(begun), other._track(counted.ring), other._at(counted))

    def _at(self, entry: FlightEntry) -> int:
        return entry.time_ns + self._shift_ns

    def _track(self, ring: str) -> Track:
        return self._trace.track(self._process, ring)

    def _about(self, entry: FlightEntry) -> dict[str, object]:
        facts: dict[str, object] = {"bytes": entry.nbytes, "count": entry.count}
        if entry.peer:
            facts["peer"] = entry.peer
        if entry.imm is not None:
            facts["imm"] = entry.imm
        return facts


def _named(entry: FlightEntry) -> str:
    return f"{entry.state} {entry.op}".rstrip()

"""Matches arrivals of an immediate to transfers: a guess from the recordings of both sides.

A receiver counts, and does not know who sent. So arrivals are assigned in order of time: among the transfers to one
engine with one number, the first gets the first arrival that is not earlier than itself, and so on. If several
transfers with one number are in flight at once, an arrival may in truth be another's.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from crossrail.flight import FlightDump, FlightEntry

_BEGUN = ("submitted", "posted", "sent", "moved")
_NOT_COUNTED = ("failed", "cancelled")
_UNCERTAIN_NS = 10_000  # entries of a burst share readings of the clock
_NOTHING = 1e-9  # fractions of a count add up in floating point


@dataclass(frozen=True)
class Moment:
    """An entry of one of the recordings, dump says which. at_ns: on the clock of the first."""

    dump: int
    entry: FlightEntry
    at_ns: int


@dataclass
class _Arrival:
    moment: Moment
    left: float  # counts that are nobody's yet


def shifts_ns(dumps: Sequence[FlightDump]) -> list[int]:
    """What to add to each recording's times to get the first one's clock, according to their wall clocks."""
    first = dumps[0].wall_ns - dumps[0].now_ns
    return [dump.wall_ns - dump.now_ns - first for dump in dumps]


def match(parts: Sequence[tuple[FlightDump, Sequence[FlightEntry]]]) -> Iterator[tuple[Moment, Moment]]:
    """Pairs of a transfer with an immediate and its arrival: the submit (or the first work, if that is missing), and
    the moment it was counted in full.

    Only for transfers with both ends among these entries. Pages count one by one, and a recording does not say how many
    there are: for paged writes it is the first arrival.
    """
    shifts = shifts_ns([dump for dump, _ in parts])
    for (receiver, imm), transfers in _transfers(parts, shifts).items():
        arrivals = deque(
            _Arrival(Moment(receiver, entry, entry.time_ns + shifts[receiver]), entry.counts)
            for entry in parts[receiver][1]
            if entry.state == "arrived" and entry.imm == imm
        )
        for begun in sorted(transfers, key=lambda moment: moment.at_ns):
            while arrivals and (arrivals[0].left <= _NOTHING or arrivals[0].moment.at_ns < begun.at_ns - _UNCERTAIN_NS):
                arrivals.popleft()
            counted = _take(arrivals, 0.0 if begun.entry.op == "paged-writes" else 1.0)
            if counted is not None:
                yield begun, counted


def _take(arrivals: deque[_Arrival], counts: float) -> Moment | None:
    """When so many had arrived, which are then taken; None: they never had."""
    for arrival in arrivals:
        taken = min(counts, arrival.left)
        arrival.left -= taken
        counts -= taken
        if counts <= _NOTHING:
            return arrival.moment
    return None


def _transfers(
    parts: Sequence[tuple[FlightDump, Sequence[FlightEntry]]], shifts: Sequence[int]
) -> dict[tuple[int, int], list[Moment]]:
    """By receiver and number. For a scatter, the entries of its targets tell to whom it went."""
    engines = {(dump.engine, dump.pid): index for index, (dump, _) in enumerate(parts)}
    found: dict[tuple[int, int], list[Moment]] = defaultdict(list)
    for index, (dump, entries) in enumerate(parts):
        pids = {peer.name: peer.pid for peer in dump.peers}
        uncounted = {entry.transfer for entry in entries if entry.state in _NOT_COUNTED}
        submits = {entry.transfer: entry for entry in entries if entry.state == "submitted"}
        seen: set[tuple[int, str]] = set()
        for entry in entries:
            receiver = engines.get((entry.peer, pids.get(entry.peer, 0)))
            if entry.state not in _BEGUN or entry.imm is None or entry.transfer in uncounted or receiver is None:
                continue
            if (entry.transfer, entry.peer) not in seen:
                seen.add((entry.transfer, entry.peer))
                begun = submits.get(entry.transfer, entry)
                found[receiver, entry.imm].append(Moment(index, begun, begun.time_ns + shifts[index]))
    return found

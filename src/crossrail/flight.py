"""The flight recorder: an engine's last operations and events, for when something hangs.

Engine.dump() reads it, dump_on_signal() has it written while everything hangs, and read_dump() reads what was written.
The format is JSON lines, version 1, written by native/engine/flight_dump.cc.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from crossrail import _core, _options
from crossrail._closing import Closing
from crossrail._files import read_at_most
from crossrail._text import plain
from crossrail.errors import UsageError

FORMAT_VERSION = 1
_UNITS_PER_COUNT = 48
_FILE_BYTES_MAX = 256 << 20
_ENTRIES_SHOWN = 40  # by text(), at most


@dataclass(frozen=True)
class FlightEntry:
    """One recorded step. time_ns: of the engine's monotonic clock.

    ring: "engine", or transport and rail as "tcp:0". state, of a transfer: "submitted" (the engine took it over),
    "done", "failed", "cancelled"; of works, its pieces: "posted" (the transport has them), "moved" (posted and over
    already), "sent" (put on this rail), "retired" (over), "withdrawn" (taken back by a cancel); "arrived" (immediates,
    counts of them), "received" (a message); of a peer: "connecting", "connected", "slow", "frozen", "thawed", "lost",
    "left", "forgotten".
    op: "write", ..., or "". transfer: its number in this engine, 0 none. peer: its name, "" none. count: how many
    works, targets or arrivals. counts: of "arrived", what they add to the counter; writes over rails bring fractions.
    """

    time_ns: int
    ring: str
    state: str
    op: str
    transfer: int
    peer: str
    nbytes: int
    imm: int | None
    count: int
    counts: float = 0.0


@dataclass(frozen=True)
class FlightPeer:
    """A peer as the dump found it. outstanding: works that the transport has; queued: operations not with it yet."""

    name: str
    pid: int
    transport: str
    state: str
    outstanding: int
    queued: int


@dataclass(frozen=True)
class FlightWait:
    """A counter that somebody waits for: arrived of needed, in counts."""

    imm: int
    arrived: float
    needed: float


@dataclass(frozen=True)
class FlightNote:
    """An event of the engine, in words."""

    time_ns: int
    kind: str
    peer: str
    detail: str


@dataclass
class FlightDump:
    """What a dump holds. now_ns: when it was made, on the clock of its entries; wall_ns: the same since 1970 UTC.

    rings: how many entries each was ever given; what is kept of them is the end, in entries, by time.
    """

    engine: str
    pid: int
    version: str
    reason: str
    now_ns: int
    wall_ns: int
    counts: dict[str, int] = field(default_factory=dict)
    waits: list[FlightWait] = field(default_factory=list)
    peers: list[FlightPeer] = field(default_factory=list)
    notes: list[FlightNote] = field(default_factory=list)
    rings: dict[str, int] = field(default_factory=dict)
    entries: list[FlightEntry] = field(default_factory=list)

    def seconds_before(self, time_ns: int) -> float:
        """How long before the dump this time was; negative for what happened while the dump was being written."""
        return (self.now_ns - time_ns) * 1e-9

    def summary(self) -> list[str]:
        """Lines for people: who, when, why, and what waits for whom."""
        when = datetime.fromtimestamp(self.wall_ns * 1e-9, timezone.utc)
        stamp = f"{when:%Y-%m-%d %H:%M:%S}.{when.microsecond // 1000:03d} UTC"
        count = self.counts.get
        untriggered = count("transfers_untriggered", 0)
        held = f", {untriggered} waiting for their triggers" if untriggered else ""
        lines = [
            f"engine '{self.engine}' (pid {self.pid}, crossrail {self.version}) at {stamp}: {self.reason}",
            f"transfers: {count('transfers_inflight', 0)} in flight, {count('submits_waiting', 0)} of them not yet "
            f"picked up{held}; {count('transfers_done', 0)} done, {count('transfers_failed', 0)} failed, "
            f"{count('transfers_cancelled', 0)} cancelled",
        ]
        lines += [f"waiting: {text}" for text in self._waiting()]
        lines += [
            f"note: {-self.seconds_before(note.time_ns):.3f} s  {note.kind} {note.peer}"
            + (f": {note.detail}" if note.detail else "")
            for note in self.notes
        ]
        return [plain(line) for line in lines]

    def text(self) -> str:
        """The summary and the last operations, for people."""
        lines = self.summary()
        shown = self.entries[-_ENTRIES_SHOWN:]
        lines.append(f"the last {len(shown)} of {len(self.entries)} entries, seconds before the dump:")
        rows = [row_of(self, entry) for entry in shown]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))] if rows else []
        for row in rows:
            cells = [text.ljust(width) for text, width in zip(row, widths, strict=True)]
            cells[0] = row[0].rjust(widths[0])
            lines.append(("  " + "  ".join(cells)).rstrip())
        return "\n".join(lines)

    def _waiting(self) -> Iterator[str]:
        for peer in self.peers:
            if peer.outstanding > 0 or peer.queued > 0:
                moved = [
                    entry.time_ns for entry in self.entries if entry.peer == peer.name and entry.state == "retired"
                ]
                last = f"; last retired {-self.seconds_before(moved[-1]):.3f} s" if moved else ""
                yield (
                    f"{peer.outstanding} works under way and {peer.queued} operations queued for peer "
                    f"'{peer.name}' (pid {peer.pid}, {peer.transport}, {peer.state}){last}"
                )
        for wait in self.waits:
            yield f"immediate {wait.imm}: {wait.arrived:g} of {wait.needed:g} arrived"


COLUMNS = ("s", "ring", "state", "op", "transfer", "peer", "bytes", "imm", "count")


def row_of(dump: FlightDump, entry: FlightEntry) -> tuple[str, ...]:
    """An entry as texts, one for each of COLUMNS."""
    cells = (
        f"{-dump.seconds_before(entry.time_ns):.6f}",
        entry.ring,
        entry.state,
        entry.op,
        f"#{entry.transfer}" if entry.transfer else "",
        entry.peer,
        f"{entry.nbytes:,} B" if entry.op or entry.nbytes else "",
        f"imm {entry.imm}" if entry.imm is not None else "",
        f"+{entry.counts:g}" if entry.state == "arrived" else f"x{entry.count}" if entry.count > 1 else "",
    )
    return tuple(plain(cell) for cell in cells)


# --- reading ---


def read_dump(path: str | os.PathLike[str]) -> FlightDump:
    """Reads a file that a dump wrote. Raises UsageError if it is not one, is damaged or cut short; OSError."""
    return parse_dump(read_at_most(path, _FILE_BYTES_MAX, "flight recording"), os.fspath(path))


def parse_dump(data: bytes, what: str) -> FlightDump:
    """Like read_dump(), from bytes. what: their name in errors."""
    lines = data.decode(errors="replace").split("\n")
    header = _Line(lines[0], 1, what)
    if not header.items or header.items[0] != "flight":
        raise UsageError(f"{what} is not a flight recording: its first line is not the one of such a file")
    version = header.number(1)
    if version != FORMAT_VERSION:
        raise UsageError(f"{what} is a flight recording of version {version}, this crossrail reads {FORMAT_VERSION}")
    dump = FlightDump(
        version=header.text(2),
        engine=header.text(3),
        pid=header.number(4),
        reason=header.text(5),
        now_ns=header.number(6),
        wall_ns=header.number(7),
    )
    if lines[-1] != "" or len(lines) < 3 or lines[-2] != '["end"]':
        raise UsageError(f"{what} was cut short: a flight recording ends with a line that says so, this one does not")
    reader = _Reader(dump)
    for number, text in enumerate(lines[1:-2], 2):
        reader.read(_Line(text, number, what))
    return dump


class _Line:
    """One line of a dump: an array of texts and whole numbers. Raises UsageError for anything else."""

    def __init__(self, text: str, number: int, what: str) -> None:
        self._where = f"{what}, line {number}"
        try:
            items = json.loads(text)
        except (ValueError, RecursionError):
            items = None
        if not isinstance(items, list) or not all(type(item) in (str, int) for item in items):
            raise UsageError(f"{self._where}: not a line of a flight recording: {text[:60]!r}")
        self.items: list[Any] = items

    def text(self, index: int) -> str:
        return str(self._item(index, str))

    def number(self, index: int) -> int:
        number = int(self._item(index, int))
        if not -(2**63) <= number < 2**64:
            raise self.fail(f"element {index} of a {self.items[0]!r} line is not a number of 64 bits")
        return number

    def fail(self, why: str) -> UsageError:
        return UsageError(f"{self._where}: {why}")

    def _item(self, index: int, kind: type) -> Any:
        if index >= len(self.items) or not isinstance(self.items[index], kind):
            raise self.fail(f"element {index} of a {self.items[0]!r} line is missing or no {kind.__name__}")
        return self.items[index]


class _Reader:
    def __init__(self, dump: FlightDump) -> None:
        self._dump = dump
        self._names: dict[int, str] = {0: ""}
        self._rings: list[str] = []
        self._kinds: dict[str, Callable[[_Line], None]] = {
            "count": self._count, "wait": self._wait, "peer": self._peer, "note": self._note, "ring": self._start_ring,
            "op": self._op,
        }  # fmt: skip

    def read(self, line: _Line) -> None:
        kind = line.items[0] if line.items else None
        if kind not in self._kinds:
            raise line.fail(f"unknown kind of line {kind!r}")
        self._kinds[kind](line)

    def _count(self, line: _Line) -> None:
        self._dump.counts[line.text(1)] = line.number(2)

    def _wait(self, line: _Line) -> None:
        arrived, needed = (line.number(index) / _UNITS_PER_COUNT for index in (2, 3))
        self._dump.waits.append(FlightWait(line.number(1), arrived, needed))

    def _peer(self, line: _Line) -> None:
        # May be below zero for a moment, when works are retired while they are still being posted.
        outstanding, queued = (max(0, _signed(line.number(index))) for index in (6, 7))
        self._names[line.number(1)] = line.text(2)
        self._dump.peers.append(
            FlightPeer(line.text(2), line.number(3), line.text(4), line.text(5), outstanding, queued)
        )

    def _note(self, line: _Line) -> None:
        self._dump.notes.append(FlightNote(line.number(1), line.text(2), line.text(3), line.text(4)))

    def _start_ring(self, line: _Line) -> None:
        self._rings.append(line.text(1))
        self._dump.rings[line.text(1)] = line.number(2)

    def _op(self, line: _Line) -> None:
        ring, state, peer, nbytes, imm = line.number(2), line.text(3), line.number(6), line.number(7), line.number(8)
        if not 0 <= ring < len(self._rings):
            raise line.fail(f"ring {ring} is not one of the {len(self._rings)} named before")
        counts = 0.0
        if state == "arrived":
            counts, nbytes = nbytes / _UNITS_PER_COUNT, 0
        self._dump.entries.append(
            FlightEntry(
                time_ns=line.number(1),
                ring=self._rings[ring],
                state=state,
                op=line.text(4),
                transfer=line.number(5),
                peer=self._names.get(peer, f"peer {peer}"),
                nbytes=nbytes,
                imm=None if imm < 0 else imm,
                count=line.number(9),
                counts=counts,
            )
        )


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


# --- writing by signal ---


class SignalDump(Closing):
    """A signal that dumps every engine of the process: made by dump_on_signal(), ended by close(). One at a time."""

    def __init__(self, native: _core._SignalDump) -> None:
        self._native = native

    def close(self) -> None:
        """Gives the signal its default action back. Idempotent; one thread at a time."""
        global _signal_dumps
        self._native.close()
        _signal_dumps = tuple(kept for kept in _signal_dumps if kept is not self)


_signal_dumps: Sequence[SignalDump] = ()  # kept, so that callers at start-up need not keep the object


def dump_on_signal(signum: int = signal.SIGUSR2, directory: str | os.PathLike[str] | None = None) -> SignalDump:
    """From now on this signal writes the flight recorder of every engine of the process to a file of its own.

    The files are new ones, "crossrail-<engine>-<pid>-<number>.flight", readable for this user only; standard error says
    where each is. Read them with `crossrail trace FILE`. directory: None: each engine's own (its option dump_dir).

    Works while all of the process hangs, in a wait of ours or with the GIL: the native handler only wakes a thread of
    our own, which needs neither. It interrupts nothing and calls no Python. Not written is what is asked for while an
    engine is being opened, closed or forked, until that ends. A forked child ignores the signal; it may close what it
    inherited, or ask again.

    Raises UsageError when signum is no signal's, that signal has a handler already, Python's or another's, is one of a
    crash (SIGSEGV, SIGBUS, SIGFPE, SIGILL), when the directory is not there, or there is a SignalDump that was not
    closed. Any thread.
    """
    global _signal_dumps
    _options.check_whole(signum=signum)
    if not 0 < signum < signal.NSIG:
        raise UsageError(f"signum = {signum} is no signal")
    place = "" if directory is None else _options.directory(directory, "directory")
    made = SignalDump(_core._SignalDump(int(signum), place))
    _signal_dumps = (made,)
    return made

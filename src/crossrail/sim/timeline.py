"""A world's event log as a picture: a Chrome trace, for chrome://tracing and https://ui.perfetto.dev.

One process per host, and in it one thread per work in flight at the same time on a rail, from its post to its
completion; a curve of the bytes in flight; and a separate thread for everything that is not a work: engines that open
and end, paths that are made and break, faults.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from crossrail.errors import UsageError

_HAPPENINGS = 0  # number of the thread of what is not a work
_QUIET = frozenset({"land", "count"})  # a part of the works' own spans


@dataclass
class _Rail:
    """A rail of one engine. Spans of one thread must not overlap, so concurrent works go into lanes, a thread each."""

    process: int
    label: str
    threads: list[int] = field(default_factory=list)  # of the lanes
    free: list[int] = field(default_factory=list)  # lanes, a heap: the lowest is taken first
    bytes_under_way: int = 0


@dataclass
class _Work:
    rail: _Rail
    lane: int
    began_us: float
    name: str
    nbytes: int
    about: dict[str, Any]


def write_chrome_trace(file: Path, log: Iterable[str], *, title: str) -> None:
    """Writes the picture of World.log. Blocks; raises OSError, and UsageError for lines that are not a log's."""
    with file.open("w") as out:
        out.write(f'{{"otherData": {json.dumps({"title": title})}, "displayTimeUnit": "ns", "traceEvents": [\n')
        separator = ""
        for event in _Picture().events(log):
            out.write(separator + json.dumps(event, separators=(",", ":")))
            separator = ",\n"
        out.write("\n]}\n")


class _Picture:
    def __init__(self) -> None:
        self._processes: dict[str, int] = {}
        self._threads: dict[int, int] = {}  # how many each process has
        self._rails: dict[tuple[str, str], _Rail] = {}
        self._works: dict[str, _Work] = {}

    def events(self, log: Iterable[str]) -> Iterator[dict[str, Any]]:
        """The events in the order of the log; spans come when they end."""
        now_us = 0.0
        for line in log:
            now_us, host, what, values = _parse(line)
            if host not in self._processes:
                yield from self._new_process(host)
            if what == "post":
                yield from self._post(now_us, host, values)
            elif what in ("done", "fail"):
                yield from self._end(now_us, values["work"], what, values)
            elif what == "land" and (work := self._works.get(values["work"])) is not None:
                work.about["landed after us"] = round(now_us - work.began_us, 3)
            elif what not in _QUIET:
                yield self._happening(now_us, host, what, values)
        for number in list(self._works):
            yield from self._end(now_us, number, "under way at the end", {})

    def _new_process(self, host: str) -> Iterator[dict[str, Any]]:
        process = self._processes[host] = len(self._processes) + 1
        self._threads[process] = 1
        yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": host}}
        yield _thread_name(process, _HAPPENINGS, "engines and faults")

    def _post(self, now_us: float, host: str, values: dict[str, str]) -> Iterator[dict[str, Any]]:
        label = f"{values['engine']} rail {values['rail']}"
        rail = self._rails.setdefault((host, label), _Rail(self._processes[host], label))
        if rail.free:
            lane = heapq.heappop(rail.free)
        else:
            lane = len(rail.threads)
            rail.threads.append(self._threads[rail.process])
            self._threads[rail.process] += 1
            yield _thread_name(rail.process, rail.threads[lane], f"{label} #{lane}")
        nbytes = int(values["bytes"])
        about = {key: value for key, value in values.items() if key not in ("engine", "rail", "op")}
        name = f"{values['op']} to {values['to']}"
        self._works[values["work"]] = _Work(rail, lane, now_us, name, nbytes, about)
        yield _under_way(rail, now_us, nbytes)

    def _end(self, now_us: float, number: str, what: str, values: dict[str, str]) -> Iterator[dict[str, Any]]:
        work = self._works.pop(number, None)
        if work is None:
            return  # the log was begun after its post
        heapq.heappush(work.rail.free, work.lane)
        ended = f"{what}: {values['fault']}" if "fault" in values else what
        yield {
            "ph": "X",
            "name": work.name if what == "done" else f"{work.name}, {ended}",
            "cat": "work",
            "pid": work.rail.process,
            "tid": work.rail.threads[work.lane],
            "ts": work.began_us,
            "dur": round(now_us - work.began_us, 3),
            "args": work.about | {"ended": ended},
        }
        yield _under_way(work.rail, now_us, -work.nbytes)

    def _happening(self, now_us: float, host: str, what: str, values: dict[str, str]) -> dict[str, Any]:
        name = values.get("kind", what)
        return {
            "ph": "i",
            "s": "p",
            "name": f"{name} {values['engine']}" if "engine" in values else name,
            "cat": what,
            "pid": self._processes[host],
            "tid": _HAPPENINGS,
            "ts": now_us,
            "args": values,
        }


def _parse(line: str) -> tuple[float, str, str, dict[str, str]]:
    """A line of World.log: microseconds, host, what happened, and its values."""
    try:
        time_ns, host, what, *given = line.split(" ")
        values = dict(value.split("=", 1) for value in given)
        if "engine" in values:
            values["engine"] = unquote(values["engine"])
        return int(time_ns) / 1e3, host, what, values
    except ValueError:
        raise UsageError(f"{line!r} is not a line of a world's event log") from None


def _thread_name(process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": name}}


def _under_way(rail: _Rail, now_us: float, change: int) -> dict[str, Any]:
    rail.bytes_under_way += change
    name = f"{rail.label}, bytes under way"
    return {"ph": "C", "name": name, "pid": rail.process, "ts": now_us, "args": {"bytes": rail.bytes_under_way}}

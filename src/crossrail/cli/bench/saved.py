"""The JSON file of a benchmark: writing it, and reading it for comparisons. Reads formats 1 and 2, writes 2.

Format 2 has what 1 has, and the intervals, the points of curves, and distributions (`ecdf`).
"""

from __future__ import annotations

import datetime
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from crossrail._files import read_at_most
from crossrail._text import plain
from crossrail.cli.bench.machine import machine, version
from crossrail.cli.bench.spec import Line, Point, Result, Sample
from crossrail.errors import UsageError

FORMAT = 2
_FORMATS_READ = (1, 2)
_FILE_BYTES_MAX = 64 << 20


def to_json(results: list[Result], settings: Mapping[str, Any], busy: float, only_part: str = "") -> dict[str, Any]:
    """Everything that is needed to judge the figures, and to repeat them. settings: what they were taken with.
    only_part: why there is no more.
    """
    return {
        "format": FORMAT,
        "command": plain(" ".join(["crossrail", *sys.argv[1:]])),  # JSON has no names that are no UTF-8
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "version": version(),
        "machine": machine(),
        "busy_before": round(busy, 3),
        "only_part": plain(only_part) or None,
        "settings": dict(settings),
        "results": [_result_json(result) for result in results],
    }


def _result_json(result: Result) -> dict[str, Any]:
    measure = result.measure
    value_interval, ratio_interval = result.value_interval, result.ratio_interval
    content: dict[str, Any] = {
        "name": measure.name,
        "title": measure.title,
        "unit": measure.unit,
        "limit_is": measure.limit,
        "value": result.value,
        "value_interval": value_interval and value_interval.to_json(),
        "limit": result.limit,
        "ratio": result.ratio,
        "ratio_interval": ratio_interval and ratio_interval.to_json(),
        "bar": str(measure.bar) if measure.bar else None,
        "verdict": result.verdict,
        "note": result.note or None,
        "path": result.path or None,
        "error": result.error or None,
        "samples": [{"value": sample.value, "limit": sample.limit} for sample in result.samples],
    }
    if (point := measure.point) is not None:
        content["point"] = {"kind": point.kind, "nbytes": point.nbytes, "window": point.window}
    if result.ecdf:
        content["ecdf"] = result.ecdf
    return content


class _Format(msgspec.Struct):
    format: int


class _Sample(msgspec.Struct):
    value: float
    limit: float | None = None


class _Point(msgspec.Struct):
    kind: str
    nbytes: int
    window: int


class _Result(msgspec.Struct):
    name: str
    title: str
    unit: str
    samples: list[_Sample]
    limit_is: str | None = None
    note: str | None = None
    error: str | None = None
    path: str | None = None
    point: _Point | None = None
    ecdf: list[tuple[float, float]] = msgspec.field(default_factory=list)

    def opened(self) -> Result:
        """The file's text in a form that is safe to show in a terminal: anybody may have written it."""
        name, title, unit = plain(self.name), plain(self.title), plain(self.unit)
        limit, error, note, path = (plain(word or "") for word in (self.limit_is, self.error, self.note, self.path))
        point = None if self.point is None else Point(plain(self.point.kind), self.point.nbytes, self.point.window)
        line = Line(name=name, title=title, unit=unit, limit=limit, point=point)
        samples = [Sample(sample.value, sample.limit) for sample in self.samples]
        return Result(line, samples, error, note, path, self.ecdf)


class _File(msgspec.Struct):
    results: list[_Result]
    command: str = ""
    date: str = ""
    version: str = ""
    only_part: str | None = None
    machine: dict[str, Any] = msgspec.field(default_factory=dict)
    settings: dict[str, Any] = msgspec.field(default_factory=dict)


@dataclass(frozen=True)
class Saved:
    """A run that was written to a file, or the one just taken. name: what to call it. only_part: why not all of it."""

    name: str
    results: list[Result]
    machine: Mapping[str, Any]
    settings: Mapping[str, Any]
    command: str = ""
    date: str = ""
    version: str = ""
    only_part: str = ""


def read_json(path: Path) -> Saved:
    """Reads what `--json` wrote. UsageError, in one line, for anything else. Bars are not read: they may have changed
    since.
    """
    try:
        data = read_at_most(path, _FILE_BYTES_MAX, "file of crossrail bench --json")
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    try:
        found = msgspec.json.decode(data, type=_Format).format
        if found not in _FORMATS_READ:
            known = " and ".join(map(str, _FORMATS_READ))
            raise UsageError(f"{path} has format {found}, and this crossrail reads {known}: use the one that wrote it")
        file = msgspec.json.decode(data, type=_File)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{path} was not written by crossrail bench --json: {error}") from None
    results = [result.opened() for result in file.results]
    command, date, version_then = plain(file.command), plain(file.date), plain(file.version)
    only_part = plain(file.only_part or "")
    return Saved(plain(str(path)), results, file.machine, file.settings, command, date, version_then, only_part)

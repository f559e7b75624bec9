"""The sweep of `bench run`: points of size and window, each next to what the machine does without the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from crossrail.cli.bench import report
from crossrail.cli.bench.hosts.driver import Driver, Pass, count_for
from crossrail.cli.bench.plot import short_size
from crossrail.cli.bench.spec import Line, Point, Result, Sample
from crossrail.errors import CrossrailError
from crossrail.peers import Explanation

KINDS = ("write", "read", "paged", "latency")
_PAGED_WINDOW = 2  # calls in flight, of up to 4096 pages each
_PAGE_BYTES_MAX = 1 << 20
_ROUNDS_MAX = 200_000
_COUNT_MIN = 16
_FEW_BYTES = 1 << 20
_TITLES = {"write": "write", "read": "read", "paged": "paged writes of", "latency": "ping-pong,"}


@dataclass(frozen=True)
class Plan:
    """The parsed options."""

    kinds: tuple[str, ...]
    sizes: tuple[int, ...]
    windows: tuple[int, ...]
    latency_sizes: tuple[int, ...]
    seconds: float
    warmup_s: float
    runs: int

    def points(self) -> Iterator[Point]:
        """The points, in the order of the table."""
        for kind in ("write", "read"):
            if kind in self.kinds:
                yield from (Point(kind, nbytes, window) for nbytes in self.sizes for window in self.windows)
        if "paged" in self.kinds:
            yield from (Point("paged", nbytes, _PAGED_WINDOW) for nbytes in self.sizes if nbytes <= _PAGE_BYTES_MAX)
        if "latency" in self.kinds:
            yield from (Point("latency", nbytes, 0) for nbytes in self.latency_sizes)

    def to_json(self) -> dict[str, Any]:
        """The point as JSON values, for the report."""
        content = asdict(self)
        return {key: list(value) if isinstance(value, tuple) else value for key, value in content.items()}


class Limit:
    """The machine's limit to compare a point with: memcpy if both sides are on one host, bare sockets over tcp."""

    def __init__(self, driver: Driver, transport: str, *, spins: bool) -> None:
        """spins: there is a core for each worker of both sides, so that bare sockets may spin, which is faster then."""
        self._driver = driver
        self._transport = transport
        self._spins = spins
        self.missing = ""  # why there is none, where one would be expected
        if transport == "tcp":
            try:
                driver.connect_bare()
            except CrossrailError as error:
                self.missing = f"bare sockets are left out: {error}"

    def name(self, point: Point) -> str:
        """Empty if there is no limit for such a point."""
        if self._transport == "shm" and point.kind != "latency":
            return "memcpy of the same pages" if point.kind == "paged" else "memcpy"
        if self._transport != "tcp" or point.kind != "write" or self.missing:
            return ""
        return "bare sockets" if self._spins else "bare sockets, blocking"

    def of(self, point: Point, seconds: float) -> Callable[[], float | None]:
        """A function that measures it, in GB/s: memcpy in one pass over the memory, sockets for about so long."""
        if not self.name(point):
            return lambda: None
        if self._transport == "shm":
            return lambda: self._driver.copy(point).gb_per_s
        count_min = _count_min(point)
        count = count_for(seconds, 0.0, count_min, lambda count: self._stream(point, count).seconds)
        return lambda: self._stream(point, count).gb_per_s

    def _stream(self, point: Point, count: int) -> Pass:
        return self._driver.stream(point, count, spin=self._spins)


def line_of(point: Point, limit: str) -> Line:
    """Uses the names of the local benchmark where both measure the same."""
    size = short_size(point.nbytes)
    short = size.replace(" ", "").lower().replace("ib", "")
    is_windowed = point.kind in ("write", "read")
    return Line(
        name=f"{point.kind}-{short}" + (f"-w{point.window}" if is_windowed else ""),
        title=f"{_TITLES[point.kind]} {size}" + (f", window {point.window}" if is_windowed else ""),
        unit="us" if point.kind == "latency" else "GB/s",
        limit=limit,
        point=point,
    )


def measure(driver: Driver, point: Point, plan: Plan, limit: Limit, on_run: Callable[[], None]) -> Result:
    """Measures one point: checked, warmed up, then run after run. Raises on failure: the sides are out of step then."""
    result = Result(line_of(point, limit.name(point)))
    before = driver.explain()
    driver.check(point)
    if point.kind == "latency":
        _measure_latency(driver, point, plan, result, on_run)
    else:
        _measure_rate(driver, point, plan, limit, result, on_run)
    result.path = path_used(before, driver.explain())
    return result


def _measure_rate(
    driver: Driver, point: Point, plan: Plan, limit: Limit, result: Result, on_run: Callable[[], None]
) -> None:
    measure_limit = limit.of(point, plan.seconds)
    count = count_for(plan.seconds, plan.warmup_s, _count_min(point), lambda count: driver.move(point, count).seconds)
    for _ in range(plan.runs):
        beside = measure_limit()
        result.samples.append(Sample(driver.move(point, count).gb_per_s, beside))
        on_run()


def _count_min(point: Point) -> int:
    """A full window, and of short operations enough for the clock."""
    return max(point.window, 1 if point.nbytes >= _FEW_BYTES else _COUNT_MIN)


def _measure_latency(driver: Driver, point: Point, plan: Plan, result: Result, on_run: Callable[[], None]) -> None:
    def run(count: int) -> float:
        return sum(driver.ping_pong(point.nbytes, count)) / 1e9

    rounds = min(count_for(plan.seconds, plan.warmup_s, _COUNT_MIN, run), _ROUNDS_MAX)
    all_us = []
    for _ in range(plan.runs):
        one_way_us = np.asarray(driver.ping_pong(point.nbytes, rounds)) / 2e3
        result.samples.append(Sample(float(np.median(one_way_us)), None))
        all_us.append(one_way_us)
        on_run()
    result.ecdf = ecdf_of(np.concatenate(all_us))
    at = dict(result.ecdf)  # as the picture has them
    result.note = f"p99 {report.figure(at[0.99])}, max {report.figure(at[1.0])} us"


def ecdf_of(values: np.ndarray[Any, np.dtype[np.float64]]) -> list[tuple[float, float]]:
    """(share, value) at each percent, finer towards the end: the value with that share of all at or below it."""
    shares = np.concatenate([
        np.linspace(0, 0.99, 100), np.linspace(0.991, 0.999, 9), np.linspace(0.9991, 0.9999, 9), [1.0]
    ])  # fmt: skip
    quantiles = np.quantile(values, shares, method="inverted_cdf")
    return [(round(float(share), 6), float(value)) for share, value in zip(shares, quantiles, strict=True)]


def path_used(before: Explanation, after: Explanation) -> str:
    """The transport, and of its paths the one that most bytes took meanwhile."""
    had = {(path.what, path.path): path.bytes for path in before.paths}
    moved = [(path.bytes - had.get((path.what, path.path), 0), path.path) for path in after.paths]
    most = max(moved, default=(0, ""))
    rails = len(after.rails)
    told = f"{after.transport}, {rails} rails" if rails > 1 else after.transport
    return f"{told}: {most[1]}" if most[0] > 0 and most[1] != after.transport else told


def span_bytes(memory_bytes: int, processes: int, sizes: Sequence[int]) -> int:
    """Each worker's memory: its part of what was asked for, and at least two of the largest operations."""
    return max(memory_bytes // processes // 4096 * 4096, 2 * max(sizes, default=0), 1 << 20)

"""The cost of the host's part of a round: writes to 56 far ranks over a transport that moves nothing, in
one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median

from crossrail import _core
from crossrail.cli.bench.spec import Bar, Line, Result, Sample

_FIRST_WRITE_MAX_US = 2.0
_ALL_POSTED_MAX_US = 8.5
_STREAM_ROUNDS = 0.1  # as a share of the other measures' rounds: each one takes a thread of its own

Timed = Callable[[int], list[int]]


def measure_posting(cpu: int, runs: int, rounds: int) -> Iterator[Result]:
    """A result for each figure. cpu: of the threads that post; this one is to be on another core."""
    posting = _core.bench.MoePosting()
    few = max(int(rounds * _STREAM_ROUNDS), 1)
    measured: list[tuple[str, str, float, int, Timed]] = [
        ("routes", "routes posted to 56 ranks", _ALL_POSTED_MAX_US, rounds, posting.routes),
        ("rows", "rows posted to 56 ranks", _ALL_POSTED_MAX_US, rounds, posting.rows),
        ("results", "results posted to 56 ranks", _ALL_POSTED_MAX_US, rounds, posting.results),
        ("first-write", "routes there to first write, by the caller", _FIRST_WRITE_MAX_US, rounds,
         posting.first_write_by_caller),
        ("first-write-thread", "the same, by a thread that is told", _FIRST_WRITE_MAX_US, rounds,
         lambda count: posting.first_write_by_thread(cpu, count)),
        ("first-write-stream", "the same, by one that sees the GPU's word", _FIRST_WRITE_MAX_US, few,
         lambda count: posting.first_write_of_stream(cpu, count)),
    ]  # fmt: skip
    for name, title, most_us, count, timed in measured:
        bar = Bar("value", "<=", most_us)
        result = Result(Line(name=f"posting-{name}", title=title, unit="us", limit="", bar=bar))
        for _ in range(runs):
            result.samples.append(Sample(median(timed(count)) / 1e3, None))
        yield result

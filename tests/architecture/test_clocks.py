"""Hosts need not agree on the time, and wall clocks jump: what lasts, or is due, is told on clocks that only go on."""

import re

from tests.architecture.test_sizes import sources

WALL = re.compile(
    r"\btime\.(time|time_ns|localtime|gmtime|ctime)\(|from time import .*\btime\b|\bdatetime\.(now|utcnow|today)\("
    r"|\bCLOCK_REALTIME\b|\bsystem_clock\b|\bgettimeofday\(|\bstd::time\("
)
# Where people are told what time it is.
STAMPS = {
    "native/engine/flight_dump.cc",  # of a recording
    "src/crossrail/doctor/report.py",
    "src/crossrail/kv/http/answer.py",  # OpenAI's `created`
    "src/crossrail/kv/http/front.py",  # the same
}


def readers(texts: dict[str, str]) -> set[str]:
    """But for benchmarks, which say when they were run."""
    shipped = {path: text for path, text in texts.items() if path.startswith(("native/", "src/"))}
    return {path for path, text in shipped.items() if WALL.search(text) and "/bench/" not in path}


def test_wall_clocks_are_read_for_people_only() -> None:
    assert readers(sources()) == STAMPS


def test_reading_a_wall_clock_is_seen() -> None:
    for text in ("x = time.time()", "std::chrono::system_clock::now()", "datetime.now(utc)", "from time import time"):
        assert readers({"src/a.py": text}) == {"src/a.py"}
    assert readers({"src/a.py": "time.monotonic()\nbegun.time()", "tests/a.py": "time.time()"}) == set()

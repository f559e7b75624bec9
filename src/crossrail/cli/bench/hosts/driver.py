"""Directs the workers on both sides for `bench run`: timed passes, and untimed passes that check the data."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from crossrail.cli.bench.hosts import wire
from crossrail.cli.bench.hosts.post import Post
from crossrail.cli.bench.hosts.worker import PAGES_PER_CALL, paged_work
from crossrail.cli.bench.hosts.workers import Workers
from crossrail.cli.bench.spec import Point
from crossrail.errors import CrossrailError
from crossrail.peers import Explanation, PathExplanation

_CHECKED_BYTES = 16 << 20  # of each worker's memory, by each point's untimed pass
_CHECKED_ROUNDS = 200  # round trips that such a pass takes at most: the other side may be far away
_BARE_CONNECT_S = 3.0
_PASSES_MIN = 3  # before it is known how long an operation takes

_SERVED = {"write": "receive", "paged": "receive"}  # what the other side does meanwhile; reads need nobody there


class Pass(NamedTuple):
    """So many operations of each worker, from when the first began until the last had ended."""

    seconds: float
    nbytes: int  # moved by all workers together

    @property
    def gb_per_s(self) -> float:
        return self.nbytes / self.seconds / 1e9


class Driver:
    """All workers of both sides, connected. Threads: one at a time.

    Each pass involves all workers at once: worker i here with worker i there.
    """

    def __init__(self, post: Post, workers: Workers, span_bytes: int, timeout_s: float) -> None:
        """timeout_s: of each pass."""
        self._post = post
        self._workers = workers
        self._span_bytes = span_bytes
        self._timeout_s = timeout_s
        self._seed = 0

    def explain(self) -> Explanation:
        """How bytes go from the first worker to its peer."""
        name, transport, reason, state, note, rails, endpoints, gb_per_s, paths, _ = self._workers.call("explain")[0]
        shown = tuple(PathExplanation(*path) for path in paths)
        pairs = tuple((ours, theirs) for ours, theirs in rails)
        ends = tuple((ours, theirs) for ours, theirs in endpoints)
        return Explanation(name, transport, reason, state, note, pairs, ends, gb_per_s, shown)

    # --- timed ---

    def move(self, point: Point, count: int) -> Pass:
        """`count` writes, reads or pages of each worker."""
        return self._move(point, count, self._span_of(point.nbytes))

    def _move(self, point: Point, count: int, span_bytes: int) -> Pass:
        if point.kind == "paged":
            pages, rounds = paged_work(count, span_bytes // point.nbytes)
            count = pages * rounds
        if (what := _SERVED.get(point.kind)) is not None:
            self._send(what, count=count)
        times = self._both(
            point.kind, what is not None, nbytes=point.nbytes, window=point.window, count=count, span_bytes=span_bytes
        )
        return self._pass(times, count * point.nbytes)

    def ping_pong(self, nbytes: int, rounds: int, *, verify: bool = False) -> list[int]:
        """Nanoseconds of each round trip, for all workers, concatenated."""
        self._send("ping-pong", nbytes=nbytes, count=rounds, verify=verify)
        times = self._both("ping_pong", True, nbytes=nbytes, count=rounds, verify=verify)
        return [taken for of_worker in times for taken in of_worker]

    # --- untimed: what arrives is what was sent ---

    def check(self, point: Point) -> None:
        """One pass over memory that was cleared before. CrossrailError if the result is wrong."""
        self._seed += 1
        if point.kind == "latency":
            self.ping_pong(point.nbytes, _CHECKED_ROUNDS, verify=True)
            return
        round_bytes = point.nbytes * point.window * (PAGES_PER_CALL if point.kind == "paged" else 1)
        checked_bytes = max(min(_CHECKED_BYTES, _CHECKED_ROUNDS * round_bytes), point.nbytes)
        nbytes = self._span_of(point.nbytes, min(self._span_bytes, checked_bytes))
        if point.kind == "read":
            sent = self._ask("fill", nbytes=nbytes, count=self._seed)
            self._call("clear_own", nbytes=nbytes)
        else:
            sent = self._call("fill", nbytes=nbytes, seed=self._seed)
            self._ask("clear", nbytes=nbytes)
        self._move(point, nbytes // point.nbytes, nbytes)
        if point.kind == "paged":
            sent = self._call("paged_digest", nbytes=point.nbytes, span_bytes=nbytes)
        if point.kind == "read":
            arrived = self._call("digest_own", nbytes=nbytes)
        else:
            arrived = self._ask("digest", nbytes=nbytes)
        if arrived != sent:
            raise CrossrailError(f"{point.kind} of {point.nbytes} bytes: what arrived is not what was sent")

    # --- what the machine does without the engine ---

    def copy(self, point: Point) -> Pass:
        """memcpy by all workers of this side, once through their memory."""
        command = "copy_pages" if point.kind == "paged" else "copy"
        span = self._span_of(point.nbytes)
        return self._pass(self._call(command, nbytes=point.nbytes, span_bytes=span), span)

    def connect_bare(self) -> None:
        """A bare TCP connection for each pair of workers. CrossrailError when a firewall or the like is between."""
        places = [answer.split(" ") for answer in self._ask("listen", timeout_s=self._timeout_s)]
        if any(len(place) != 3 or not place[1].isdecimal() for place in places):
            raise wire.ProtocolError("the server does not say where it listens")
        self._workers.each(
            "connect_bare",
            [
                {"host": host, "port": int(port), "token": token, "timeout_s": _BARE_CONNECT_S}
                for host, port, token in places
            ],
        )

    def stream(self, point: Point, count: int, *, spin: bool) -> Pass:
        """The same writes as messages over the bare connections, with the same window."""
        self._send("stream", nbytes=point.nbytes, window=point.window, count=count, spin=spin)
        times = self._both(
            "stream",
            True,
            nbytes=point.nbytes,
            window=point.window,
            count=count,
            sender=True,
            spin=spin,
            span_bytes=self._span_bytes,
        )
        return self._pass(times, count * point.nbytes)

    # --- both sides ---

    def _span_of(self, nbytes: int, within: int | None = None) -> int:
        """The part of the memory that whole operations fill."""
        return (within or self._span_bytes) // nbytes * nbytes

    def _pass(self, times: list[list[int]], worker_bytes: int) -> Pass:
        begun, ended = min(begun for begun, _ in times), max(ended for _, ended in times)
        return Pass(max(ended - begun, 1) / 1e9, worker_bytes * len(times))

    def _send(self, what: str, **arguments: Any) -> None:
        self._post.send(wire.Step(run=self._post.run, what=what, **({"timeout_s": self._timeout_s} | arguments)))

    def _both(self, command: str, awaits_done: bool, **arguments: Any) -> list[list[int]]:
        """Calls all workers here while those over there do what was sent. Returns the answers of ours."""
        arguments["timeout_s"] = self._timeout_s
        answers, _ = self._workers.call_beside(self._post, command, arguments, self._timeout_s, awaits_done=awaits_done)
        return answers

    def _ask(self, what: str, **arguments: Any) -> list[str]:
        """Calls all workers over there, and returns their answers."""
        self._send(what, **arguments)
        answers = self._post.receive(wire.Done, self._timeout_s + 10.0).answers
        if len(answers) != len(self._workers):
            raise wire.ProtocolError(f"{len(answers)} answers arrived from {len(self._workers)} workers")
        return answers

    def _call(self, command: str, **arguments: Any) -> list[Any]:
        """Calls all workers here."""
        return self._workers.call(command, self._timeout_s, **arguments)


def count_for(seconds: float, warmup_s: float, count_min: int, run: Callable[[int], float]) -> int:
    """How many operations take so long. run(count) does them and says how long it took; what it does is the warm-up,
    and is not counted. At least count_min.
    """
    count, spent_s, passes, operation_s = count_min, 0.0, 0, math.inf
    while True:
        took_s = run(count)
        spent_s, passes = spent_s + took_s, passes + 1
        # The fastest pass says how long one takes: others may have lost their core meanwhile.
        operation_s = min(operation_s, took_s / count)
        fitting = max(count_min, math.ceil(seconds / operation_s))
        if passes >= _PASSES_MIN and spent_s >= warmup_s and 4 * count >= fitting:
            return fitting
        # Eight times as many at most: the first ones say little about the rest.
        count = min(8 * count, fitting)

"""How quickly the death of a peer on the same host is noticed: from SIGKILL to PeerLost."""

from __future__ import annotations

import os
import signal
import time

from crossrail.cli.bench import api_loops
from crossrail.cli.bench.pair import PEER_MODULE, Pair
from crossrail.cli.bench.spec import Bar, Measure, Sample, SampleStream
from crossrail.cli.child import Child
from crossrail.errors import CrossrailError, PeerLost

_WRITE_BYTES = 64 << 10
_WRITES_BEFORE = 100
_GIVE_UP_S = 10.0


def measures() -> list[Measure]:
    """The one."""
    return [
        Measure(
            name="peer-death",
            title="SIGKILL of a peer until PeerLost",
            unit="ms",
            limit="",
            samples=_samples,
            bar=Bar("value", "<=", 100.0),
        )
    ]


def _samples(pair: Pair) -> SampleStream:
    side = api_loops.Side("bench-survivor", **pair.settings.rig_options)
    try:
        while True:
            yield Sample(_death_ns(pair, side) / 1e6, None)
    finally:
        side.close()


def _death_ns(pair: Pair, side: api_loops.Side) -> int:
    """The time until the death of a process is noticed that gets one write after the other."""
    with Child(PEER_MODULE, "the process that dies", cpu=pair.settings.cpus[1]) as victim:
        _, descriptor = victim.call("open_side", **pair.settings.rig_options)
        side.meet(bytes.fromhex(descriptor))
        for _ in range(_WRITES_BEFORE):
            _write(side)
        os.kill(victim.pid, signal.SIGKILL)
        killed = time.perf_counter_ns()
        try:
            while time.perf_counter_ns() - killed < _GIVE_UP_S * 1e9:
                _write(side)
        except PeerLost:
            return time.perf_counter_ns() - killed
    raise CrossrailError(f"a peer that was killed was not lost within {_GIVE_UP_S:g} s")


def _write(side: api_loops.Side) -> None:
    side.engine.submit_write(side.region, side.partner, _WRITE_BYTES).wait(_GIVE_UP_S)

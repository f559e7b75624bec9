"""Measures of small operations, with native loops on both sides: latency and rate of 8-byte writes with immediates."""

from __future__ import annotations

from collections.abc import Callable

from crossrail import _core
from crossrail.cli.bench.pair import IMM_ACK, IMM_DATA, Link, Pair, alternate, alternate_briefly
from crossrail.cli.bench.passes import fill, verify_prefix
from crossrail.cli.bench.spec import Bar, Measure, Sample, SampleStream

_WORD_BYTES = 8
_RATE_WINDOW = 256
_RATE_SPAN_BYTES = 2048  # that they walk through, again and again
# A sample is so many pieces, each right after one of its limit.
_TURNS = 4
_TURN_ROUNDS = 2000  # of the ping-pong: half a millisecond


def measures() -> list[Measure]:
    """The measures, in the order of the table."""
    return [
        Measure(
            name="ping-pong",
            title="8-byte write + imm, spin, one way",
            unit="ns",
            limit="bare flag",
            samples=_ping_pong_samples,
            bar=Bar("ratio", "<=", 2.5),
        ),
        Measure(
            name="write-rate",
            title="8-byte writes + imm, window 256",
            unit="M/s",
            limit="bare ring",
            samples=_rate_samples,
            bar=Bar("value", ">=", 12.0),
        ),
    ]


def verified_ping_pong(pair: Pair, link: Link) -> Callable[[int], float]:
    """A function that runs so many round trips on this link: nanoseconds one way."""

    def ping_pong(count: int, *, verify: bool = False) -> float:
        pair.child.start(
            "ping_pong",
            key=link.key,
            src=link.peer_control,
            dst=link.control_here,
            landing=link.peer_control,
            imm_out=IMM_DATA,
            imm_in=IMM_DATA,
            rounds=count,
            verify=verify,
        )
        took_ns = _core.bench.run_ping_pong(
            link.rig,
            link.control,
            link.control_there,
            link.control,
            imm_out=IMM_DATA,
            imm_in=IMM_DATA,
            rounds=count,
            first=True,
            verify=verify,
        )
        link.finish()
        return took_ns / count / 2

    ping_pong(pair.settings.scaled(2000), verify=True)
    return ping_pong


def _ping_pong_samples(pair: Pair) -> SampleStream:
    ping_pong = verified_ping_pong(pair, pair.link("manual"))
    turns = pair.settings.scaled(40)
    while True:
        flag_ns, one_way_ns = alternate_briefly(
            turns, lambda: pair.flag_one_way_ns(_TURN_ROUNDS), lambda: ping_pong(_TURN_ROUNDS)
        )
        yield Sample(one_way_ns, flag_ns)


def _rate_samples(pair: Pair) -> SampleStream:
    link = pair.link("manual")
    count = pair.settings.scaled(1_000_000)

    def write(operations: int) -> int:
        link.start_receiving(operations)
        took_ns = _core.bench.run_writes(
            link.rig,
            link.control,
            link.control_there,
            nbytes=_WORD_BYTES,
            span_bytes=_RATE_SPAN_BYTES,
            count=operations,
            window=_RATE_WINDOW,
            imm=IMM_DATA,
            ack=IMM_ACK,
        )
        link.finish()
        return took_ns

    source = link.rig.view(link.control)
    fill(source, seed=_RATE_WINDOW)
    verify_prefix(pair, link, source, link.peer_control, _RATE_SPAN_BYTES, lambda: write(10_000), "8-byte writes")
    while True:
        record_ns, write_ns = alternate(_TURNS, lambda: 1e9 / pair.stream_per_s(), lambda: write(count) / count)
        yield Sample(1e3 / write_ns, 1e3 / record_ns)

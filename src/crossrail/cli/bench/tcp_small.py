"""Measures of small operations over TCP, with native loops on both sides, each next to a loop over bare sockets."""

from __future__ import annotations

import statistics
import time

from crossrail import RegionDescriptor, _core
from crossrail.cli.bench.pair import Pair, alternate
from crossrail.cli.bench.small import verified_ping_pong
from crossrail.cli.bench.spec import Bar, Measure, Sample, SampleStream

_WORD_BYTES = 8
_MESSAGE_BYTES = 256
_MESSAGE_WINDOW = 256
# A sample is so many pieces, each right after one of its limit.
_TURNS = 4
_FIRST_WRITES = 20
_REGION_BYTES = 4096


def measures() -> list[Measure]:
    """The measures, in the order of the table."""
    return [
        Measure(
            name="ping-pong",
            title="8-byte write + imm, spin, one way",
            unit="us",
            limit="bare socket, spinning",
            samples=lambda pair: _ping_pong_samples(pair, "manual", "spin"),
            bar=Bar("ratio", "<=", 1.25),
        ),
        Measure(
            name="ping-pong-sleeping",
            title="8-byte write + imm, sleeping workers, one way",
            unit="us",
            limit="bare socket, blocking",
            samples=lambda pair: _ping_pong_samples(pair, "sleeping", "block"),
            bar=Bar("ratio", "<=", 1.3),
        ),
        Measure(
            name="messages",
            title="256-byte messages, window 256",
            unit="k/s",
            limit="bare socket, many to a send",
            samples=_message_samples,
            bar=Bar("value", ">=", 250.0),
        ),
        Measure(
            name="message-ping-pong",
            title="256-byte message, spin, one way",
            unit="us",
            limit="bare socket, spinning",
            samples=_message_ping_pong_samples,
            bar=Bar("ratio", "<=", 1.3),
        ),
        Measure(
            name="handshake",
            title="connect to a new peer",
            unit="us",
            limit="bare connect() and two round trips, blocking",
            samples=lambda pair: _newcomer_samples(pair, "handshake"),
        ),
        Measure(
            name="first-write",
            title="first write to a new peer, after the handshake",
            unit="us",
            limit="bare round trip, blocking",
            samples=lambda pair: _newcomer_samples(pair, "write"),
            bar=Bar("ratio", "<=", 2.0),
        ),
    ]


def _ping_pong_samples(pair: Pair, key: str, wait: str) -> SampleStream:
    ping_pong = verified_ping_pong(pair, pair.link(key))
    rounds = pair.settings.scaled(20_000 if wait == "spin" else 5_000)
    while True:
        bare_ns, one_way_ns = alternate(
            _TURNS, lambda: pair.sockets.one_way_ns(_WORD_BYTES, wait=wait), lambda: ping_pong(rounds)
        )
        yield Sample(one_way_ns / 1e3, bare_ns / 1e3)


def _message_samples(pair: Pair) -> SampleStream:
    link = pair.link("manual")
    count = pair.settings.scaled(100_000)

    def send(messages: int, *, verify: bool = False) -> int:
        arguments = {"nbytes": _MESSAGE_BYTES, "count": messages, "window": _MESSAGE_WINDOW}
        pair.child.start("messages", key=link.key, peer=link.rig.address.hex(), verify=verify, **arguments)
        took_ns = _core.bench.run_messages(link.rig, link.peer_address, sender=True, verify=verify, **arguments)
        link.finish()
        return took_ns

    send(1000, verify=True)
    while True:
        bare_ns, message_ns = alternate(
            _TURNS, lambda: pair.sockets.message_ns(_MESSAGE_BYTES), lambda: send(count) / count
        )
        yield Sample(1e6 / message_ns, 1e6 / bare_ns)


def _message_ping_pong_samples(pair: Pair) -> SampleStream:
    link = pair.link("manual")
    rounds = pair.settings.scaled(20_000)

    def ping_pong(count: int, *, verify: bool = False) -> float:
        arguments = {"nbytes": _MESSAGE_BYTES, "count": count}
        pair.child.start("message_ping_pong", key=link.key, peer=link.rig.address.hex(), verify=verify, **arguments)
        took_ns = _core.bench.run_message_ping_pong(link.rig, link.peer_address, first=True, verify=verify, **arguments)
        link.finish()
        return took_ns / count / 2

    ping_pong(1000, verify=True)
    while True:
        bare_ns, one_way_ns = alternate(
            _TURNS, lambda: pair.sockets.one_way_ns(_MESSAGE_BYTES, wait="spin"), lambda: ping_pong(rounds)
        )
        yield Sample(one_way_ns / 1e3, bare_ns / 1e3)


def _newcomer_samples(pair: Pair, part: str) -> SampleStream:
    """A default engine that knows nobody connects, and then writes, to a default engine that sleeps."""
    _, descriptor = pair.link("adaptive").add_peer_memory(_REGION_BYTES, private=False)
    while True:
        connect_ns = pair.sockets.connect_ns()
        round_trip_ns = 2 * pair.sockets.one_way_ns(_WORD_BYTES, wait="block")
        parts = [_newcomer_ns(pair, descriptor) for _ in range(_FIRST_WRITES)]
        if part == "handshake":
            took_ns = statistics.median(handshake_ns for handshake_ns, _ in parts)
            yield Sample(took_ns / 1e3, (connect_ns + 2 * round_trip_ns) / 1e3)
        else:
            took_ns = statistics.median(write_ns for _, write_ns in parts)
            yield Sample(took_ns / 1e3, round_trip_ns / 1e3)


def _newcomer_ns(pair: Pair, descriptor: bytes) -> tuple[int, int]:
    """The handshake; and the write until it is done, that is, until the peer has it and has confirmed it."""
    rig = _core.bench.Rig("bench-newcomer", polling="adaptive", **pair.settings.rig_options)
    try:
        src = rig.alloc(_REGION_BYTES)
        time.sleep(0.002)  # both workers are asleep
        begun = time.perf_counter_ns()
        rig.connect(RegionDescriptor.from_bytes(descriptor).owner.to_bytes(), 5.0)
        connected = time.perf_counter_ns()
        time.sleep(0.002)
        writing = time.perf_counter_ns()
        dst = rig.remote(descriptor)
        _core.bench.run_writes(
            rig, src, dst, nbytes=_WORD_BYTES, span_bytes=_REGION_BYTES, count=1, window=1, timeout_s=5.0
        )
        return connected - begun, time.perf_counter_ns() - writing
    finally:
        rig.close()

"""Measures of what a Python program sees: latency of counters and messages, message rate, the cost of a submit."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager

from crossrail.cli.bench import api_loops
from crossrail.cli.bench.pair import Pair
from crossrail.cli.bench.spec import Bar, Measure, Sample, SampleStream
from crossrail.errors import CrossrailError

_SUBMIT_BYTES = 4096
# Submits between two looks at the clock's other side: few enough that the queue never fills.
_SUBMIT_BATCH = 32


def measures() -> list[Measure]:
    """In the order of the table."""
    return [
        Measure(
            name="py-blocking",
            title="Python: 8-byte write + imm, blocking",
            unit="us",
            limit="bare flag",
            samples=lambda pair: _latency_samples(pair, blocking=True),
            bar=Bar("value", "<=", 8.0),
        ),
        Measure(
            name="py-await",
            title="Python: 8-byte write + imm, await",
            unit="us",
            limit="bare flag",
            samples=lambda pair: _latency_samples(pair, blocking=False),
            bar=Bar("value", "<=", 25.0),
        ),
        Measure(
            name="py-submit",
            title="Python: submit_write, a call",
            unit="us",
            limit="a native call that does nothing",
            samples=_submit_samples,
            bar=Bar("value", "<=", 1.2),
        ),
        Measure(
            name="py-messages",
            title="Python: 256-byte messages",
            unit="k/s",
            limit="bare ring",
            samples=_message_rate_samples,
            bar=Bar("value", ">=", 300.0),
        ),
        Measure(
            name="py-message-latency",
            title="Python: 256-byte message, one way",
            unit="us",
            limit="bare flag",
            samples=_message_latency_samples,
        ),
    ]


@contextmanager
def _sides(pair: Pair) -> Iterator[api_loops.Side]:
    """Our side, with the peer's connected."""
    side = api_loops.Side("bench")
    _, descriptor = pair.child.call("open_side")
    try:
        side.meet(bytes.fromhex(descriptor))
        pair.child.call("meet", descriptor=side.region.descriptor.to_bytes().hex())
        side.engine.connect(side.partner.owner)
        yield side
    finally:
        side.close()
        pair.child.call("close_side")


def _latency_samples(pair: Pair, *, blocking: bool) -> SampleStream:
    rounds = pair.settings.scaled(20_000 if blocking else 10_000)
    with _sides(pair) as side:

        def ping_pong(count: int) -> int:
            pair.child.start("api_ping_pong", rounds=count, blocking=blocking)
            if blocking:
                took_ns = api_loops.ping_blocking(side, count)
            else:
                took_ns = asyncio.run(api_loops.ping_awaiting(side, count))
            pair.child.finish()
            return took_ns

        ping_pong(200)
        while True:
            limit_us = pair.flag_one_way_ns() / 1e3
            yield Sample(ping_pong(rounds) / rounds / 2 / 1e3, limit_us)


def _submit_samples(pair: Pair) -> SampleStream:
    batches = pair.settings.scaled(400)
    with _sides(pair) as side, pair.on_all_cores():
        _time_submits(side, 10)
        while True:
            limit_us = _time_nothing(pair, side, batches)
            yield Sample(_time_submits(side, batches), limit_us)


def _time_submits(side: api_loops.Side, batches: int) -> float:
    """Median of single calls, in us. What the clock itself costs is in it."""
    clock, submit = time.perf_counter_ns, side.engine.submit_write
    src, dst = side.region, side.partner
    took_ns: list[int] = []
    for _ in range(batches):
        transfers = []
        for _ in range(_SUBMIT_BATCH):
            begun = clock()
            transfer = submit(src, dst, _SUBMIT_BYTES)
            took_ns.append(clock() - begun)
            transfers.append(transfer)
        for transfer in transfers:
            transfer.wait(10.0)
    return statistics.median(took_ns) / 1e3


def _time_nothing(pair: Pair, side: api_loops.Side, batches: int) -> float:
    clock, nothing = time.perf_counter_ns, pair.native.nothing
    src, dst = side.region, side.partner
    took_ns: list[int] = []
    for _ in range(batches * _SUBMIT_BATCH):
        begun = clock()
        nothing(src, dst, _SUBMIT_BYTES)
        took_ns.append(clock() - begun)
    return statistics.median(took_ns) / 1e3


def _message_rate_samples(pair: Pair) -> SampleStream:
    count = pair.settings.scaled(300_000)
    with _sides(pair) as side:

        def send(messages: int) -> int:
            pair.child.start("take_messages", count=messages)
            took_ns = api_loops.send_messages(side, messages)
            pair.child.finish()
            return took_ns

        send(1000)
        while True:
            limit = pair.stream_per_s() / 1e3
            yield Sample(count / send(count) * 1e6, limit)


def _message_latency_samples(pair: Pair) -> SampleStream:
    rounds = pair.settings.scaled(20_000)
    with _sides(pair) as side:
        _check_echo(pair, side)
        while True:
            limit_us = pair.flag_one_way_ns() / 1e3
            pair.child.start("echo_messages", count=rounds)
            took_ns = api_loops.ping_messages(side, rounds)
            pair.child.finish()
            yield Sample(took_ns / rounds / 2 / 1e3, limit_us)


def _check_echo(pair: Pair, side: api_loops.Side) -> None:
    """Untimed: messages that differ come back as they were."""
    count = 100
    pair.child.start("echo_messages", count=count)
    for index in range(count):
        message = bytes([index]) * api_loops.MESSAGE_BYTES
        side.engine.submit_send(side.partner.owner, message)
        if side.pool.recv(10.0).data != message:
            raise CrossrailError("send/recv: what came back is not what was sent")
    pair.child.finish()

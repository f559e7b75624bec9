"""Measures what a Python program sees: latency of counters and messages, message rate, the cost of a submit."""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from crossrail import _core
from crossrail.cli import event_loop
from crossrail.cli.bench import api_loops
from crossrail.cli.bench.pair import Pair
from crossrail.cli.bench.passes import fill
from crossrail.cli.bench.spec import Bar, Measure, Sample, SampleStream
from crossrail.errors import CrossrailError

_SUBMIT_BYTES = 4096
# Submits between two looks at the clock's other side: few enough that the queue never fills.
_SUBMIT_BATCH = 32
_SPARSE_ROUNDS = 500
_VERIFIED = 100  # rounds and messages of a pass that is not timed


@dataclass(frozen=True)
class _Limit:
    """The limit to compare a transport's figures with."""

    name: str
    figure: Callable[[Pair], float]


_FLAG = _Limit("bare flag", lambda pair: pair.flag_one_way_ns() / 1e3)
_RING = _Limit("bare ring", lambda pair: pair.stream_per_s() / 1e3)


def _socket_limit(nbytes: int) -> _Limit:
    return _Limit("bare socket, spinning", lambda pair: pair.sockets.one_way_ns(nbytes, wait="spin") / 1e3)


def _streams_limit(family: socket.AddressFamily) -> _Limit:
    words = "asyncio's streams, Unix socket" if family == socket.AF_UNIX else "asyncio's streams"
    return _Limit(words, lambda pair: _streams_one_way_us(pair, family))


def _streams_one_way_us(pair: Pair, family: socket.AddressFamily) -> float:
    rounds = pair.settings.scaled(10_000)
    with _bare_partner(pair, family, rounds) as bare:
        took_ns = api_loops.ping_streams(bare, rounds, first=True)
    return took_ns / rounds / 2 / 1e3


def _streams_sparse_us(pair: Pair, family: socket.AddressFamily) -> float:
    rounds = pair.settings.scaled(_SPARSE_ROUNDS)
    with _bare_partner(pair, family, rounds) as bare:
        took_ns = event_loop.run(api_loops.ping_streams_sparsely(bare, rounds))
    return statistics.median(took_ns) / 2 / 1e3


@contextmanager
def _bare_partner(pair: Pair, family: socket.AddressFamily, rounds: int) -> Iterator[socket.socket]:
    """A socket whose other end answers so many words by asyncio's streams."""
    with api_loops.listen_bare(family) as listener:
        at = listener.getsockname()
        address, port = (at.decode(), None) if family == socket.AF_UNIX else at
        pair.child.start("stream_ping_pong", address=address, port=port, rounds=rounds)
        yield listener.accept()[0]
        pair.child.finish()


def tcp_measures() -> list[Measure]:
    """The same measures over TCP, where they reveal something new."""
    word, message = _socket_limit(api_loops.WORD_BYTES), _socket_limit(api_loops.MESSAGE_BYTES)
    rate = _Limit("bare socket, many to a send", lambda pair: 1e6 / pair.sockets.message_ns(api_loops.MESSAGE_BYTES))
    return [
        _latency_measure("py-blocking", "blocking", word),
        _latency_measure("py-await", "await", _streams_limit(socket.AF_INET)),
        _sparse_measure("py-sparse", "blocking", socket.AF_INET),
        _sparse_measure("py-sparse-await", "await", socket.AF_INET),
        _rate_measure(rate),
        _message_latency_measure(message),
    ]


def measures() -> list[Measure]:
    """The measures, in the order of the table."""
    return [
        _latency_measure("py-blocking", "blocking", _FLAG, Bar("value", "<=", 8.0)),
        _latency_measure("py-await", "await", _streams_limit(socket.AF_UNIX), Bar("value", "<=", 25.0)),
        _sparse_measure("py-sparse", "blocking", socket.AF_UNIX),
        _sparse_measure("py-sparse-await", "await", socket.AF_UNIX),
        Measure(
            name="py-submit",
            title="Python: submit_write, a call",
            unit="us",
            limit="a native call that does nothing",
            samples=_submit_samples,
            bar=Bar("value", "<=", 1.2),
        ),
        _rate_measure(_RING, Bar("value", ">=", 300.0)),
        _message_latency_measure(_FLAG),
    ]


def _latency_measure(name: str, how: Literal["blocking", "await"], limit: _Limit, bar: Bar | None = None) -> Measure:
    return Measure(
        name=name,
        title=f"Python: 8-byte write + imm, {how}",
        unit="us",
        limit=limit.name,
        samples=lambda pair: _latency_samples(pair, limit, blocking=how == "blocking"),
        bar=bar,
    )


def _sparse_measure(name: str, how: Literal["blocking", "await"], family: socket.AddressFamily) -> Measure:
    return Measure(
        name=name,
        title=f"Python: the same every 2 ms, {how}",
        unit="us",
        limit=_streams_limit(family).name,
        samples=lambda pair: _sparse_samples(pair, family, blocking=how == "blocking"),
    )


def _rate_measure(limit: _Limit, bar: Bar | None = None) -> Measure:
    return Measure(
        name="py-messages",
        title="Python: 256-byte messages",
        unit="k/s",
        limit=limit.name,
        samples=lambda pair: _message_rate_samples(pair, limit),
        bar=bar,
    )


def _message_latency_measure(limit: _Limit) -> Measure:
    return Measure(
        name="py-message-latency",
        title="Python: 256-byte message, one way",
        unit="us",
        limit=limit.name,
        samples=lambda pair: _message_latency_samples(pair, limit),
    )


@contextmanager
def _sides(pair: Pair) -> Iterator[api_loops.Side]:
    """Our side, with the peer's connected."""
    side = api_loops.Side("bench", **pair.settings.rig_options)
    _, descriptor = pair.child.call("open_side", **pair.settings.rig_options)
    try:
        side.meet(bytes.fromhex(descriptor))
        pair.child.call("meet", descriptor=side.region.descriptor.to_bytes().hex())
        side.engine.connect(side.partner.owner)
        yield side
    finally:
        side.close()
        pair.child.call("close_side")


def _latency_samples(pair: Pair, limit: _Limit, *, blocking: bool) -> SampleStream:
    rounds = pair.settings.scaled(20_000 if blocking else 10_000)
    with _sides(pair) as side:

        def ping_pong(count: int) -> int:
            pair.child.start("api_ping_pong", rounds=count, blocking=blocking)
            if blocking:
                took_ns = api_loops.ping_blocking(side, count)
            else:
                took_ns = event_loop.run(api_loops.ping_awaiting(side, count))
            pair.child.finish()
            return took_ns

        _verify_ping_pong(pair, side, blocking=blocking)
        ping_pong(200)
        while True:
            at_best_us = limit.figure(pair)
            yield Sample(ping_pong(rounds) / rounds / 2 / 1e3, at_best_us)


def _sparse_samples(pair: Pair, family: socket.AddressFamily, *, blocking: bool) -> SampleStream:
    """Medians. Our threads may use all cores: where the kernel wakes them is part of what is measured."""
    rounds = pair.settings.scaled(_SPARSE_ROUNDS)
    with pair.on_all_cores(), _sides(pair) as side:
        while True:
            at_best_us = _streams_sparse_us(pair, family)
            pair.child.start("api_ping_pong", rounds=rounds, blocking=blocking)
            took_ns = event_loop.run(api_loops.ping_sparsely(side, rounds, blocking=blocking))
            pair.child.finish()
            yield Sample(statistics.median(took_ns) / 2 / 1e3, at_best_us)


def _verify_ping_pong(pair: Pair, side: api_loops.Side, *, blocking: bool) -> None:
    """Untimed: words that differ come there and back as they were."""
    pair.child.start("api_verified_ping_pong", rounds=_VERIFIED, blocking=blocking)
    event_loop.run(api_loops.ping_verified(side, _VERIFIED, blocking=blocking))
    pair.child.finish()


def _submit_samples(pair: Pair) -> SampleStream:
    batches = pair.settings.scaled(400)
    with _sides(pair) as side, pair.on_all_cores():
        _verify_submits(pair, side)
        while True:
            limit_us = _time_nothing(side, batches)
            yield Sample(_time_submits(side, batches), limit_us)


def _verify_submits(pair: Pair, side: api_loops.Side) -> None:
    """Untimed: checks that these bytes have arrived, and no others."""
    pair.child.call("clear_side")
    side.clear()
    fill(side.region.array()[:_SUBMIT_BYTES], seed=_SUBMIT_BYTES)
    _time_submits(side, 10)
    if pair.child.call("digest_side") != side.digest():
        raise CrossrailError("submit_write: what arrived is not what was sent")


def _time_submits(side: api_loops.Side, batches: int) -> float:
    """Median of single calls, in us. Includes the cost of reading the clock."""
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


def _time_nothing(side: api_loops.Side, batches: int) -> float:
    clock, nothing = time.perf_counter_ns, _core.bench.nothing
    src, dst = side.region, side.partner
    took_ns: list[int] = []
    for _ in range(batches * _SUBMIT_BATCH):
        begun = clock()
        nothing(src, dst, _SUBMIT_BYTES)
        took_ns.append(clock() - begun)
    return statistics.median(took_ns) / 1e3


def _message_rate_samples(pair: Pair, limit: _Limit) -> SampleStream:
    count = pair.settings.scaled(300_000)
    with _sides(pair) as side:

        def send(messages: int) -> int:
            pair.child.start("take_messages", count=messages)
            took_ns = api_loops.send_messages(side, messages)
            pair.child.finish()
            return took_ns

        pair.child.start("take_verified_messages", count=_VERIFIED)
        api_loops.send_verified(side, _VERIFIED)
        pair.child.finish()
        send(1000)
        while True:
            at_best = limit.figure(pair)
            yield Sample(count / send(count) * 1e6, at_best)


def _message_latency_samples(pair: Pair, limit: _Limit) -> SampleStream:
    rounds = pair.settings.scaled(20_000)
    with _sides(pair) as side:
        _check_echo(pair, side)
        while True:
            at_best_us = limit.figure(pair)
            pair.child.start("echo_messages", count=rounds)
            took_ns = api_loops.ping_messages(side, rounds)
            pair.child.finish()
            yield Sample(took_ns / rounds / 2 / 1e3, at_best_us)


def _check_echo(pair: Pair, side: api_loops.Side) -> None:
    """Untimed: messages that differ come back as they were."""
    pair.child.start("echo_messages", count=_VERIFIED)
    for index in range(_VERIFIED):
        message = bytes([index]) * api_loops.MESSAGE_BYTES
        side.engine.submit_send(side.partner.owner, message)
        if side.pool.recv(10.0).data != message:
            raise CrossrailError("send/recv: what came back is not what was sent")
    pair.child.finish()

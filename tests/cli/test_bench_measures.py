"""Measures of `crossrail bench`, one by one: each looks at the data before it is timed, and what limits are made of."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import crossrail as xr
from crossrail import _core
from crossrail.cli.bench.measures import all_measures
from crossrail.cli.bench.pair import Pair, Settings, choose_cpus
from crossrail.cli.bench.sockets import Chunks, fastest_chunks
from crossrail.cli.bench.spec import Bar, Line, Result, Sample, SampleStream
from crossrail.errors import CrossrailError
from tests.contract.setups import why_not
from tests.support.limits import WAIT_S, eventually

SETTINGS = Settings(choose_cpus(), 64 << 20, "shm", quick=True)


@pytest.fixture
def pair() -> Iterator[Pair]:
    with Pair(SETTINGS) as opened:
        yield opened


def samples_of(pair: Pair, name: str) -> SampleStream:
    (measure,) = (measure for measure in all_measures("shm") if measure.name == name)
    return measure.samples(pair)


# --- the data is looked at ---


def write_nothing(submit: Callable[..., Any]) -> Callable[..., Any]:
    return lambda engine, src, dst, length, **options: submit(engine, src, dst, 0, **options)


def send_something_else(submit: Callable[..., Any]) -> Callable[..., Any]:
    return lambda engine, peer, message: submit(engine, peer, message[:-1] + b"!")


def write_half(loop: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given, **options: loop(*given, **options | {"span_bytes": options["span_bytes"] // 2})


@pytest.mark.no_sanitizer
@pytest.mark.parametrize(
    ("name", "owner", "call", "spoil"),
    [
        ("write-rate", _core.bench, "run_writes", write_half),
        ("py-blocking", xr.Engine, "submit_write", write_nothing),
        ("py-await", xr.Engine, "submit_write", write_nothing),
        ("py-submit", xr.Engine, "submit_write", write_nothing),
        ("py-messages", xr.Engine, "submit_send", send_something_else),
    ],
)
def test_what_arrives_otherwise_than_it_was_sent_is_no_figure(
    pair: Pair,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    owner: object,
    call: str,
    spoil: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> None:
    monkeypatch.setattr(owner, call, spoil(getattr(owner, call)))

    with pytest.raises(CrossrailError, match="what arrived is not what was sent"):
        next(samples_of(pair, name))


# --- the death of a peer ---


@pytest.mark.no_sanitizer
def test_peer_death_is_measured(pair: Pair) -> None:
    with closing(samples_of(pair, "peer-death")) as samples:
        deaths = [next(samples) for _ in range(2)]

    assert all(death.value > 0 and death.limit is None for death in deaths)


# --- chunks of the bare stream ---


def test_chunks_are_those_that_cost_least() -> None:
    costs = {
        "send": {0: 5.0, 64: 4.0, 128: 1.0, 256: 3.0, 512: 2.0},
        "recv": {0: 5.0, 64: 4.0, 128: 3.0, 256: 1.0, 512: 2.0},
    }

    found = fastest_chunks(
        1 << 20, lambda chunks: costs["send"][chunks[0] >> 10] + costs["recv"][chunks[1] >> 10], rounds=1
    )

    assert found == Chunks(128 << 10, 256 << 10)
    assert str(found) == "bare: send 128 KiB, recv 256 KiB"


def test_chunks_are_not_larger_than_the_message_and_whole_where_nothing_is_faster() -> None:
    tried = []

    found = fastest_chunks(128 << 10, lambda chunks: tried.append(chunks) or 1.0, rounds=2)

    assert found == Chunks(0, 0) and str(found) == "bare: send whole, recv whole"
    assert {size for chunks in tried for size in chunks} == {0, 64 << 10}


def test_chunks_are_judged_by_their_best_run() -> None:
    runs: dict[Chunks, int] = {}

    def cost_of(chunks: Chunks) -> float:
        runs[chunks] = runs.get(chunks, 0) + 1
        disturbed = chunks == Chunks(0, 64 << 10) and runs[chunks] == 1
        return 100.0 if disturbed else 1.0 if chunks.recv_bytes == 64 << 10 else 2.0

    assert fastest_chunks(128 << 10, cost_of, rounds=2).recv_bytes == 64 << 10


# --- beside bare libraries of NICs ---


@pytest.mark.no_sanitizer
@pytest.mark.skipif(bool(why_not("ofi:tcp")), reason=why_not("ofi:tcp") or "-")
def test_ping_pong_over_ofi_stands_beside_that_of_bare_libfabric(monkeypatch: pytest.MonkeyPatch) -> None:
    (measure,) = (measure for measure in all_measures("ofi:tcp") if measure.name == "ping-pong")
    monkeypatch.setattr(Settings, "scaled", lambda _self, _count: 20)

    with Pair(replace(SETTINGS, transport="ofi:tcp")) as pair, closing(measure.samples(pair)) as samples:
        sample = next(samples)

    assert (measure.limit, str(measure.bar)) == ("bare libfabric", "<= +1")
    assert sample.value > 0 and sample.limit is not None and sample.limit > 0


# --- bars ---


def test_bar_of_a_difference_is_met_by_the_median_of_differences() -> None:
    bar = Bar("difference", "<=", 1.0)
    line = Line(name="ping-pong", title="ping-pong", unit="us", limit="bare", bar=bar)

    near = Result(line, [Sample(10.5, 10.0), Sample(20.9, 20.0), Sample(9.0, 1.0)])
    far = Result(line, [Sample(11.5, 10.0), Sample(21.9, 20.0), Sample(1.0, 1.0)])

    assert (near.verdict, far.verdict) == ("ok", "miss")
    assert str(bar) == "<= +1"
    assert Result(line, [Sample(1.0, None)]).verdict == "miss"


# --- how soon a layer leaves ---


def test_spinning_thread_sees_each_value_of_a_word_once_it_is_there() -> None:
    word, seen_ns = np.zeros(1, np.uint64), np.zeros(3, np.int64)
    with ThreadPoolExecutor(1) as beside:
        spinning = beside.submit(_core.bench.spin_on_word, word.view(np.uint8), seen_ns, WAIT_S)
        begun_ns = time.monotonic_ns()
        word[0] = 2
        eventually(lambda: seen_ns[1], "it has seen 2")
        assert begun_ns <= seen_ns[0] <= seen_ns[1] and not seen_ns[2] and not spinning.done()
        later_ns = time.monotonic_ns()
        word[0] = 3
        spinning.result(WAIT_S)
    assert later_ns <= seen_ns[2]


def test_spinning_thread_gives_up_on_a_word_that_does_not_go_up() -> None:
    with pytest.raises(xr.TransportError, match="did not end within"):
        _core.bench.spin_on_word(np.zeros(8, np.uint8), np.zeros(1, np.int64), 0.05)
    with pytest.raises(xr.UsageError, match="8 bytes"):
        _core.bench.spin_on_word(np.zeros(7, np.uint8), np.zeros(1, np.int64), 0.05)


@pytest.mark.no_sanitizer
@pytest.mark.parametrize("name", ["kv-layer", "kv-layer-word"])
def test_layer_stands_beside_a_thread_that_spins(pair: Pair, name: str) -> None:
    with closing(samples_of(pair, name)) as samples:
        sample = next(samples)
    assert sample.value > 0 and sample.limit is not None and sample.limit > 0

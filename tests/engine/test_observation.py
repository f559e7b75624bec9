"""What an engine tells about itself: stats, explanations, events."""

import logging

import pytest

import crossrail as xr
from tests.conftest import EngineFactory
from tests.support.limits import WAIT_S, eventually

STATS = {
    "transfers_submitted",
    "transfers_done",
    "transfers_failed",
    "transfers_cancelled",
    "bytes_written",
    "bytes_read",
    "messages_sent",
    "messages_received",
    "imm_units_received",
    "imm_overflow_units",
    "work_requests_posted",
    "work_requests_retried",
    "worker_rounds",
    "worker_sleeps",
    "peers_connected",
    "peers_lost",
    "regions_open",
    "transfers_inflight",
}


def test_stats_of_a_fresh_engine_are_zero(engine: xr.Engine) -> None:
    stats = engine.stats()

    assert set(stats) >= STATS
    assert {stats[key] for key in STATS - {"worker_rounds", "worker_sleeps"}} == {0}


def test_stats_count_what_happened(engine: xr.Engine, other: xr.Engine) -> None:
    src, dst = engine.alloc(1000), other.alloc(1000)
    pool = other.submit_recvs(1, 16)

    for _ in range(3):
        engine.submit_write(src, dst.descriptor, imm=1).wait(WAIT_S)
    engine.submit_read(src, dst.descriptor, 500).wait(WAIT_S)
    engine.submit_send(other.address, b"abc").wait(WAIT_S)
    pool.recv(WAIT_S)
    pool.close()
    pending = engine.submit_send(other.address, b"nobody receives")
    other.imm_counter(1).wait(3, WAIT_S)

    stats = engine.stats()
    assert stats["transfers_submitted"] == 6
    assert stats["transfers_done"] == 5
    assert stats["transfers_inflight"] == 1
    assert (stats["bytes_written"], stats["bytes_read"]) == (3000, 500)
    assert stats["messages_sent"] == 1
    assert stats["peers_connected"] == 1
    assert stats["regions_open"] == 1
    assert other.stats()["imm_units_received"] == 3 * 48
    assert other.stats()["messages_received"] == 1
    pending.cancel()
    eventually(lambda: engine.stats()["transfers_cancelled"] == 1, "the cancelled one counted")


def test_message_is_counted_before_it_is_there_to_take(engine: xr.Engine, other: xr.Engine) -> None:
    pool = other.submit_recvs(1, 16)
    engine.submit_send(other.address, b"abc")
    eventually(pool.poll, "the message")  # the worker drives, not we

    assert other.stats()["messages_received"] == 1


def test_every_accepted_submit_is_counted_once_when_it_ends(engine: xr.Engine, other: xr.Engine) -> None:
    src, dst = engine.alloc(1000), other.alloc(1000)
    transfers = [engine.submit_write(src, dst.descriptor) for _ in range(100)]
    transfers += [engine.submit_send(other.address, b"x") for _ in range(10)]
    for transfer in transfers[100:105]:
        transfer.cancel()
    eventually(lambda: all(t.done for t in transfers[:105]), "the writes done")
    other.close()
    eventually(lambda: all(t.done for t in transfers), "the messages lost")

    stats = engine.stats()

    assert (stats["transfers_submitted"], stats["transfers_inflight"]) == (110, 0)
    assert stats["transfers_done"] + stats["transfers_cancelled"] + stats["transfers_failed"] == 110
    assert (stats["transfers_cancelled"], stats["transfers_failed"]) == (5, 5)


def test_explanation_of_an_unknown_peer(engine: xr.Engine, other: xr.Engine) -> None:
    explanation = engine.explain(other.address)

    assert explanation.state == "unknown"
    assert other.name in explanation.peer if isinstance(explanation.peer, str) else explanation.peer == other.address


def test_explanation_adds_up_the_bytes(open_engine: EngineFactory) -> None:
    a, b = open_engine("a", rails=2, transport="shm"), open_engine("b", rails=3, transport="shm")
    src, dst = a.alloc(1_000_000), b.alloc(1_000_000)

    for _ in range(4):
        a.submit_write(src, dst.descriptor).wait(WAIT_S)

    explanation = a.explain(b.address)
    assert sum(path.bytes for path in explanation.paths) == 4_000_000
    assert (explanation.transport, explanation.reason) == ("shm", explanation.reason)
    assert (explanation.endpoints, explanation.gb_per_s_expected) == ((), 0)
    assert len(explanation.rails) == 2
    for word in ("b", "shm: same host", "connected", "local"):
        assert word in str(explanation)


def test_explanations_that_say_the_same_are_one_in_a_set(open_engine: EngineFactory) -> None:
    a, b = open_engine("a", rails=2, transport="shm"), open_engine("b", transport="shm")
    a.connect(b.address, WAIT_S)

    assert len({a.explain(b.address), a.explain(b.address)}) == 1


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_rate_of_a_path_is_told_once_enough_was_moved(open_engine: EngineFactory, transport: str) -> None:
    """One short write tells how long a connection and an answer take."""
    where = {} if transport == "shm" else {"rails": ["127.0.0.1"]}
    a, b = (open_engine(name, transport=transport, **where) for name in "ab")
    src, dst = a.alloc(4 << 20), b.alloc(4 << 20)

    a.submit_write(src, dst.descriptor).wait(WAIT_S)
    (little,) = a.explain(b.address).paths
    for _ in range(3):
        a.submit_write(src, dst.descriptor).wait(WAIT_S)
    (enough,) = a.explain(b.address).paths

    assert (little.bytes, little.gb_per_s) == (4 << 20, 0)
    assert enough.bytes == 16 << 20 and enough.gb_per_s > 0


@pytest.mark.parametrize(
    ("transport", "gb_per_s", "words"),
    [
        ("tcp", 2.5, "; 2.5 GB/s by their interfaces"),
        ("tcp", 0.0, "; speed unknown: not every interface says its own"),
        ("verbs", 0.0, "; speed unknown: not every interface says its own"),
        ("shm", 0.0, "0 -> 0"),
    ],
)
def test_explanation_tells_an_unknown_speed_from_none(transport: str, gb_per_s: float, words: str) -> None:
    explanation = xr.Explanation("there", transport, "so it is", "connected", "", ((0, 0),), (), gb_per_s, ())

    assert str(explanation).splitlines()[-1].endswith(words)


def test_explanation_over_loopback_says_that_its_speed_is_unknown(open_engine: EngineFactory) -> None:
    a, b = (open_engine(name, transport="tcp", rails=["127.0.0.1"]) for name in "ab")
    a.connect(b.address, WAIT_S)

    explanation = a.explain(b.address)

    assert explanation.gb_per_s_expected == 0 and "speed unknown" in str(explanation)


# --- events ---


def test_peer_that_left_is_an_event(engine: xr.Engine, other: xr.Engine) -> None:
    events: list[xr.EngineEvent] = []
    engine.on_event(events.append)
    engine.connect(other.address, WAIT_S)

    other.close()

    eventually(lambda: any(event.kind == "peer-left" for event in events), "the event")
    left = next(event for event in events if event.kind == "peer-left")
    assert left.peer == other.name


def test_events_are_logged_when_nobody_listens(
    engine: xr.Engine, other: xr.Engine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "crossrail")
    engine.connect(other.address, WAIT_S)

    other.close()
    eventually(lambda: engine.peer_state(other.address) == "lost", "the loss")
    engine.close()  # without callbacks of its user's there is no thread to log it at once

    assert any("peer-left" in record.getMessage() for record in caplog.records)
    assert all(record.name.split(".")[0] == "crossrail" for record in caplog.records if "other" in record.getMessage())


def test_events_are_logged_again_once_the_callback_is_withdrawn(
    engine: xr.Engine, open_engine: EngineFactory, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "crossrail")
    told: list[xr.EngineEvent] = []
    engine.on_event(told.append)
    engine.connect(open_engine("first").address, WAIT_S)
    eventually(lambda: told, "the event")

    engine.on_event(None)
    engine.connect(open_engine("second").address, WAIT_S)

    eventually(lambda: "peer-connected of peer 'second'" in caplog.text, "the log of it")
    assert [event.peer for event in told] == ["first"]


def test_peer_that_is_looked_for_again_and_again_is_a_warning_once(
    engine: xr.Engine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "crossrail")
    with xr.Engine("other") as gone, xr.Engine("back") as back:
        for _ in range(3):
            gone.close()
            engine.forget_peer(gone.address)
            with pytest.raises(xr.CrossrailError):
                engine.connect(gone.address, WAIT_S)
        engine.connect(back.address, WAIT_S)
    engine.close()

    levels = [record.levelname for record in caplog.records if "peer-lost of peer 'other'" in record.getMessage()]
    assert levels == ["WARNING", "INFO", "INFO"]


def test_a_name_in_an_event_cannot_steer_who_reads_the_log(
    engine: xr.Engine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    detail = "1 work request waits for peer 'a\x1b[2J\nengine 'x': all is well'"
    monkeypatch.setattr(engine, "_take_events", lambda: [("stalled", "a\x1b[2J", detail)])

    engine.close()

    (said,) = [record.getMessage() for record in caplog.records if "stalled" in record.getMessage()]
    assert "waits for peer" in said
    assert said.isprintable(), ascii(said)


def test_more_immediates_than_kept_is_an_event_not_silence(open_engine: EngineFactory) -> None:
    engine = open_engine(imm_counters_max=16)
    events: list[xr.EngineEvent] = []
    engine.on_event(events.append)
    group = engine.add_peer_group([engine.address])

    for imm in range(40):
        engine.submit_barrier(group, imm).wait(WAIT_S)

    eventually(lambda: any(event.kind == "imm-overflow" for event in events), "the event")
    eventually(lambda: engine.stats()["imm_overflow_units"] == 24 * 48, "all that was dropped counted")


def test_event_callback_that_raises_is_logged(
    engine: xr.Engine, other: xr.Engine, caplog: pytest.LogCaptureFixture
) -> None:
    def on_event(event: xr.EngineEvent) -> None:
        raise RuntimeError("event callback gone wrong")

    engine.on_event(on_event)
    engine.connect(other.address, WAIT_S)
    other.close()

    eventually(lambda: "event callback gone wrong" in caplog.text, "the log of it")
    region = engine.alloc(10)
    engine.submit_write(region, region.descriptor, 0, imm=1).wait(WAIT_S)


def test_region_has_one_name_in_explanations_and_errors(engine: xr.Engine, other: xr.Engine) -> None:
    source, target = engine.alloc(100), other.alloc(100)
    descriptor = target.descriptor
    engine.submit_write(source, descriptor).wait(WAIT_S)
    target.close()

    with pytest.raises(xr.RemoteRegionClosed) as caught:
        engine.submit_write(source, descriptor).wait(WAIT_S)

    assert f"its region {caught.value.region}," in str(caught.value)
    (path,) = engine.explain(other.address).paths
    assert path.what.startswith(f"region {caught.value.region} (")

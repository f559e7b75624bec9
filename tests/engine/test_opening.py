"""Opening an engine, with every option, right and wrong."""

import os

import pytest

import crossrail as xr
from tests.conftest import EngineFactory
from tests.support.limits import WAIT_S


def test_engine_without_a_name_is_called_after_any_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", [os.fsdecode(b"/bin/pr\xe9fill")])

    with xr.Engine() as engine:
        assert engine.name == f"pr?fill-{os.getpid()}"


def test_engine_says_who_it_is(open_engine: EngineFactory) -> None:
    engine = open_engine("worker 7", rails=3)

    assert engine.name == "worker 7"
    assert engine.rails == 3
    assert engine.closed is False
    assert engine.address.name == "worker 7"
    assert (engine.address.rails, engine.address.transports, engine.address.pid) == (3, ("shm", "tcp"), os.getpid())
    assert repr(engine) == "<Engine 'worker 7', 3 rails>"
    assert repr(open_engine("one")) == "<Engine 'one', 1 rail>"


def test_unnamed_engine_is_named_for_its_process(open_engine: EngineFactory) -> None:
    with xr.Engine() as engine:
        assert engine.name.endswith(f"-{os.getpid()}")


@pytest.mark.parametrize("name", ["a", "x" * 64, "ünï©ode", 'with space and "quotes"'])
def test_any_name_of_64_bytes_works(name: str) -> None:
    with xr.Engine(name) as engine:
        assert xr.Address.from_bytes(engine.address.to_bytes()).name == name


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("name", ""),
        ("name", "x" * 65),
        ("name", "ü" * 33),
        ("rails", 0),
        ("rails", -1),
        ("rails", 17),
        ("rails", 2**40),
        ("rails", []),
        ("rails", [""]),
        ("rails", ["203.0.113.7"]),  # no address of this host
        ("rails", ["127.0.0.1"] * 17),
        ("rails", [1, 2]),
        ("rails", "eth0"),
        ("transport", "carrier-pigeon"),
        ("transport", ""),
        ("port", -1),
        ("port", 65_536),
        ("secret", 5),
        ("secret", "x" * 1025),
        ("peer_timeout_s", 0.0),
        ("peer_timeout_s", -1.0),
        ("polling", "sometimes"),
        ("private_path", "magic"),
        ("spin_us", -1.0),
        ("spin_us", float("nan")),
        ("worker_cpu", 100_000),
        ("worker_cpu", -5),
        ("worker_cpu", 1023),  # no core of this machine
        ("worker_cpu", True),
        ("heartbeat_s", 0),  # None means none
        ("heartbeat_s", -1.0),
        ("submit_queue_depth", 0),
        ("submit_queue_depth", 15),
        ("submit_queue_depth", 100),
        ("submit_queue_depth", 2**20),
        ("imm_counters_max", 0),
        ("message_bytes_max", 0),
        ("message_bytes_max", 2**20),
        ("watcher_poll_us", -1.0),
        ("connect_timeout_s", 0.0),
        ("connect_timeout_s", float("nan")),
    ],
)
def test_wrong_option_is_refused_by_name(option: str, value: object) -> None:
    with pytest.raises(xr.UsageError, match=option):
        xr.Engine(**({"name": "here"} | {option: value}))


@pytest.mark.parametrize(
    ("option", "value", "bound"),
    [
        ("submit_queue_depth", -1, r"16\.\.65536"),
        ("submit_queue_depth", 2**40, r"16\.\.65536"),
        ("imm_counters_max", -1, r"1\.\.16777216"),
        ("message_bytes_max", 2**33, r"1\.\.262144"),
        ("recorder_entries", -1, r"0\.\.1048576"),
    ],
)
def test_number_out_of_range_is_told_the_options_own_bound(option: str, value: object, bound: str) -> None:
    with pytest.raises(xr.UsageError, match=f"{option} is {value}, must be {bound}"):
        xr.Engine(**({"name": "here"} | {option: value}))


def test_core_that_this_process_may_not_use_is_refused_with_those_it_may() -> None:
    unusable = max(os.sched_getaffinity(0)) + 1000
    with pytest.raises(xr.UsageError, match=rf"worker_cpu is {unusable}, must be a core .* may use: [\d,-]+$"):
        xr.Engine("here", worker_cpu=unusable)


def test_worker_may_be_pinned_to_a_core_to_which_its_owner_is_not(open_engine: EngineFactory) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cpus[:1])
    try:
        engine = open_engine(worker_cpu=cpus[-1])
        assert os.sched_getaffinity(0) == {cpus[0]}
    finally:
        os.sched_setaffinity(0, cpus)
    events: list[xr.EngineEvent] = []
    engine.on_event(events.append)
    engine.connect(engine.address, WAIT_S)
    assert "protocol-error" not in {event.kind for event in events}


def test_unknown_option_is_refused() -> None:
    with pytest.raises(TypeError):
        xr.Engine("here", rials=4)


def test_worker_can_be_pinned(open_engine: EngineFactory) -> None:
    cpu = max(os.sched_getaffinity(0))
    engine = open_engine(worker_cpu=cpu)
    src, dst = engine.alloc(10), engine.alloc(10)

    engine.submit_write(src, dst.descriptor, imm=1).wait(WAIT_S)

    engine.imm_counter(1).wait(1, WAIT_S)


def test_many_engines_live_together(open_engine: EngineFactory) -> None:
    engines = [open_engine(f"engine-{i}", rails=1 + i % 4) for i in range(12)]
    group = engines[0].add_peer_group([engine.address for engine in engines])

    engines[0].submit_barrier(group, 1).wait(WAIT_S)

    for engine in engines:
        engine.imm_counter(1).wait(1, WAIT_S)

"""What an engine's owner may insist on: clauses about its paths."""

import pytest

import crossrail as xr
from crossrail import _core, policy
from crossrail.topology.addresses import interface_addresses
from tests.conftest import EngineFactory
from tests.support import sealing
from tests.support.limits import WAIT_S
from tests.support.machines import machine, nic, pretend
from tests.support.process import assert_clean, run_script


def ip_of(engine: xr.Engine) -> str:
    return engine.address.endpoints[0].rpartition(":")[0].strip("[]")


# --- clauses ---


def found(*transports: str, rails: int = 1, speed: float | None = None, gpudirect: bool = False) -> policy.Found:
    no_gpudirect = "" if gpudirect else "no NIC is given GPUs' memory"
    return policy.Found("the thing", transports, "so it is", rails, "so many", speed, "of eth0", no_gpudirect)


@pytest.mark.parametrize(
    ("clause", "good", "bad"),
    [
        ("shm", found("shm", "tcp"), found("tcp")),
        ("tcp", found("shm", "tcp"), found("shm")),
        ("verbs", found("verbs"), found("ofi")),
        ("ofi", found("ofi"), found("verbs")),
        ("rdma", found("verbs"), found("tcp")),
        ("rdma", found("tcp", "ofi"), found()),
        ("gpudirect", found("ofi", gpudirect=True), found("ofi")),
        ("rails>=4", found(rails=4), found(rails=3)),
        ("rails > 4", found(rails=5), found(rails=4)),
        ("rails=4", found(rails=4), found(rails=5)),
        ("speed>=400", found(speed=400.0), found(speed=399.5)),
        ("speed >= 0.5", found(speed=1.0), found(speed=None)),
    ],
)
def test_clause_is_met_or_named(clause: str, good: policy.Found, bad: policy.Found) -> None:
    (parsed,) = policy.parse(f"  {clause} ")

    policy.check([parsed], good)

    with pytest.raises(xr.TransportError) as failure:
        policy.check([parsed], bad)
    assert failure.value.call == "require"
    assert failure.value.text.startswith(f"{clause}: the thing ")
    assert failure.value.remedy


@pytest.mark.parametrize(
    "clause",
    ["", "carrier-pigeon", "SHM", "rails", "rails>=0", "rails>=-1", "rails>=2.5", "rails==2", "rails<2", "rails>=x",
     "rails>=٣", "speed", "speed>5", "speed=5", "speed>=0", "speed>=fast", "speed>=nan", "shm=1", "shm tcp"],
)  # fmt: skip
def test_malformed_clause_is_named_with_the_vocabulary(clause: str) -> None:
    with pytest.raises(xr.UsageError) as failure:
        xr.Engine("here", require=f"shm, {clause}")

    assert f"clause {clause!r}" in str(failure.value)
    assert policy.VOCABULARY in str(failure.value)


def test_policy_that_is_no_text_is_refused(engine: xr.Engine) -> None:
    with pytest.raises(xr.UsageError, match="require must be text or None, not int"):
        xr.Engine("here", require=4)
    with pytest.raises(xr.UsageError, match="require must be text"):
        engine.require(engine.address, None)


# --- at opening ---


@pytest.mark.parametrize(
    ("options", "require"),
    [
        ({}, "shm, tcp, rails=1"),
        ({"transport": "shm", "rails": 4}, "shm, rails>=4, rails>3"),
        ({"transport": "tcp", "rails": 2}, "tcp,rails>=1"),
    ],
)
def test_engine_that_meets_its_policy_opens(
    open_engine: EngineFactory, options: dict[str, object], require: str
) -> None:
    engine = open_engine(require=require, **options)

    assert not engine.closed


@pytest.mark.parametrize(
    ("transport", "require", "message"),
    [
        (
            "tcp",
            "shm",
            r"shm: engine 'here' has tcp \(opened with transport='tcp'\).*Next: .*transport='shm' or 'auto'",
        ),
        ("shm", "tcp", r"tcp: engine 'here' has shm .*Next: .*transport='tcp' or 'auto'"),
        ("auto", "verbs", r"verbs: engine 'here' has shm, tcp .*; verbs: no device here.*crossrail doctor"),
        ("auto", "ofi", r"ofi: .*; ofi: no device here.*crossrail doctor"),
        ("auto", "rdma", r"rdma: .*; ofi: no device here; verbs: no device here.*crossrail doctor"),
        ("auto", "gpudirect", r"gpudirect: .* has none: .* give no NIC a GPU's memory.*crossrail doctor"),
        ("shm", "shm, rails>=4", r"require: rails>=4: engine 'here' has 1 rail.*as many as it was.*Next: .*rails=4"),
        ("shm", "rails>1", r"rails>1: .*Next: .*rails=2"),
        ("shm", "rails=3", r"rails=3: .*Next: .*rails=3"),
        ("shm", "speed>=1", r"speed>=1: .*unknown speed \(none of its rails is on an interface\).*crossrail topo"),
    ],
)
def test_unmet_clause_says_what_was_found_why_and_what_next(
    monkeypatch: pytest.MonkeyPatch, transport: str, require: str, message: str
) -> None:
    monkeypatch.setattr(_core, "_rdma_missing", lambda transport: "no device here")
    with pytest.raises(xr.TransportError, match=message):
        xr.Engine("here", transport=transport, require=require)


def on_devices(monkeypatch: pytest.MonkeyPatch, **devices: tuple[str, ...]) -> None:
    """Engines have their rails on these from here on."""
    monkeypatch.setattr(xr.Engine, "_rail_devices", property(lambda engine: devices))


def test_rails_on_one_interface_count_once(open_engine: EngineFactory, caplog: pytest.LogCaptureFixture) -> None:
    """As many as were asked for are there, and no more of them than before would do what the clause is for."""
    caplog.set_level("INFO", "crossrail")
    options = {"transport": "tcp", "rails": ["127.0.0.1", "127.0.0.2", "127.0.0.3"]}

    open_engine(require="rails=1", **options)

    with pytest.raises(xr.TransportError, match=r"has 1 rail\(s\), as several .* once: 3 on lo.* crossrail topo"):
        xr.Engine("here", require="rails>=3", **options)
    told = [record for record in caplog.records if "share an interface" in record.getMessage()]
    assert [(record.levelname, record.getMessage()[-10:]) for record in told] == [("INFO", "lo, lo, lo")]


def test_more_rails_than_interfaces_are_no_more_interfaces(open_engine: EngineFactory) -> None:
    engine = open_engine(transport="tcp", rails=16)  # more than this machine has, most likely

    (devices,) = engine._rail_devices.values()
    count = len(set(devices))

    assert engine.rails == len(devices) == 16
    open_engine("other", transport="tcp", rails=16, require=f"rails={count}")


def test_rails_of_an_engine_are_those_of_the_transport_with_most_interfaces(
    open_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_devices(monkeypatch, tcp=("eth0", "eth0", "eth1"), verbs=("mlx5_0:1", "mlx5_1:1", "mlx5_2:1"))
    engine = open_engine()

    seen = policy.of_engine(engine, "auto", policy.parse("rails>=3"))

    assert (seen.rails, seen.rails_reason) == (3, "as many as it was opened with")


def test_all_unmet_clauses_are_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_core, "_rdma_missing", lambda transport: "no device here")
    with pytest.raises(xr.TransportError, match=r"verbs: .*; rails>=2: .*Next: see crossrail doctor; open the engine"):
        xr.Engine("here", require="verbs, shm, rails>=2")


def test_unmet_clause_closes_the_engine_again(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    look = policy.of_engine
    monkeypatch.setattr(policy, "of_engine", lambda engine, *rest: opened.append(engine) or look(engine, *rest))

    with pytest.raises(xr.TransportError):
        xr.Engine("here", require="rdma")

    assert [engine.closed for engine in opened] == [True]


def test_speed_of_an_engine_counts_each_interface_once(
    open_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = open_engine(transport="tcp")
    pretend(monkeypatch, machine(nic("eth1", ip=ip_of(probe), speed=100.0)))

    open_engine(transport="tcp", rails=3, require="speed>=100")

    with pytest.raises(xr.TransportError, match=r"speed>=101: engine 'here' has 100 Gb/s \(by eth1\)"):
        xr.Engine("here", transport="tcp", rails=3, require="speed>=101")


def test_speed_is_the_sum_of_what_is_known_and_the_rest_is_named() -> None:
    topology = machine(
        nic("eth1", ip="192.0.2.1"), nic("eth2", ip="2001:db8::2", speed=25.0), nic("eth3", ip="192.0.2.3", speed=None)
    )

    summed = policy.speed_of(["192.0.2.1:5", "192.0.2.1:6", "[2001:db8::2]:5", "192.0.2.3:5", "192.0.2.4:5"], topology)

    assert summed == (125.0, "by eth1, eth2; speed of eth3, 192.0.2.4 not known")
    assert policy.speed_of(["192.0.2.3:5"], topology) == (None, "speed of eth3 not known")


def test_addresses_of_this_machine_are_found(open_engine: EngineFactory) -> None:
    ips = [ip for found in interface_addresses().values() for ip in found]

    assert "127.0.0.1" in interface_addresses()["lo"]
    assert ip_of(open_engine(transport="tcp")) in ips


def test_speed_of_an_engine_is_that_of_its_fastest_network(engine: xr.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    class Made:
        name = "here"
        rails = 2
        _rail_devices = {"verbs": ("mlx5_0:1", "mlx5_1:1")}
        address = xr.Address.from_bytes(
            sealing.make_address(transports=sealing.VERBS, rdma={sealing.VERBS: sealing.make_rdma((b"x", b"y"))})
        )

    pretend(monkeypatch, machine())
    seen = policy.of_engine(Made, "verbs", policy.parse("speed>=200"))  # type: ignore[arg-type]

    assert (seen.gbit_per_s, seen.speed_reason) == (200.0, "by 2 port(s) of verbs")


# --- the path to a peer ---


def connected(open_engine: EngineFactory, rails: int = 2, peer_rails: int = 2, **options: object) -> list[xr.Engine]:
    pair = [open_engine("here", rails=rails, **options), open_engine("there", rails=peer_rails, **options)]
    pair[0].connect(pair[1].address, WAIT_S)
    return pair


def test_path_that_meets_its_policy_passes(open_engine: EngineFactory) -> None:
    here, there = connected(open_engine, transport="tcp")
    near, far = connected(open_engine)

    here.require(there.address, "tcp, rails>=1")
    near.require(bytes(far.address), "shm, rails=1")


@pytest.mark.parametrize(
    ("clause", "message"),
    [
        ("shm", r"shm: the path from engine 'here' to peer 'there' goes over tcp \(requested.*Next: .*'shm'; .*expl"),
        ("rdma", r"rdma: .*goes over tcp .*; ofi: .*; verbs: .*crossrail doctor"),
        ("gpudirect", r"gpudirect: .* has none: tcp gives no NIC a GPU's memory.*crossrail doctor"),
        ("rails>=2", r"rails>=2: .*has 1 rail.*over tcp, 2 of ours to 1 of the peer's.*Next: open both.*rails=2"),
    ],
)  # fmt: skip
def test_unmet_clause_of_a_path_says_why(open_engine: EngineFactory, clause: str, message: str) -> None:
    here, there = connected(open_engine, peer_rails=1, transport="tcp")

    with pytest.raises(xr.TransportError, match=message):
        here.require(there.address, clause)

    assert not here.closed


@pytest.mark.parametrize(
    ("ours", "peers", "count", "shared"),
    [
        (("eth0", "eth1"), ["127.0.0.1", "127.0.0.2"], 2, ""),
        (("eth0", "eth0"), ["127.0.0.1", "127.0.0.2"], 1, "2 on eth0"),
        (("eth0", "eth1"), ["127.0.0.1", "127.0.0.1"], 1, "2 on 127.0.0.1"),
    ],
)
def test_rails_of_a_path_count_once_for_each_interface_of_either_side(
    open_engine: EngineFactory,
    monkeypatch: pytest.MonkeyPatch,
    ours: tuple[str, ...],
    peers: list[str],
    count: int,
    shared: str,
) -> None:
    here = open_engine("here", transport="tcp", rails=["127.0.0.1", "127.0.0.2"])
    there = open_engine("there", transport="tcp", rails=peers)
    here.connect(there.address, WAIT_S)
    on_devices(monkeypatch, tcp=ours)

    here.require(there.address, f"rails={count}")

    with pytest.raises(xr.TransportError, match=f"has {count} rail.*, 2 of ours to 2 of the peer's.*{shared}"):
        here.require(there.address, "rails>=3")


def test_engine_with_tcp_is_no_path_over_tcp(open_engine: EngineFactory) -> None:
    here, there = connected(open_engine, require="tcp")

    with pytest.raises(xr.TransportError, match=r"tcp: .*goes over shm \(same host: shared memory\)"):
        here.require(there.address, "tcp")
    with pytest.raises(xr.TransportError, match=r"speed>=1: .*over shm, whose rails have no interface"):
        here.require(there.address, "speed>=1")


def explained(gb_per_s: float) -> xr.Explanation:
    ends = (("192.0.2.1:1", "192.0.2.9:1"), ("192.0.2.2:1", "192.0.2.9:2"))
    return xr.Explanation("there", "tcp", "far", "connected", "", ((0, 0), (1, 1)), ends, gb_per_s, ())


@pytest.mark.parametrize(("gb_per_s", "gbit_per_s"), [(25.0, 200.0), (5.0, 40.0), (0.0, None)])
def test_speed_of_a_path_is_that_of_the_slower_ends(
    engine: xr.Engine, gb_per_s: float, gbit_per_s: float | None
) -> None:
    seen = policy.of_path(engine, explained(gb_per_s), policy.parse("speed>=200"))

    assert seen.gbit_per_s == gbit_per_s
    assert bool(policy.unmet(policy.parse("speed>=200"), seen)) == (gbit_per_s != 200.0)


def test_peer_that_is_not_connected_is_refused(open_engine: EngineFactory) -> None:
    here, there = open_engine("here"), open_engine("there")

    with pytest.raises(xr.UsageError, match=r"peer 'there' is unknown, must be connected.*connect\(\) first"):
        here.require(there.address, "shm")


def test_lost_peer_meets_nothing(engine: xr.Engine) -> None:
    lost = xr.Explanation("there", "shm", "near", "lost", "it died", ((0, 0),), (), 0.0, ())
    clauses = policy.parse("shm, rails=1")

    with pytest.raises(xr.TransportError, match=r"shm, rails=1: peer 'there' is lost \(it died\).*Next: .*new address"):
        policy.check(clauses, policy.of_path(engine, lost, clauses))


def test_closed_engine_answers_no_require(open_engine: EngineFactory) -> None:
    here, there = connected(open_engine)
    here.close()

    with pytest.raises(xr.EngineClosed):
        here.require(there.address, "shm")


def test_import_and_a_plain_engine_load_neither_policy_nor_topology() -> None:
    script = run_script(
        """
        import sys, crossrail
        crossrail.Engine("here").close()
        print(*[name for name in sys.modules if name.startswith(("crossrail.policy", "crossrail.topology"))])
        """
    )

    assert_clean(script)
    assert script.stdout.split() == []

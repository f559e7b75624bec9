"""Which NICs an engine takes by itself, and where its worker runs."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

import crossrail as xr
from crossrail import default_rails as chooser
from crossrail._devices import gpu_at
from crossrail.default_rails import auto_worker_cpu, default_rails
from crossrail.topology import Topology, addresses
from tests.conftest import EngineFactory
from tests.support.fake_gpu import FakeGpu
from tests.support.limits import WAIT_S, eventually
from tests.support.machines import machine, nic, pretend, rdma_nic
from tests.support.threads import tasks_named
from tests.topology import trees

# --- rails ---


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Three ports that could be rails, one of them slower, one that is down, one that is software."""
    (tmp_path / "mlx5_0" / "device").mkdir(parents=True)
    monkeypatch.setattr(chooser, "RDMA_DEVICES", tmp_path)
    nics = [rdma_nic("mlx5_0", speed=200.0), rdma_nic("mlx5_1"), rdma_nic("mlx5_2")]
    pretend(
        monkeypatch,
        machine(
            nic("eth0", ip="192.0.2.1"), *nics, rdma_nic("mlx5_3", state="DOWN"), rdma_nic("rxe0", kind="soft-rdma")
        ),
    )


@pytest.mark.parametrize(
    ("transport", "rails", "chosen"),
    [
        ("verbs", 1, ["mlx5_1:1"]),
        ("verbs", 2, ["mlx5_1:1", "mlx5_2:1"]),
        ("auto", 2, ["mlx5_1:1", "mlx5_2:1"]),
        ("verbs", 4, 4),  # not so many: the engine's transport takes ports again
        ("ofi", 1, 1),  # no EFA here
        ("ofi:tcp", 1, 1),
        ("tcp", 2, 2),
        ("shm", 2, 2),
        ("shm+verbs", 1, ["mlx5_1:1"]),
        ("tcp+verbs", 1, 1),
        ("verbs", ["mlx5_0"], ["mlx5_0"]),
        ("verbs", 0, 0),
        ("verbs", "mlx5_0", "mlx5_0"),
    ],
)
def test_number_of_rails_becomes_the_best_ports(
    server: None, transport: str, rails: int | list[str], chosen: int | list[str]
) -> None:
    assert default_rails(transport, rails) == chosen


@pytest.mark.parametrize("transport", ["ofi", "ofi:efa", "auto"])
def test_rails_of_ofi_are_efa_devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, transport: str) -> None:
    (tmp_path / "rdmap0s0" / "device").mkdir(parents=True)
    monkeypatch.setattr(chooser, "RDMA_DEVICES", tmp_path)
    pretend(monkeypatch, machine(rdma_nic("rdmap0s0", kind="efa"), rdma_nic("rdmap0s1", kind="efa")))

    assert default_rails(transport, 2) == ["rdmap0s0", "rdmap0s1"]


def test_each_gpus_engine_takes_the_nics_nearest_to_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gpu: FakeGpu, caplog: pytest.LogCaptureFixture
) -> None:
    """On a node of eight GPUs eight processes, all of which say rails=1, would else share one NIC."""
    trees.p5(trees.Machine(tmp_path))
    topology = Topology.read(tmp_path / "sys", proc=tmp_path / "proc")
    monkeypatch.setattr(chooser, "RDMA_DEVICES", tmp_path / "sys/class/infiniband")
    monkeypatch.setattr(addresses, "read_this_machine", lambda: topology)

    assert default_rails("auto", 1, None) == default_rails("auto", 1, "cpu") == ["rdmap79s0"]
    assert default_rails("auto", 1, "cuda:0") == ["rdmap79s0"]
    assert default_rails("auto", 1, "cuda:1") == default_rails("ofi", 1, "cuda:1") == ["rdmap96s0"]
    assert default_rails("auto", 4, "cuda:1") == [f"rdmap{bus}s0" for bus in (96, 97, 98, 99)]
    assert default_rails("auto", 1, gpu_at(gpu.allocate(8, ordinal=1).address)) == ["rdmap96s0"]
    assert default_rails("tcp", 1, "cuda:1") == 1
    with caplog.at_level("INFO", logger="crossrail"):
        assert default_rails("auto", 8, "cuda:1") == [f"rdmap{bus}s0" for bus in (96, 97, 98, 99)]
        assert "device='cuda:1': 4 rails, not 8" in caplog.text
        assert default_rails("auto", 1, "cuda:7") == ["rdmap79s0"]
        assert "cuda:7 is none that CUDA knows the place of" in caplog.text


def test_gpu_that_the_topology_does_not_show_gets_rails_as_the_host(
    server: None, gpu: FakeGpu, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="crossrail"):
        assert default_rails("verbs", 2, "cuda:1") == ["mlx5_1:1", "mlx5_2:1"]

    assert "cuda:1 is at 0000:64:00.0, which /sys does not show: its rails are chosen as for host memory" in caplog.text


def test_wrong_device_is_refused() -> None:
    with pytest.raises(xr.UsageError, match="device is 'gpu3', must be a GPU, as 'cuda:0'"):
        xr.Engine("here", device="gpu3")


def test_machine_without_rdma_is_not_looked_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "soft" / "rxe0").mkdir(parents=True)
    (tmp_path / "none").mkdir()
    for folder in (tmp_path / "soft", tmp_path / "none", tmp_path / "missing"):
        monkeypatch.setattr(chooser, "RDMA_DEVICES", folder)
        monkeypatch.setattr(addresses, "read_this_machine", lambda: pytest.fail("read"))
        assert default_rails("auto", 3) == 3


# --- where the worker runs ---


@pytest.mark.parametrize(
    ("rails", "affinity", "cpu"),
    [
        (["eth1"], range(4), 2),
        (["eth1"], [0, 3], 3),
        (["192.0.2.1"], range(4), 2),
        (["eth0"], range(4), 0),
        (["eth1"], [0, 1], None),  # none of its cores is ours
        (["eth2"], range(4), None),  # its node is unknown
        (["eth9"], range(4), None),
        (["eth0", "eth1"], range(4), 0),
    ],
)
def test_auto_takes_the_first_core_near_the_rails(
    monkeypatch: pytest.MonkeyPatch, rails: list[str], affinity: Sequence[int], cpu: int | None
) -> None:
    nics = nic("eth0", ip="192.0.2.0", numa=0), nic("eth1", ip="192.0.2.1", numa=1), nic("eth2", ip="192.0.2.2")
    pretend(monkeypatch, machine(*nics), affinity)

    assert auto_worker_cpu("tcp", rails) == cpu


def test_auto_takes_the_rails_that_would_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    nics = nic("eth0", ip="192.0.2.0", numa=0, speed=1.0), nic("eth1", ip="192.0.2.1", numa=1)
    pretend(monkeypatch, machine(*nics))

    assert auto_worker_cpu("auto", 1) == 2


@pytest.mark.parametrize("transport", ["shm", "null"])
def test_auto_without_a_nic_leaves_the_worker_alone_and_logs_it(
    caplog: pytest.LogCaptureFixture, transport: str
) -> None:
    with caplog.at_level("INFO", logger="crossrail"):
        assert auto_worker_cpu(transport, 1) is None

    assert f"transport '{transport}' uses no NIC; the worker is not pinned" in caplog.text


def test_auto_without_known_nodes_leaves_the_worker_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, machine(nic("eth0", ip="192.0.2.0"), nodes=()))
    assert auto_worker_cpu("tcp", 1) is None

    pretend(monkeypatch, machine())
    assert auto_worker_cpu("tcp", 1) is None


def test_auto_of_ports_is_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, machine(rdma_nic("mlx5_0", numa=0), rdma_nic("mlx5_1", numa=1)))

    assert auto_worker_cpu("verbs", ["mlx5_1:1"]) == 2
    assert auto_worker_cpu("verbs", ["mlx5_0"]) == 0


def test_auto_pins_the_worker_of_this_machine(open_engine: EngineFactory) -> None:
    cpu = auto_worker_cpu("auto", 1)

    engine = open_engine(worker_cpu="auto")
    src, dst = engine.alloc(10), engine.alloc(10)
    engine.submit_write(src, dst.descriptor, imm=1).wait(WAIT_S)

    allowed = os.sched_getaffinity(0)
    assert cpu is None or cpu in allowed
    wanted = [allowed if cpu is None else {cpu}]

    def affinities() -> list[set[int]]:
        return [os.sched_getaffinity(task) for task in tasks_named("crossrail-work")]

    eventually(lambda: affinities() == wanted, "the worker has begun, and is where it should be")


@pytest.mark.parametrize("rails", [1.5, "eth0", [1], [[]], 0, -3])
def test_auto_leaves_wrong_rails_to_the_engine(rails: object) -> None:
    with pytest.raises(xr.UsageError, match="rails"):
        xr.Engine("here", transport="tcp", rails=rails, worker_cpu="auto")


def test_other_words_for_a_core_are_refused() -> None:
    with pytest.raises(xr.UsageError, match="worker_cpu is 'fast', must be the number of a core, 'auto' or None"):
        xr.Engine("here", worker_cpu="fast")


def test_port_too_high_for_all_rails_of_an_address_is_refused() -> None:
    """Each takes the next one. It is none if that is above 65535, not 0, which is any."""
    with pytest.raises(xr.UsageError, match=r"port = 65535 .* 65536"):
        xr.Engine("here", transport="tcp", rails=["127.0.0.1"] * 2, port=65535)

"""Every check on made-up machines, healthy and not: cases.txt has a row for each, by the machine that is changed.

The healthy machines are Tree.plain() and Tree.gpu_server(); on them no check may find a warning or an error.
"""

import json
import os
import resource
from pathlib import Path

import pytest

from crossrail.doctor.finding import Severity
from crossrail.doctor.host import Host
from crossrail.doctor.probes import Library, Selftest, TransportTest
from crossrail.doctor.report import finding_to_json, run_checks
from crossrail.doctor.topics import TOPICS
from tests.doctor.cases import Case, read_cases
from tests.doctor.tree import FakeHost, Tree, severities, the

OK, NOTE, WARNING, ERROR = Severity.OK, Severity.NOTE, Severity.WARNING, Severity.ERROR
MEMLOCK = resource.RLIMIT_MEMLOCK
CASES = read_cases()
PLAIN = CASES["a plain server"]
GPU_SERVER = CASES["a server with two ConnectX cards and two GPUs"]
EFA = CASES["an instance with EFA"]


def opened(host: FakeHost, name: str, **fields: object) -> None:
    host.libraries[name] = Library(name, path=f"/usr/lib/{name}.1.2", **fields)  # type: ignore[arg-type]


def equip(host: FakeHost, *devices: str) -> None:
    """All libraries of a server with RDMA and GPUs."""
    opened(host, "libibverbs.so.1", devices=devices)
    opened(host, "libmlx5.so.1")
    opened(host, "libefa.so.1")
    opened(host, "libcuda.so.1", version=(12, 8))
    opened(host, "libcudart.so")
    opened(host, "libgdrapi.so.2", version=(2, 5))
    opened(host, "libfabric.so.1", version=(2, 5))
    opened(host, "libssl.so.3", version=(3, 0, 15))


def over(cases: list[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=[case.name for case in cases])


# --- healthy machines ---


def test_plain_server_is_healthy(tree: Tree, host: FakeHost) -> None:
    report = run_checks(host)

    assert report.count(ERROR) == report.count(WARNING) == 0, report.findings
    notes = {finding.check for finding in report.findings if finding.severity is NOTE}
    missing = {"libraries.libibverbs", "libraries.libfabric", "libraries.libssl"}
    assert notes == missing | {"rdma.devices", "environment.secret"}


def test_gpu_server_is_healthy(root: Path) -> None:
    Tree(root).gpu_server()
    host = FakeHost(root)
    equip(host, "mlx5_0", "mlx5_1")
    host.selftest = Selftest(
        version="1.0",
        installed_version="1.0",
        transports=[TransportTest(name, "ok", "", 10.0) for name in ("shm", "tcp", "verbs")],
    )

    report = run_checks(host)

    bad = [finding for finding in report.findings if finding.severity in (ERROR, WARNING)]
    assert bad == []


def test_every_check_that_is_not_ok_says_what_was_seen(tree: Tree, host: FakeHost) -> None:
    for finding in run_checks(host).findings:
        if finding.severity is not OK:
            assert finding.seen, finding


# --- with one thing changed ---


@over(PLAIN)
def test_plain_server(tree: Tree, host: FakeHost, case: Case) -> None:
    case.apply(tree, host)

    found = severities(run_checks(host, [case.topic]).findings)

    assert found.pop(case.check, None) is case.severity
    assert {check: s for check, s in found.items() if s in (WARNING, ERROR)} == {}, "nothing else is wrong"


@over(GPU_SERVER)
def test_gpu_server(root: Path, case: Case) -> None:
    tree, host = Tree(root).gpu_server(), FakeHost(root)
    equip(host, "mlx5_0", "mlx5_1")
    case.apply(tree, host)

    found = severities(run_checks(host, [case.topic]).findings)

    assert found.pop(case.check, None) is case.severity
    assert {check: s for check, s in found.items() if s in (WARNING, ERROR)} == {}, "nothing else is wrong"


@over(EFA)
def test_efa_instance(root: Path, case: Case) -> None:
    tree, host = Tree(root).plain(), FakeHost(root)
    tree.efa(0)
    equip(host, "efa_0")
    case.apply(tree, host)

    found = severities(run_checks(host, [case.topic]).findings)

    assert found.get(case.check) is case.severity


def test_tables_cover_every_topic() -> None:
    assert {case.topic for case in PLAIN} == set(TOPICS)


def test_no_two_rows_have_one_name() -> None:
    for cases in CASES.values():
        assert len({(case.name, case.check) for case in cases}) == len(cases)


# --- what is said, where it matters ---


def test_memlock_names_the_ways_out_of_this_machine(root: Path) -> None:
    tree, host = Tree(root).gpu_server(), FakeHost(root)
    host.limits[MEMLOCK] = (8 << 20, 8 << 20)
    host.user = 1000

    finding = the(run_checks(host, ["limits"]).findings, "limits.memlock")

    commands = " ".join(fix.command for fix in finding.fixes)
    assert "ENOMEM" in finding.cost and "8 MiB" in finding.title
    assert "docker run --ulimit memlock" in commands and "IPC_LOCK" in commands and "sudo tee /etc/security" in commands
    assert "LimitMEMLOCK=infinity" in " ".join(fix.where for fix in finding.fixes)

    tree.write("/proc/1/cgroup", "0::/kubepods.slice/pod1")
    host = FakeHost(root)
    host.limits[MEMLOCK] = (8 << 20, 8 << 20)
    commands = " ".join(fix.command for fix in the(run_checks(host, ["limits"]).findings, "limits.memlock").fixes)
    assert "docker" not in commands and "IPC_LOCK" in commands


def test_load_error_is_shown_in_full(root: Path) -> None:
    Tree(root).gpu_server()
    host = FakeHost(root)
    equip(host, "mlx5_0", "mlx5_1")
    text = "/usr/lib/libibverbs.so.1: version `IBVERBS_1.14' not found (required by x)"
    host.libraries["libibverbs.so.1"] = Library("libibverbs.so.1", text, messages="libibverbs: Warning: no userspace")

    finding = the(run_checks(host, ["libraries"]).findings, "libraries.libibverbs")

    assert text in finding.seen and "no userspace" in finding.seen


def test_fixes_speak_the_distributions_language(tree: Tree, host: FakeHost) -> None:
    assert the(run_checks(host, ["libraries"]).findings, "libraries.libibverbs").fixes[0].command.startswith("apt-get")

    tree.write("/etc/os-release", 'ID="rocky"\nID_LIKE="rhel centos fedora"')
    host = FakeHost(host.root)
    host.user = 1000
    fix = the(run_checks(host, ["libraries"]).findings, "libraries.libibverbs").fixes[0]
    assert fix.command == "sudo dnf install libibverbs"


def test_virtual_functions_are_no_ports_of_their_own(tree: Tree, host: FakeHost) -> None:
    tree.connectx(0)
    for number in range(1, 9):
        guest = number <= 4
        tree.virtual_function(
            number, "0000:01:00.0", netdev="" if guest else f"vf{number}", state="1: DOWN" if guest else "4: ACTIVE"
        )

    findings = run_checks(host, ["rdma", "network"]).findings

    assert the(findings, "rdma.ports").title == "1 of 1 ports active"
    assert the(findings, "rdma.rates").title == "mlx5: 1 x 400 Gb/s = 50 GB/s"
    assert "mlx5_5 (virtual function: shares the port of mlx5_0" in the(findings, "rdma.rates").seen
    assert {check for check, severity in severities(findings).items() if severity in (WARNING, ERROR)} == set()


def test_one_virtual_function_that_works_stands_for_a_port_out_of_sight(tree: Tree, host: FakeHost) -> None:
    tree.pci("0000:01:00.0", 0x15B3, 0x1021, 0x020000, "mlx5_core")
    tree.virtual_function(1, "0000:01:00.0", state="1: DOWN")
    tree.virtual_function(2, "0000:01:00.0", netdev="net2")

    findings = run_checks(host, ["rdma"]).findings

    assert the(findings, "rdma.ports").title == "1 of 1 ports active"
    assert "not counted: mlx5_1" in the(findings, "rdma.ports").seen


def test_a_management_port_with_rdma_is_no_rail(tree: Tree, host: FakeHost) -> None:
    """Azure's ND H100: eight InfiniBand cards, and one of 50 Gb/s for everything else."""
    for number in range(8):
        pci = tree.pci(f"0000:{number + 1:02x}:00.0", 0x15B3, 0x101E, 0x020700, "mlx5_core")
        tree.rdma(f"mlx5_ib{number}", pci, layer="InfiniBand")
    pci = tree.pci("0000:09:00.0", 0x15B3, 0x1016, 0x020000, "mlx5_core")
    tree.netdev("eth1", pci, mtu=1500, speed=50_000)
    port = tree.rdma("mlx5_an0", pci, "eth1", rate="50 Gb/sec (1X EDR)")
    tree.remove(f"{port}/gids/1")

    findings = run_checks(host, ["rdma", "network"]).findings

    assert the(findings, "rdma.rates").title == "mlx5: 8 x 400 Gb/s = 400 GB/s"
    assert the(findings, "rdma.rates").seen.endswith("not counted: mlx5_an0 (50 Gb/s, where the fastest has 400)")
    assert {check for check, severity in severities(findings).items() if severity in (WARNING, ERROR)} == set()


@pytest.mark.parametrize("slow", [(3,), tuple(range(1, 8))], ids=["one", "all but one"])
@pytest.mark.parametrize("management", [False, True])
def test_rails_that_trained_at_a_low_rate_are_missed(
    tree: Tree, host: FakeHost, slow: tuple[int, ...], management: bool
) -> None:
    """They are of the same model as the fastest; a management port of the same number is told by its class."""
    for number in range(8):
        pci = tree.pci(f"0000:{number + 1:02x}:00.0", 0x15B3, 0x101E, 0x020700, "mlx5_core")
        rate = "10 Gb/sec (4X SDR)" if number in slow else "400 Gb/sec (4X NDR)"
        tree.rdma(f"mlx5_{number}", pci, layer="InfiniBand", rate=rate)
    if management:
        pci = tree.pci("0000:09:00.0", 0x15B3, 0x101E, 0x020000, "mlx5_core")
        tree.netdev("eth1", pci, speed=50_000)
        tree.rdma("mlx5_an0", pci, "eth1", rate="50 Gb/sec (1X EDR)")

    findings = run_checks(host, ["rdma.rates", "rdma.ports"]).findings

    assert the(findings, "rdma.ports").title == "8 of 8 ports active"
    rates = the(findings, "rdma.rates")
    assert rates.severity is WARNING
    assert "mlx5_3" in rates.title and "mlx5_0" not in rates.title and "below 400 Gb/s" in rates.title
    assert "10 instead of 400 GB/s" in rates.cost
    assert ("not counted: mlx5_an0 (50 Gb/s, where the fastest has 400)" in rates.seen) == management


def test_software_devices_alone_are_counted(tree: Tree, host: FakeHost) -> None:
    tree.rdma("rxe0", "", "eth0", rate="10 Gb/sec (4X)")

    assert the(run_checks(host, ["rdma"]).findings, "rdma.ports").title == "1 of 1 ports active"


def test_suggested_memory_of_tcp_is_in_pages_of_this_machine(tree: Tree, host: FakeHost) -> None:
    tree.write("/proc/sys/net/ipv4/tcp_mem", "10 20 30").write("/proc/meminfo", "MemTotal: 64000000 kB")
    host.page = 65536

    fix = the(run_checks(host, ["tcp.memory"]).findings, "tcp.memory").fixes[0]

    assert fix.command == "sysctl -w net.ipv4.tcp_mem='62500 125000 250000'"


def test_interface_whose_name_is_no_utf8_is_found_where_a_file_names_it(tree: Tree, host: FakeHost) -> None:
    port = tree.connectx(0)
    os.rename(tree.path("/sys/class/net/rail0"), os.fsencode(tree.path("/sys/class/net")) + b"/ra\xffil")
    for index in range(2):
        tree.write(f"{port}/gid_attrs/ndevs/{index}", b"ra\xffil\n")

    findings = run_checks(host, ["rdma", "network"]).findings

    assert "rdma.namespace" not in severities(findings)
    for finding in findings:
        json.dumps(finding_to_json(finding), ensure_ascii=False).encode()


def test_old_distributions_are_not_sent_to_packages_that_are_too_old(tree: Tree, host: FakeHost) -> None:
    (fix,) = the(run_checks(host, ["libraries"]).findings, "libraries.libfabric").fixes
    assert "pip install mpich" in fix.command

    tree.write("/etc/os-release", 'ID=debian\nVERSION_ID="13"')
    (fix,) = the(run_checks(FakeHost(host.root), ["libraries"]).findings, "libraries.libfabric").fixes
    assert fix.command == "apt-get install libfabric1"


def test_libfabric_that_the_environment_names_is_the_one(host: FakeHost) -> None:
    opened(host, "libfabric.so.1", version=(2, 5))
    mine = "/opt/mine/libfabric.so.1"
    host.environ = {"CROSSRAIL_LIBFABRIC": mine}
    host.libraries[mine] = Library(mine, path=mine, version=(2, 4))
    assert the(run_checks(host, ["libraries"]).findings, "libraries.libfabric").title == (
        "libfabric 2.4, of CROSSRAIL_LIBFABRIC"
    )

    host.libraries[mine] = Library(mine, path=mine, version=(1, 17))
    finding = the(run_checks(host, ["libraries"]).findings, "libraries.libfabric")
    assert finding.severity is ERROR and "1.17 is older" in finding.title
    assert finding.fixes[0].command == "unset CROSSRAIL_LIBFABRIC"

    del host.libraries[mine]
    finding = the(run_checks(host, ["libraries"]).findings, "libraries.libfabric")
    assert finding.severity is ERROR and finding.title == f"{mine} is not there"
    assert finding.fixes[0].command == "unset CROSSRAIL_LIBFABRIC"


def test_values_of_foreign_variables_are_not_shown(host: FakeHost) -> None:
    host.environ = {"MC_REDIS_PASSWORD": "hunter2"}

    finding = the(run_checks(host, ["environment"]).findings, "environment.foreign")

    assert "hunter2" not in str(finding) and "MC_REDIS_PASSWORD" in finding.title


def test_the_secret_is_not_shown(host: FakeHost) -> None:
    for value in ("hunter2", "hunter2-hunter2-hunter2", " hunter2"):
        host.environ = {"CROSSRAIL_SECRET": value}
        assert "hunter2" not in str(run_checks(host, ["environment"]).findings)


def test_relative_path_is_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenSSL takes it so, too."""
    (tmp_path / "a.pem").touch(mode=0o600)
    monkeypatch.chdir(tmp_path)
    host = Host(environ={f"CROSSRAIL_TLS_{name}": "a.pem" for name in ("CERT", "KEY", "CA")})
    assert the(run_checks(host, ["environment"]).findings, "environment.tls").severity is OK
    assert host.mode("a.pem") == 0o600 and not host.exists("b.pem")


def test_bundled_libraries_are_found(host: FakeHost, tmp_path: Path) -> None:
    site = tmp_path / "site"
    (site / "mooncake.libs").mkdir(parents=True)
    (site / "mooncake.libs" / "libfabric-1a2b.so.1").touch()
    host.sites = [site]

    finding = the(run_checks(host, ["libraries"]).findings, "libraries.bundled")

    assert "mooncake.libs" in finding.title

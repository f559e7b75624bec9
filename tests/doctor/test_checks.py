"""Every check on made-up machines, healthy and not: cases.txt has a row for each, by the machine that is changed.

The healthy machines are Tree.plain() and Tree.gpu_server(); on them no check may find a warning or an error.
"""

import resource
from pathlib import Path

import pytest

from crossrail.doctor.finding import Severity
from crossrail.doctor.probes import Library, Selftest, TransportTest
from crossrail.doctor.report import run_checks
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


def test_old_distributions_are_not_sent_to_packages_that_are_too_old(tree: Tree, host: FakeHost) -> None:
    (fix,) = the(run_checks(host, ["libraries"]).findings, "libraries.libfabric").fixes
    assert "pip install mpich" in fix.command

    tree.write("/etc/os-release", 'ID=debian\nVERSION_ID="13"')
    (fix,) = the(run_checks(FakeHost(host.root), ["libraries"]).findings, "libraries.libfabric").fixes
    assert fix.command == "apt-get install libfabric1"


def test_values_of_foreign_variables_are_not_shown(host: FakeHost) -> None:
    host.environ = {"MC_REDIS_PASSWORD": "hunter2"}

    finding = the(run_checks(host, ["environment"]).findings, "environment.foreign")

    assert "hunter2" not in str(finding) and "MC_REDIS_PASSWORD" in finding.title


def test_the_secret_is_not_shown(host: FakeHost) -> None:
    for value in ("hunter2", "hunter2-hunter2-hunter2", " hunter2"):
        host.environ = {"CROSSRAIL_SECRET": value}
        assert "hunter2" not in str(run_checks(host, ["environment"]).findings)


def test_bundled_libraries_are_found(host: FakeHost, tmp_path: Path) -> None:
    site = tmp_path / "site"
    (site / "mooncake.libs").mkdir(parents=True)
    (site / "mooncake.libs" / "libfabric-1a2b.so.1").touch()
    host.sites = [site]

    finding = the(run_checks(host, ["libraries"]).findings, "libraries.bundled")

    assert "mooncake.libs" in finding.title

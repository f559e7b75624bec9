"""What the doctor tries in child processes: whatever happens there, it comes back with words."""

import errno
import mmap
import os
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from crossrail.doctor import probes
from crossrail.doctor.host import Host
from crossrail.doctor.open_libraries import mapped_path

BROKEN_OPENER = """
import json, os, signal, sys, time
for name in sys.argv[1:]:
    if name == "crash.so":
        sys.stderr.write("crash says: about to\\n"); sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGSEGV)
    if name == "hang.so":
        time.sleep(60)
    print(json.dumps({"name": name, "path": "/lib/" + name}), flush=True)
"""


@pytest.fixture
def broken_opener(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that crashes and hangs, as libraries do."""
    (tmp_path / "open_libraries.py").write_text(BROKEN_OPENER)
    monkeypatch.setattr(probes, "_FOLDER", tmp_path)
    # A sanitizer that is loaded into the child would turn its crash into an exit.
    monkeypatch.setenv("ASAN_OPTIONS", os.environ.get("ASAN_OPTIONS", "") + ":handle_segv=0")


def test_library_that_is_not_there() -> None:
    library = probes.open_libraries(["libno-such-thing.so.7"])["libno-such-thing.so.7"]

    assert library.missing and not library.opened
    assert "No such file" in library.error


def test_library_that_opens_names_its_file() -> None:
    library = probes.open_libraries(["libc.so.6"])["libc.so.6"]

    assert library.opened and Path(library.path).name.startswith("libc")


def test_library_is_found_beside_files_of_any_name(tmp_path: Path) -> None:
    odd, library = tmp_path / os.fsdecode(b"raw\xff"), tmp_path / os.fsdecode(b"libodd.so.1\xff")
    for file in (odd, library):
        file.write_bytes(bytes(4096))

    with odd.open("rb") as one, library.open("rb") as other:
        with mmap.mmap(one.fileno(), 0, prot=mmap.PROT_READ), mmap.mmap(other.fileno(), 0, prot=mmap.PROT_READ):
            found = mapped_path("libodd.so.1")

    assert found == str(library)


def test_file_that_is_no_library(tmp_path: Path) -> None:
    file = tmp_path / "libfabric.so.1"
    file.write_text("not an ELF file")

    library = probes.open_libraries([str(file)])[str(file)]

    assert not library.opened and not library.missing
    assert str(file) in library.error


def test_library_that_lacks_the_call_for_its_version(tmp_path: Path) -> None:
    libc = Path(probes.open_libraries(["libc.so.6"])["libc.so.6"].path)
    imposter = tmp_path / "libfabric.so.1"
    imposter.symlink_to(libc)

    library = probes.open_libraries([str(imposter)])[str(imposter)]

    assert "fi_version" in library.error


def test_crash_and_hang_are_named_and_others_still_tried(broken_opener: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "_LIBRARIES_DEADLINE_S", 3.0)

    found = probes.open_libraries(["a.so", "crash.so", "b.so", "hang.so", "c.so"])

    assert found["a.so"].opened and found["b.so"].opened
    assert "SIGSEGV" in found["crash.so"].error and "about to" in found["crash.so"].messages
    assert "did not return" in found["hang.so"].error
    assert "not tried" in found["c.so"].error


def test_children_of_a_child_do_not_outlive_the_deadline(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    script = (
        "import subprocess; p = subprocess.Popen(['sleep', '60']); "
        f"open({str(pid_file)!r}, 'w').write(str(p.pid)); p.wait()"
    )

    begun = time.monotonic()
    ran = probes._run([sys.executable, "-c", script], 2.0)

    assert ran.code is None and time.monotonic() - begun < 10
    grandchild = int(pid_file.read_text())
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and is_running(grandchild):
        time.sleep(0.01)
    assert not is_running(grandchild)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_output_of_a_child_that_is_no_json_is_passed_over() -> None:
    ran = probes._run([sys.executable, "-c", "print('[1]'); print('x'); print('{\"a\": 1}')"], 10.0)

    assert ran.lines == [{"a": 1}]


def test_nothing_needs_a_place_to_write_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in a container with a read-only root."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "not there"))

    assert probes._run([sys.executable, "-c", "print('{\"a\": 1}')"], 10.0).lines == [{"a": 1}]


def test_without_files_in_memory_there_are_those_of_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> int:
        raise PermissionError(errno.EPERM, "no memfd in this sandbox")

    monkeypatch.setattr(os, "memfd_create", refuse)

    assert probes._run([sys.executable, "-c", "print('{\"a\": 1}')"], 10.0).lines == [{"a": 1}]


def test_attach_answers_with_an_errno() -> None:
    code = probes.attach_errno()

    assert code is None or code >= 0
    if os.geteuid() == 0 and Host().container == "":
        assert code == 0


def test_selftest_moves_bytes_and_knows_what_is_not_built() -> None:
    result = probes.run_selftest(["shm", "no-such-transport"])

    assert result.error == "" and result.version
    shm, other = result.transports
    assert shm.state == "ok" and shm.gb_per_s > 0
    assert other.state == "absent" and "no-such-transport" in other.detail


def test_selftest_of_what_cannot_be_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "crossrail"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('undefined symbol: _ZN9crossrail')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    result = probes.run_selftest(["shm"])

    assert "undefined symbol: _ZN9crossrail" in result.error


def test_clock_of_a_busy_machine_is_not_called_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process has the core for 20 ms in the middle: of what the clock costs, that says nothing."""
    now = 0

    def read() -> int:
        nonlocal now
        now += 20_000_000 if now in range(40_000, 40_100) else 50
        return now

    monkeypatch.setattr("crossrail.doctor.host.time", SimpleNamespace(perf_counter_ns=read, monotonic_ns=read))

    assert Host().clock_read_ns() < 100


def test_real_host_answers_everything() -> None:
    host = Host()

    assert host.kernel > (3, 0)
    assert host.cpus() and host.memory_bytes > 0
    assert host.python[:2] == sys.version_info[:2]
    assert 0 < host.clock_read_ns() < 1e6
    assert host.space("/") is not None and host.space("/no/such/place") is None
    assert host.read("/proc/self") is None and host.read("/no/such/file") is None
    assert host.names("/proc/self/task")

"""The tests' own tools: a leak check that finds leaks, seeds that replay, skips that are counted."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import hosts
from tests.support.hosts import FORBIDDEN
from tests.support.leaks import Snapshot
from tests.support.limits import PROGRAM_S, eventually, never
from tests.support.patterns import assert_same_bytes, pattern
from tests.support.ports import FIRST, LAST, free_port
from tests.support.process import REPOSITORY, PeerProcess
from tests.support.seeds import Seed


def test_leak_check_finds_an_fd() -> None:
    before = Snapshot.take()
    ends = os.pipe()

    assert "2 more fds" in before.leaked()

    for end in ends:
        os.close(end)
    assert before.leaked() == ""


def test_leak_check_finds_a_thread() -> None:
    before, stop = Snapshot.take(), threading.Event()
    thread = threading.Thread(target=stop.wait, name="crossrail-left-behind")
    thread.start()

    assert "crossrail-left-behind" in before.leaked()

    stop.set()
    thread.join()
    assert before.leaked() == ""


TESTS_THAT_FAIL = """
import gc, itertools, socket
import pytest

tries = itertools.count()

def use_and(fail):
    held = [socket.socket()]
    held.append(held)  # so that only garbage collection finds it
    gc.collect()
    assert not fail
    held[0].close()

def test_first(): use_and(next(tries) == 0)
def test_second(): gc.collect()
"""


@pytest.mark.parametrize(("reruns", "said"), [(0, "1 failed, 1 passed"), (1, "2 passed, 1 rerun")])
def test_failure_is_no_finding_of_what_runs_next(tmp_path: Path, reruns: int, said: str) -> None:
    """Nor of its own second run."""
    (tmp_path / "test_it.py").write_text(TESTS_THAT_FAIL)
    command = [sys.executable, "-m", "pytest", "-c", str(REPOSITORY / "pyproject.toml"), "--rootdir", str(tmp_path)]
    command += ["-p", "tests.conftest", "-p", "no:cacheprovider", "--reruns", str(reruns), "test_it.py"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PROGRAM_S)
    assert said in ran.stdout, ran.stdout + ran.stderr


def test_seed_shows_its_number_and_differs_by_test() -> None:
    assert repr(Seed(17, "a")) == "17"
    assert Seed(17, "a").number() == Seed(17, "a").number()
    assert len({Seed(17, "a").number(), Seed(17, "b").number(), Seed(18, "a").number(), Seed(17, "a").number(1)}) == 4


def test_deadlines_say_what_was_waited_for() -> None:
    with pytest.raises(AssertionError, match="the moon"):
        eventually(lambda: False, "the moon", 0.01)
    with pytest.raises(AssertionError, match="the sun"):
        never(lambda: True, "the sun")


def test_differing_bytes_are_located() -> None:
    changed = pattern(1, 100)
    changed[42] ^= 1

    with pytest.raises(AssertionError, match="1 of 100 differ, first at 42"):
        assert_same_bytes(changed, pattern(1, 100))


def test_peer_that_dies_is_an_error_and_no_hang() -> None:
    child = PeerProcess()

    with pytest.raises(AssertionError, match="ended"):
        child.call("exit_now")

    child.close()
    child.close()


# --- tests/conftest.py ---

SAMPLE = """
import pytest

@pytest.mark.skip(reason="of the moon")
def test_skipped(): ...

@pytest.mark.skip(reason="this machine forbids network namespaces: they need root")
def test_forbidden(): ...

def test_seeded(seed):
    assert seed is None
"""


def run_sample(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_sample.py").write_text(SAMPLE)
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "--rootdir", str(folder), "-c", os.devnull]
    return subprocess.run(
        [*command, str(folder / "test_sample.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=PROGRAM_S,
        cwd=REPOSITORY,
        env=os.environ | variables,
    )


@pytest.mark.parametrize(("bound", "status"), [("0", 1), ("1", 0)])
def test_more_skips_than_allowed_fail_the_session(tmp_path: Path, bound: str, status: int) -> None:
    run = run_sample(tmp_path, "-k", "skipped", CROSSRAIL_SKIPS_MAX=bound)

    assert run.returncode == status, run.stdout
    assert "of the moon" in run.stdout
    assert ("CROSSRAIL_SKIPS_MAX=0" in run.stdout) == (status == 1)


def test_skips_where_namespaces_are_forbidden_are_shown_and_not_counted(tmp_path: Path) -> None:
    run = run_sample(tmp_path, "-k", "forbidden", CROSSRAIL_SKIPS_MAX="0")

    assert run.returncode == 0, run.stdout
    assert "they need root" in run.stdout and f"not counted: 1 skipped, for {FORBIDDEN}" in run.stdout


def test_machine_that_forbids_namespaces_is_told_from_one_where_something_else_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(text: str) -> Callable[..., str]:
        def run(*_: object) -> str:
            raise AssertionError(text)

        return run

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(hosts, "run", fail("mount --make-shared /run/netns failed: Operation not permitted"))
    assert hosts.why_not.__wrapped__().startswith(f"{FORBIDDEN}: mount")
    monkeypatch.setattr(hosts, "run", fail("Error: Unknown device type."))
    assert hosts.why_not.__wrapped__() == "no network namespaces here: Error: Unknown device type."
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert hosts.why_not.__wrapped__() == f"{FORBIDDEN}: they need root"


def test_failure_shows_the_command_that_replays_it(tmp_path: Path) -> None:
    run = run_sample(tmp_path, "-k", "seeded", "--seed", "4711")

    assert run.returncode == 1
    assert "./dev test" in run.stdout
    assert "--seed 4711" in run.stdout
    assert "seed = 4711" in run.stdout


def test_ports_are_none_that_the_kernel_gives_out_and_nobody_gets_one_of_anothers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first_of_any, _ = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    if first_of_any < LAST:
        pytest.skip(f"the kernel of this host gives out ports from {first_of_any} on")
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", "3")
    of_worker = []
    for worker in range(3):
        monkeypatch.setenv("PYTEST_XDIST_WORKER", f"gw{worker}")
        of_worker.append([free_port() for _ in range(50)])

    assert max(of_worker[0]) < min(of_worker[1]) and max(of_worker[1]) < min(of_worker[2])
    assert min(of_worker[0]) >= FIRST and max(of_worker[2]) < LAST
    assert len({*of_worker[0], *of_worker[1], *of_worker[2]}) == 150

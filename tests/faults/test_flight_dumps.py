"""The flight recorder when it is needed: a peer that stands still, a process that hangs, a signal, a fork."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

import crossrail as xr
from crossrail import sim
from crossrail.flight import FlightDump, read_dump
from tests.conftest import EngineFactory, PeerFactory
from tests.support.limits import PROGRAM_S, SLOWNESS, WAIT_S, eventually, never
from tests.support.process import assert_clean, run_script, start_script

WATCHDOG_S = 0.4


def only_dump(folder: Path) -> FlightDump:
    (path,) = folder.glob("*.flight")
    return read_dump(path)


def dumps(folder: Path) -> int:
    return len(list(folder.glob("*.flight")))


# --- the watchdog ---


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_watchdog_tells_of_a_frozen_peer_once_a_stall(
    open_engine: EngineFactory, spawn_peer: PeerFactory, tmp_path: Path, transport: str
) -> None:
    events: list[xr.EngineEvent] = []
    here = open_engine(transport=transport, watchdog_s=WATCHDOG_S, dump_dir=tmp_path)
    here.on_event(events.append)
    child = spawn_peer()
    there = child.open(transport=transport)
    here.connect(there.address, WAIT_S)

    def stalls() -> list[xr.EngineEvent]:
        return [event for event in events if event.kind == "stalled"]

    child.stop()
    transfer = here.submit_send(there.address, b"pending")
    eventually(lambda: bool(stalls()), "the stall is told")
    never(lambda: len(stalls()) > 1, "it is told again", 3 * WATCHDOG_S)
    (event,) = stalls()
    assert event.peer == there.address.name
    assert f"for peer '{there.address.name}' (pid {there.address.pid}, {transport}" in event.detail
    assert "have not moved for" in event.detail and str(tmp_path) in event.detail

    dump = only_dump(tmp_path)
    assert dump.reason.startswith("stall: ")
    (peer,) = dump.peers
    assert peer.name == there.address.name and peer.outstanding + peer.queued == 1
    assert f"waiting: {peer.outstanding} works under way and {peer.queued} operations queued" in here.dump()

    child.resume()
    there.receive(1, 16)
    transfer.wait(WAIT_S)
    assert there.take()[1] == b"pending"
    eventually(lambda: "0 in flight" in here.dump(), "nothing waits any more")
    child.stop()
    late = here.submit_send(there.address, b"another")
    eventually(lambda: len(stalls()) == 2, "the next stall is told too")
    child.resume()
    late.cancel()


def test_watchdog_is_quiet_while_all_goes_well(open_engine: EngineFactory, other: xr.Engine, tmp_path: Path) -> None:
    events: list[xr.EngineEvent] = []
    watchdog_s = 0.8 * SLOWNESS  # a busy machine stops everybody for half a second
    here = open_engine(watchdog_s=watchdog_s, dump_dir=tmp_path)
    here.on_event(events.append)
    src, dst = here.alloc(1 << 20), other.alloc(1 << 20)
    deadline = time.monotonic() + 1.5 * watchdog_s
    while time.monotonic() < deadline:
        here.submit_write(src, dst.descriptor, imm=1).wait(WAIT_S)
        other.imm_counter(1).wait(1, WAIT_S)
    time.sleep(1.25 * watchdog_s)  # and while nothing happens
    assert [event.kind for event in events] == ["peer-connected"]
    assert dumps(tmp_path) == 0


def test_watchdog_tells_that_nobody_drives_a_manual_engine(
    open_engine: EngineFactory, other: xr.Engine, tmp_path: Path
) -> None:
    events: list[xr.EngineEvent] = []
    here = open_engine(polling="manual", watchdog_s=0.1, dump_dir=tmp_path)
    here.on_event(events.append)
    src, dst = here.alloc(1 << 20), other.alloc(1 << 20)
    transfer = here.submit_write(src, dst.descriptor)
    eventually(lambda: any(event.kind == "stalled" for event in events), "the stall is told")
    (event,) = [event for event in events if event.kind == "stalled"]
    assert "no thread has driven the engine" in event.detail
    assert only_dump(tmp_path).counts["submits_waiting"] == 1
    transfer.wait(WAIT_S)


def test_watchdog_that_cannot_write_still_tells(open_engine: EngineFactory, other: xr.Engine, tmp_path: Path) -> None:
    events: list[xr.EngineEvent] = []
    (gone := tmp_path / "gone").mkdir()
    here = open_engine(polling="manual", watchdog_s=0.1, dump_dir=gone)
    gone.rmdir()
    here.on_event(events.append)
    src, dst = here.alloc(1 << 20), other.alloc(1 << 20)
    transfer = here.submit_write(src, dst.descriptor)
    eventually(lambda: any(event.kind == "stalled" for event in events), "the stall is told")
    assert any("was not written to" in event.detail and "No such file" in event.detail for event in events)
    transfer.wait(WAIT_S)


def test_stalls_of_one_look_share_one_recording(tmp_path: Path) -> None:
    events: list[xr.EngineEvent] = []
    with sim.World(1) as world:
        here = world.host("here").engine("here", watchdog_s=5, dump_dir=tmp_path, peer_timeout_s=1000)
        here.on_event(events.append)
        others = [world.host(f"n{i}").engine(f"n{i}", peer_timeout_s=1000) for i in range(12)]
        source, targets = here.alloc(4096), [other.alloc(4096) for other in others]
        for target in targets:
            here.submit_write(source, target.descriptor).wait(WAIT_S)
        world.partition([world.hosts[0]], world.hosts[1:])
        for target in targets:
            here.submit_write(source, target.descriptor)
        world.run(for_s=8)

    stalls = [event for event in events if event.kind == "stalled"]
    assert {event.peer for event in stalls} == {f"n{i}" for i in range(12)}
    assert len({event.detail.rpartition("; ")[2] for event in stalls}) == 1
    reason = only_dump(tmp_path).reason
    assert all(f"'n{i}'" in reason for i in range(12)) and reason.count("have not moved for") == 8


def test_directory_that_takes_no_files_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may write everywhere, so the kernel's answer is made up."""
    monkeypatch.setattr("os.access", lambda path, mode: path != str(tmp_path))
    with pytest.raises(xr.UsageError, match=r"^dump_dir = .* this user may not make files"):
        xr.Engine("here", dump_dir=tmp_path)


def test_directory_of_the_environment_that_is_not_there_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CROSSRAIL_DUMP_DIR", str(tmp_path / "dumps"))
    with pytest.raises(xr.UsageError, match=r"^CROSSRAIL_DUMP_DIR = .* is not a directory: make it first"):
        xr.Engine("here")
    (tmp_path / "dumps").mkdir()
    xr.Engine("here").close()


# --- signals ---

HANGING = """
    import ctypes, sys, time, numpy as np, crossrail as xr
    xr.dump_on_signal(directory=sys.argv[1])
    engine, other = xr.Engine("hanging", dump_dir="/"), xr.Engine("other", dump_dir="/")
    src, dst = other.alloc(8), engine.alloc(8)
    other.submit_write(src, dst.descriptor, imm=5).wait(10)
    while engine.imm_counter(5).poll() < 1:  # done: it will be counted, if it is not yet
        time.sleep(0.001)
    print("ready", flush=True)
    if sys.argv[2] == "wait":
        engine.imm_counter(5).wait(3, None)
    while True:
        ctypes.PyDLL(None).sleep(60)  # holds the GIL, until a signal ends it
"""


def read_line(script: subprocess.Popen[str]) -> str:
    assert script.stdout is not None
    assert select.select([script.stdout], [], [], WAIT_S)[0], "the script said nothing"
    return script.stdout.readline().strip()


def errors_said(script: subprocess.Popen[str], lines: int) -> list[str]:
    """The next lines of its standard error, whole."""
    assert script.stderr is not None
    said = b""
    while said.count(b"\n") < lines:
        assert select.select([script.stderr], [], [], WAIT_S)[0], f"only this was said: {said.decode()}"
        got = os.read(script.stderr.fileno(), 4096)
        assert got, f"it ended, and said: {said.decode()}"
        said += got
    return said.decode().splitlines()


def waits_in(folder: Path) -> set[tuple[int, float, float]]:
    found = [read_dump(path) for path in folder.glob("*.flight")]
    return {(wait.imm, wait.arrived, wait.needed) for dump in found for wait in dump.waits}


@pytest.mark.parametrize("where", ["wait", "gil"])
def test_signal_dumps_every_engine_of_a_process_that_hangs(tmp_path: Path, where: str) -> None:
    with start_script(HANGING, str(tmp_path), where) as script:
        try:
            assert read_line(script) == "ready"
            rounds = 0
            while rounds < 2 or (where == "wait" and not waits_in(tmp_path)):  # the first may come before the wait
                script.send_signal(signal.SIGUSR2)
                rounds += 1
                for line in errors_said(script, 2):
                    told = re.fullmatch(r"crossrail: signal 12: flight recorder of engine '(.*)' is in (.*)", line)
                    assert told is not None, line
                    assert Path(told[2]).read_bytes().endswith(b'["end"]\n'), "it is whole once it is told of"
            assert script.poll() is None
        finally:
            script.kill()
            _, errors = script.communicate(timeout=PROGRAM_S)
    found = [read_dump(path) for path in tmp_path.glob("*.flight")]
    assert {dump.engine for dump in found} == {"hanging", "other"}
    assert {dump.reason for dump in found} == {f"signal {int(signal.SIGUSR2)}"}
    assert waits_in(tmp_path) == ({(5, 1.0, 3.0)} if where == "wait" else set())
    assert len(found) == 2 * rounds and errors == ""


def test_signal_that_has_a_handler_or_nowhere_to_write_is_refused() -> None:
    script = """
        import signal, crossrail as xr
        CRASHES = signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL
        signal.signal(signal.SIGUSR1, lambda *_: None)
        for wrong in (signal.SIGUSR1, signal.SIGKILL, 0, 4711, signal.SIGSTOP, *CRASHES, "USR1", 1 << 40):
            try:
                xr.dump_on_signal(wrong)
            except xr.UsageError as error:
                print(error)
        for wrong in ("/nonexistent", "/proc/self/stat", 5):
            try:
                xr.dump_on_signal(directory=wrong)
            except xr.UsageError as error:
                print(error)
        with xr.dump_on_signal():
            try:
                xr.dump_on_signal(signal.SIGHUP)
            except xr.UsageError as error:
                print(error)
        with xr.dump_on_signal(signal.SIGHUP) as dump:
            dump.close()
        assert signal.getsignal(signal.SIGHUP) is not None
    """
    done = run_script(script)
    assert_clean(done)
    lines = done.stdout.splitlines()
    assert len(lines) == 15
    assert "signal 10 has a handler already" in lines[0]
    assert "signum = 9 " in lines[1] and "signum = 4711" in lines[3]
    assert "signum = 19 " in lines[4]
    assert all("is raised by a crash" in line for line in lines[5:9])
    assert lines[9].startswith("signum must be a whole number, not ") and f"signum = {1 << 40} is no" in lines[10]
    assert "directory = '/nonexistent' is not a directory: make it first (mkdir -p /nonexistent)" in lines[11]
    assert "directory = '/proc/self/stat' is not a directory" in lines[12] and "directory must be a path" in lines[13]
    assert "signal 12 dumps already" in lines[14]


def test_closed_signal_dump_gives_the_default_action_back(tmp_path: Path) -> None:
    script = """
        import os, signal, sys, time, crossrail as xr
        xr.dump_on_signal(directory=sys.argv[1]).close()
        os.kill(os.getpid(), signal.SIGUSR2)
        time.sleep(10)
    """
    assert run_script(script, str(tmp_path)).returncode == -signal.SIGUSR2
    assert dumps(tmp_path) == 0


# gcc's AddressSanitizer forks without the locks of its own threads: a child that starts threads may wait for ever.
@pytest.mark.no_sanitizer
def test_forked_child_ignores_the_signal_and_may_ask_anew(tmp_path: Path) -> None:
    script = """
        import os, signal, sys, time, crossrail as xr
        parents = xr.dump_on_signal(directory=sys.argv[1])
        engine = xr.Engine("parent")
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGUSR2)
            time.sleep(0.2)
            assert os.listdir(sys.argv[1]) == [], os.listdir(sys.argv[1])
            with xr.Engine("child"), xr.dump_on_signal(directory=sys.argv[1]):
                os.kill(os.getpid(), signal.SIGUSR2)
                deadline = time.monotonic() + 10
                while not os.listdir(sys.argv[1]) and time.monotonic() < deadline:
                    time.sleep(0.01)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        engine.close()
        parents.close()
    """
    done = run_script(script, str(tmp_path), timeout_s=40)
    assert_clean(done)
    assert only_dump(tmp_path).engine == "child"


@pytest.mark.no_sanitizer
def test_forked_child_may_close_what_it_inherited_and_ask_anew(tmp_path: Path) -> None:
    script = """
        import gc, os, signal, sys, time, crossrail as xr
        inherited = xr.dump_on_signal(directory=sys.argv[1])
        child = os.fork()
        if child == 0:
            inherited.close()
            del inherited
            gc.collect()
            assert signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL
            with xr.Engine("child"), xr.dump_on_signal(directory=sys.argv[1]):
                os.kill(os.getpid(), signal.SIGUSR2)
                deadline = time.monotonic() + 10
                while not os.listdir(sys.argv[1]) and time.monotonic() < deadline:
                    time.sleep(0.01)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        try:
            xr.dump_on_signal()
        except xr.UsageError as error:
            print(error)
    """
    done = run_script(script, str(tmp_path), timeout_s=40)
    assert_clean(done)
    assert "signal 12 dumps already" in done.stdout, "the parent's is as it was"
    assert only_dump(tmp_path).engine == "child"


@pytest.mark.no_sanitizer
@pytest.mark.parametrize("inherited", ["dropped", "closed after", "closed first"])
def test_forked_child_that_asked_anew_is_not_killed_by_its_signal(tmp_path: Path, inherited: str) -> None:
    """Whatever becomes of the object that it inherited, which is destroyed where nobody kept it."""
    script = """
        import os, signal, sys, time, crossrail as xr
        inherited = xr.dump_on_signal(directory=sys.argv[1])
        if sys.argv[2] == "dropped":
            del inherited
        child = os.fork()
        if child == 0:
            if sys.argv[2] == "closed first":
                inherited.close()
            xr.dump_on_signal(directory=sys.argv[1])
            if sys.argv[2] == "closed after":
                inherited.close()
            with xr.Engine("child", transport="tcp"):
                os.kill(os.getpid(), signal.SIGUSR2)
                deadline = time.monotonic() + 10
                while not os.listdir(sys.argv[1]) and time.monotonic() < deadline:
                    time.sleep(0.01)
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    done = run_script(script, str(tmp_path), inherited, timeout_s=40)
    assert_clean(done)
    assert done.stdout.strip() == "0", "how the child ended"
    assert only_dump(tmp_path).engine == "child"


def test_standard_error_that_nobody_reads_holds_nothing_up(tmp_path: Path) -> None:
    script = """
        import os, signal, sys, threading, time, crossrail as xr
        engines = [xr.Engine(f"e{i}", transport="shm") for i in range(3)]
        xr.dump_on_signal(directory=sys.argv[1])
        read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        try:
            while True:
                os.write(write_end, b"x" * 4096)
        except BlockingIOError:
            pass
        os.set_blocking(write_end, True)
        standard_error = os.dup(2)
        os.dup2(write_end, 2)
        for count in (3, 8):
            os.kill(os.getpid(), signal.SIGUSR2)
            deadline = time.monotonic() + 10
            while len(os.listdir(sys.argv[1])) < count and time.monotonic() < deadline:
                time.sleep(0.01)
            print(len(os.listdir(sys.argv[1])))
            opening = threading.Thread(
                target=lambda: engines.extend(xr.Engine(f"n{i}", transport="shm") for i in range(2)), daemon=True
            )
            opening.start()
            opening.join(10)
            print(opening.is_alive(), flush=True)
        os.dup2(standard_error, 2)
        for engine in engines:
            engine.close()
    """
    done = run_script(script, str(tmp_path), timeout_s=60)
    assert_clean(done)
    assert done.stdout.split() == ["3", "False", "8", "False"]


def test_dump_asked_for_by_another_thread_while_one_waits(engine: xr.Engine, other: xr.Engine) -> None:
    def wait() -> None:
        engine.imm_counter(3).wait(2, WAIT_S)

    waiter = threading.Thread(target=wait)
    waiter.start()
    eventually(lambda: "immediate 3: 0 of 2 arrived" in engine.dump(), "the dump tells of the wait")
    group = engine.add_peer_group([engine.address])
    for _ in range(2):
        engine.submit_barrier(group, 3)
    waiter.join(WAIT_S)
    assert not waiter.is_alive()


def test_default_directory_is_configured_by_the_environment(tmp_path: Path) -> None:
    script = """
        import os, signal, sys, time, crossrail as xr
        os.environ.pop("CROSSRAIL_DUMP_DIR", None)
        os.environ[sys.argv[2]] = sys.argv[1]
        with xr.Engine("e"), xr.dump_on_signal():
            os.kill(os.getpid(), signal.SIGUSR2)
            deadline = time.monotonic() + 10
            while not os.listdir(sys.argv[1]) and time.monotonic() < deadline:
                time.sleep(0.01)
    """
    for name in ("CROSSRAIL_DUMP_DIR", "TMPDIR"):
        folder = tmp_path / name
        folder.mkdir()
        done = run_script(script, str(folder), name)
        assert_clean(done)
        assert only_dump(folder).engine == "e"

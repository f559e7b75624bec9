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
from crossrail.flight import FlightDump, read_dump
from tests.conftest import EngineFactory, PeerFactory
from tests.support.limits import WAIT_S, eventually, never
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
    here = open_engine(watchdog_s=0.4, dump_dir=tmp_path)  # a busy machine may well stop everybody for 50 ms
    here.on_event(events.append)
    src, dst = here.alloc(1 << 20), other.alloc(1 << 20)
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        here.submit_write(src, dst.descriptor, imm=1).wait(WAIT_S)
        other.imm_counter(1).wait(1, WAIT_S)
    time.sleep(0.5)  # and while nothing happens
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


def test_directory_that_takes_no_files_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may write everywhere, so the kernel's answer is made up."""
    monkeypatch.setattr("os.access", lambda path, mode: path != str(tmp_path))
    with pytest.raises(xr.UsageError, match=r"^dump_dir = .* this user may not make files"):
        xr.Engine("here", dump_dir=tmp_path)


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
    else:
        ctypes.PyDLL(None).sleep(60)  # holds the GIL
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
            _, errors = script.communicate(timeout=WAIT_S)
    found = [read_dump(path) for path in tmp_path.glob("*.flight")]
    assert {dump.engine for dump in found} == {"hanging", "other"}
    assert {dump.reason for dump in found} == {f"signal {int(signal.SIGUSR2)}"}
    assert waits_in(tmp_path) == ({(5, 1.0, 3.0)} if where == "wait" else set())
    assert len(found) == 2 * rounds and errors == ""


def test_signal_that_has_a_handler_or_nowhere_to_write_is_refused() -> None:
    script = """
        import signal, crossrail as xr
        signal.signal(signal.SIGUSR1, lambda *_: None)
        for wrong in (signal.SIGUSR1, signal.SIGKILL, 0, 4711):
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
    assert len(lines) == 8
    assert "signal 10 has a handler already" in lines[0]
    assert "signum = 9 " in lines[1] and "signum = 4711" in lines[3]
    assert "directory = '/nonexistent' is not a directory: make it first (mkdir -p /nonexistent)" in lines[4]
    assert "directory = '/proc/self/stat' is not a directory" in lines[5] and "directory must be a path" in lines[6]
    assert "signal 12 dumps already" in lines[7]


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


def test_dump_asked_for_by_another_thread_while_one_waits(engine: xr.Engine, other: xr.Engine) -> None:
    def wait() -> None:
        with pytest.raises(xr.WaitTimeout):
            engine.imm_counter(3).wait(2, 1.0)

    waiter = threading.Thread(target=wait)
    waiter.start()
    eventually(lambda: "immediate 3: 0 of 2 arrived" in engine.dump(), "the dump tells of the wait")
    waiter.join(WAIT_S)


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

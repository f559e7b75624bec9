"""Signals belong to the program: threads of ours take none of those that are meant for the process."""

import signal
import threading
from pathlib import Path

import pytest

import crossrail as xr
from tests.conftest import EngineFactory
from tests.support.leaks import crossrail_threads
from tests.support.limits import PROGRAM_S, eventually
from tests.support.process import assert_clean, run_script, start_script

OWN = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGTRAP, signal.SIGSYS}


def blocked_in_our_threads() -> dict[str, set[int]]:
    """By the thread's name: numbers of the signals that it does not let in."""
    found = {}
    for status in Path("/proc/self/task").glob("*/status"):
        try:
            fields = dict(line.split(":\t", 1) for line in status.read_text().splitlines())
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
        if fields["Name"].startswith("crossrail-"):
            mask = int(fields["SigBlk"], 16)
            found[fields["Name"]] = {number for number in range(1, 65) if mask >> (number - 1) & 1}
    return found


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_threads_take_only_signals_that_they_cause(open_engine: EngineFactory, transport: str) -> None:
    engine = open_engine("signalled", transport=transport, watchdog_s=1.0)
    watcher = engine.alloc_watcher(lambda old, new: None)
    assert watcher.address

    names = {"crossrail-work", "crossrail-watch", "crossrail-dog", *(["crossrail-ctl"] if transport == "shm" else [])}
    eventually(lambda: names <= set(blocked_in_our_threads()), "all threads have their names")

    for name, numbers in blocked_in_our_threads().items():
        if name.startswith("crossrail-cal"):  # of Python
            continue
        assert {signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1, signal.SIGCHLD} <= numbers, name
        assert not OWN & numbers, name


def test_signal_that_the_program_keeps_back_waits_for_it() -> None:
    assert_clean(
        script := run_script(
            """
            import os, signal, time
            os.environ["OPENBLAS_NUM_THREADS"] = "1"  # numpy's threads take any signal
            import crossrail as xr

            with xr.Engine("working"):
                signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.3)  # until whoever else lets it in has taken it
                print(signal.sigwait({signal.SIGTERM}).name)
            """
        )
    )
    assert script.stdout == "SIGTERM\n"


def test_callers_own_signals_are_as_before(open_engine: EngineFactory) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, set())

    open_engine("opened")

    assert signal.pthread_sigmask(signal.SIG_BLOCK, set()) == before
    with pytest.raises(xr.UsageError):
        open_engine("n" * 65)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, set()) == before


@pytest.mark.parametrize("moment", ["before", "after"])
def test_handler_may_close_an_engine_whose_callback_thread_is_just_starting(moment: str) -> None:
    source = """
        import os, signal, sys, threading
        import crossrail as xr

        def start(thread):
            if moment == "before":
                os.kill(os.getpid(), signal.SIGTERM)
            start_it(thread)
            if moment == "after":
                os.kill(os.getpid(), signal.SIGTERM)

        moment = sys.argv[1]
        engine = xr.Engine("closing")
        signal.signal(signal.SIGTERM, lambda *_: engine.close())
        start_it, threading.Thread.start = threading.Thread.start, start
        transfer = engine.submit_send(engine.address, b"nobody receives this")
        called = threading.Event()
        print("starting", flush=True)
        transfer.add_done_callback(lambda transfer: called.set())
        print(called.wait(15), engine.closed, transfer.status)
    """
    with start_script(source, moment) as script:
        try:
            out, err = script.communicate(timeout=PROGRAM_S)
        finally:
            script.kill()

    assert out == "starting\nTrue True engine-closed\n", err
    assert not err


@pytest.mark.parametrize("moment", ["before", "after"])
def test_callbacks_run_though_a_signal_kept_their_thread_from_starting(
    engine: xr.Engine, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    start_it = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if moment == "after":
            start_it(thread)
        raise KeyboardInterrupt

    src = engine.alloc(64)
    transfer = engine.submit_write(src, src.descriptor, 0)
    called: list[str] = []
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        with pytest.raises(KeyboardInterrupt):
            transfer.add_done_callback(lambda _: called.append("interrupted"))
    for _ in range(2):
        transfer.add_done_callback(lambda _: called.append("again"))

    eventually(lambda: len(called) == 2, "the callbacks are called")
    engine.close()
    assert called == ["again", "again"]
    eventually(lambda: not any("callbacks" in name for name in crossrail_threads()), "the callbacks' threads end")

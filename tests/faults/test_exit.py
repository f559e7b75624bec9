"""The interpreter ends while engines are open: no hang, no crash, no complaint."""

import pytest

from tests.contract.setups import why_not
from tests.support.limits import WAIT_S
from tests.support.process import assert_clean, run_script

ENDINGS = {
    "idle": "",
    "pending-transfer": "keep = [engine.submit_send(other.address, b'x') for _ in range(100)]",
    "large-writes": "keep = [engine.submit_write(big, target, imm=1) for _ in range(50)]",
    "waiting-thread": "threading.Thread(target=wait_in_vain, daemon=True).start(); time.sleep(0.05)",
    "daemon-thread-with-an-engine": "threading.Thread(target=hold, daemon=True).start(); time.sleep(0.3)",
    "callback-running": (
        "engine.submit_write(small, target).add_done_callback(lambda _: time.sleep(0.2)); time.sleep(0.1)"
    ),
    "callback-pending": "engine.submit_send(other.address, b'x').add_done_callback(print)",
    "callback-submitting": "again()",
    "watcher": "watcher = engine.alloc_watcher(print); watcher.add()",
    "pool-with-callback": "pool = engine.submit_recvs(4, 16, on_message=print)",
    "counter-callback": "engine.imm_counter(1).on_count(1, print)",
    "closed-loop": "asyncio.run(give_up())",
    "closed-engine": "engine.close()",
    "cycle": "holder = [engine]; holder.append(holder); engine.holder = holder",
    "array": "array = engine.alloc(1000).array()",
    "exception-in-main": "raise SystemExit(0)",
    "global-in-del": "holder = Late(); del Late",
}

OPTIONS = {
    "shm": "{'transport': 'shm', 'rails': 2}",
    "tcp": "{'transport': 'tcp', 'rails': ['127.0.0.1', '127.0.0.2']}",
}
if not why_not("ofi:tcp"):
    OPTIONS["ofi:tcp"] = "{'transport': 'ofi:tcp', 'rails': ['127.0.0.1', '127.0.0.2']}"

SCRIPT = """
    import asyncio, threading, time
    import numpy as np
    import crossrail as xr

    class Late:
        def __del__(self):
            engine.closed, other.name

    def wait_in_vain():
        try:
            engine.imm_counter(1).wait(1)
        except xr.EngineClosed:
            pass

    def hold():
        mine = xr.Engine("held", **OPTIONS)
        time.sleep(3600)

    async def give_up():
        try:
            await asyncio.wait_for(engine.submit_send(other.address, b"x"), 0.02)
        except asyncio.TimeoutError:
            pass

    def again(_=None):
        try:
            engine.submit_write(small, target, imm=1).add_done_callback(again)
        except xr.EngineClosed:
            pass

    engine, other = xr.Engine("here", **OPTIONS), xr.Engine("other", **OPTIONS)
    big = engine.register(np.zeros(4_000_000, np.uint8))
    small = engine.alloc(10)
    destination = other.register(np.zeros(4_000_000, np.uint8))
    target = destination.descriptor
    ENDING
"""


def script_that_ends(ending: str, transport: str = "shm") -> str:
    return SCRIPT.replace("OPTIONS", OPTIONS[transport]).replace("ENDING", ending)


@pytest.mark.parametrize("transport", OPTIONS)
@pytest.mark.parametrize("ending", ENDINGS)
def test_interpreter_ends_cleanly(ending: str, transport: str) -> None:
    script = run_script(script_that_ends(ENDINGS[ending], transport))

    assert_clean(script)
    logged_events = "engine '"
    assert [line for line in script.stderr.splitlines() if not line.startswith(logged_events)] == []


# A daemon thread is in Python code that was called by ours when the interpreter ends, and asks for the GIL again.
INTO_PYTHON = {
    "message-of-an-error": "engine.imm_counter(1).wait(1, 0)",
    "callback": "engine.submit_write(small, target).add_done_callback(id)",
    "index-of-the-user": "engine.submit_write(small, target, Slow())",
}
CALLED_WHEN_IT_ENDS = """
    import os, subprocess, sys, threading, types
    import crossrail as xr
    from crossrail import _open_engines, _raise

    first, second = os.pipe(), os.pipe()
    is_within = threading.Event()

    def slowly(*_):
        is_within.set()
        os.read(first[0], 1)
        return 8 if "Slow" in "INTO_PYTHON" else xr.WaitTimeout("late")

    class Slow:
        __index__ = slowly

    class Last:
        def __del__(self, read=os.read, write=os.write, second=second[0]):
            read(second, 1)  # without the GIL
            write(1, b"ended")

    def call(engine, small, target):
        try:
            INTO_PYTHON
        except xr.WaitTimeout:
            pass

    _raise.counter_timeout = _raise.check_callable = slowly
    _open_engines._EXIT_PATIENCE_S = LIMIT_S
    engine = xr.Engine("here", transport="shm")
    small = engine.alloc(10)
    threading.Thread(target=call, args=(engine, small, small.descriptor), daemon=True).start()
    is_within.wait()
    del engine, small  # what is known of our functions keeps this module
    sys.modules["others"] = others = types.ModuleType("others")
    others.last = Last()
    del others
    # When we are at our end by all appearances the thread goes on, and later we do.
    echoes = f"sleep 0.5; echo > /dev/fd/{first[1]}; sleep 0.5; echo > /dev/fd/{second[1]}"
    subprocess.Popen(["sh", "-c", echoes], pass_fds=[first[1], second[1]]).returncode = 0  # nobody waits for it
"""


@pytest.mark.parametrize("into", INTO_PYTHON)
def test_daemon_thread_in_python_code_called_by_ours_is_waited_for(into: str) -> None:
    source = CALLED_WHEN_IT_ENDS.replace("INTO_PYTHON", INTO_PYTHON[into]).replace("LIMIT_S", str(WAIT_S))
    script = run_script(source)

    assert_clean(script)
    assert script.stdout == "ended"


def test_uncaught_exception_is_shown_and_ends_the_program() -> None:
    script = run_script(script_that_ends("raise ValueError('of the user')"))

    assert script.returncode == 1
    assert script.stderr.strip().endswith("ValueError: of the user")


def test_thread_that_ends_while_another_waits_is_no_deadlock() -> None:
    script = run_script(script_that_ends("threading.Thread(target=engine.close).start()"))

    assert_clean(script)


FROZEN_IN_THE_MIDDLE = """
    import os, signal, subprocess, sys, threading, time
    import crossrail as xr

    PEER = '''
    import sys
    import crossrail as xr

    target = xr.RegionDescriptor.from_bytes(bytes.fromhex(sys.argv[1]))
    with xr.Engine("sender", transport="shm") as engine:
        source = engine.alloc(64 << 20)
        engine.submit_write(source, target).wait(10)
        print("goes", flush=True)
        while True:
            try:
                engine.submit_write(source, target).wait(10)
            except xr.TransferError:
                break
    '''

    engine = xr.Engine("here", transport="shm")
    peers = []
    for _ in range(20):
        region = engine.alloc(64 << 20)
        peer = [sys.executable, "-c", __import__("textwrap").dedent(PEER), bytes(region.descriptor).hex()]
        peers.append(subprocess.Popen(peer, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL))
        peers[-1].stdout.readline()
        peers[-1].send_signal(signal.SIGSTOP)
        try:
            region.close(0.2)
        except xr.WaitTimeout:
            break  # it stands in the middle of a copy
        peers[-1].kill()
    threading.Thread(target=region.close, args=(None,), daemon=True).start()
    time.sleep(0.2)
    subprocess.Popen(["sh", "-c", f"sleep 3; kill -9 {peers[-1].pid}"])
    print("caught" if region.quarantined else "missed")
"""


def test_interpreter_ends_while_a_thread_waits_for_a_frozen_peer_to_leave_memory() -> None:
    script = run_script(FROZEN_IN_THE_MIDDLE)

    assert (script.returncode, script.stdout) == (0, "caught\n"), script.stderr


def test_engine_of_an_exit_handler_behind_ours_waits_as_ever() -> None:
    script = run_script("""
    import atexit

    def late():
        import crossrail as xr
        with xr.Engine("late", transport="shm") as engine:
            try:
                engine.imm_counter(1).wait(1, timeout_s=0.3)  # longer than it takes to look for signals
            except xr.WaitTimeout:
                print("waited", flush=True)

    atexit.register(late)
    import crossrail
    crossrail.Engine
    """)

    assert_clean(script)
    assert script.stdout == "waited\n"


def test_exit_handler_of_after_the_import_uses_engines_of_before_it() -> None:
    script = run_script("""
    import atexit
    import crossrail as xr

    def bye():
        engine.imm_counter(1).poll()
        print("open" if not engine.closed else "closed", flush=True)

    atexit.register(bye)  # before the first engine, and so before the modules of engines
    engine = xr.Engine("used-at-exit", transport="shm")
    """)

    assert_clean(script)
    assert script.stdout == "open\n"


def test_first_engine_is_an_exit_handlers_while_a_daemon_thread_waits() -> None:
    script = run_script("""
    import atexit, threading

    def late():
        import crossrail as xr
        engine = xr.Engine("late", transport="shm")
        began = threading.Event()

        def wait():
            began.set()
            while True:
                try:
                    engine.imm_counter(1).wait(1, timeout_s=0.01)
                except xr.WaitTimeout:
                    pass

        threading.Thread(target=wait, daemon=True).start()
        began.wait()
        print("ended", flush=True)

    atexit.register(late)
    import crossrail
    """)

    assert_clean(script)
    assert script.stdout == "ended\n"


def test_daemon_thread_with_a_new_engine_does_not_hold_up_exit_handlers_behind_ours() -> None:
    script = run_script("""
    import atexit, threading, time

    def late():
        begun.set()
        time.sleep(0.5)
        print("ended", flush=True)

    atexit.register(late)
    import crossrail as xr
    xr.Engine

    def wait_in_vain():
        begun.wait()
        xr.Engine("daemon", transport="shm").imm_counter(1).wait(1)

    begun = threading.Event()
    threading.Thread(target=wait_in_vain, daemon=True).start()
    """)

    assert_clean(script)
    assert script.stdout == "ended\n"


@pytest.mark.parametrize("call", ["counter.wait(1)", "transfer.wait()", "pool.recv()", "other.imm_counter(2).wait(1)"])
def test_daemon_threads_that_wait_when_it_ends_leave_no_traceback(call: str) -> None:
    script = run_script(f"""
    import threading
    import crossrail as xr

    def use():
        is_there.set()
        while True:
            {call}

    engine, other = (xr.Engine(name, transport="shm") for name in ("here", "there"))
    counter, pool = engine.imm_counter(1), engine.submit_recvs(4, 16)
    transfer = engine.submit_send(other.address, b"for a pool that is never there")
    for _ in range(8):
        is_there = threading.Event()
        threading.Thread(target=use, daemon=True).start()
        is_there.wait()
    """)

    assert_clean(script)
    assert script.stderr == ""


def test_other_errors_of_daemon_threads_are_still_shown_when_it_ends() -> None:
    script = run_script("""
    import atexit, threading

    def late():
        may_raise.set()
        thread.join()

    atexit.register(late)
    import crossrail as xr
    xr.Engine

    def fail():
        may_raise.wait()
        raise xr.WaitTimeout("mine")

    may_raise = threading.Event()
    thread = threading.Thread(target=fail, daemon=True)
    thread.start()
    """)

    assert_clean(script)
    assert script.stderr.endswith("crossrail.errors.WaitTimeout: mine\n")

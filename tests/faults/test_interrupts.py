"""Ctrl-C in every kind of blocking wait: KeyboardInterrupt at once, and an engine that still works."""

import signal
import subprocess
import time

import pytest

from tests.support.limits import PROGRAM_S
from tests.support.process import start_script

WAITS = {
    "counter": "engine.imm_counter(1).wait(1)",
    "counter-with-timeout": "engine.imm_counter(1).wait(1, 100)",
    "transfer": "engine.submit_send(engine.address, b'x').wait()",
    "pool": "engine.submit_recvs(1, 16).recv()",
    "connect": "engine.connect(frozen, 100)",
    "region-close": "[engine.submit_write(src, target, imm=1) for _ in range(4)]; src.close(100)",
    "engine-close": "idle = xr.Engine('idle', connect_timeout_s=100); idle.submit_send(frozen, b'x'); idle.close(None)",
    "full-queue": "[engine.submit_send(frozen, bytes(1000)) for _ in range(10**7)]",
    "asyncio": "asyncio.run(engine.imm_counter(1).wait_async(1))",
    "manual-counter": "manual.imm_counter(1).wait(1)",
    "manual-transfer": "manual.submit_send(manual.address, b'x').wait()",
    "map": "engine.map(unseen, timeout_s=None)",
}

SCRIPT = """
    import asyncio, os, signal, sys
    import crossrail as xr
    from tests.support.process import PeerProcess

    child = PeerProcess()
    there = child.open()
    frozen, target, unseen = there.address, there.memory(1000).descriptor, there.memory(1 << 20).descriptor
    engine = xr.Engine("waiting", submit_queue_depth=16, connect_timeout_s=100)
    BEFORE
    child.stop()
    manual = xr.Engine("manual", polling="manual")
    src = engine.alloc(1000)
    try:
        print("waiting", flush=True)
        WAIT
        print("returned")
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    src = engine.alloc(1000)
    engine.submit_write(src, src.descriptor, imm=9)
    engine.imm_counter(9).wait(1, 10)
    child.close()
    engine.close()
    manual.close()
    print("works")
"""


def interrupted(script: "subprocess.Popen[str]", after_s: float = 0.3) -> tuple[str, str]:
    """Sends Ctrl-C once the script says that it waits; returns what it printed."""
    assert script.stdout is not None
    assert script.stdout.readline() == "waiting\n", script.communicate(timeout=PROGRAM_S)[1]
    time.sleep(after_s)  # until it really waits; sooner would only test less
    script.send_signal(signal.SIGINT)
    try:
        out, err = script.communicate(timeout=PROGRAM_S)
    except subprocess.TimeoutExpired:
        script.send_signal(signal.SIGABRT)  # faulthandler prints where it hangs
        out, err = script.communicate(timeout=PROGRAM_S)
        raise AssertionError(f"Ctrl-C did not end the wait:\n{out}\n{err}") from None
    return out, err


@pytest.mark.parametrize("wait", WAITS)
def test_ctrl_c_ends_a_blocking_wait(wait: str) -> None:
    before = "engine.connect(frozen, 100)" if wait == "map" else "pass"
    with start_script(SCRIPT.replace("WAIT", WAITS[wait]).replace("BEFORE", before)) as script:
        out, err = interrupted(script)

    assert out.split() == ["interrupted", "works"], err
    assert script.returncode == 0, err


TAKES = {
    "counter": ("engine.imm_counter(1).wait(1, 5)", "engine.submit_write(src, src.descriptor, 0, imm=1)"),
    "pool": ("pool.recv(5)", "engine.submit_send(engine.address, b'x')"),
}


@pytest.mark.parametrize("take", TAKES)
def test_what_arrives_just_after_ctrl_c_is_not_lost(take: str) -> None:
    wait, submit = TAKES[take]
    source = f"""
        import _thread, threading
        import crossrail as xr

        engine = xr.Engine("waiting")
        src, pool = engine.alloc(1000), engine.submit_recvs(1, 16)
        waits = threading.Semaphore(0)

        def interrupt_and_submit():
            for _ in range(30):
                waits.acquire()
                _thread.interrupt_main()
                {submit}

        threading.Thread(target=interrupt_and_submit, daemon=True).start()
        for _ in range(30):
            try:
                waits.release()
                {wait}
            except KeyboardInterrupt:
                print("interrupted")
            {wait}
        engine.close()
    """
    with start_script(source) as script:
        out, err = script.communicate(timeout=PROGRAM_S)

    assert script.returncode == 0, err
    assert out.split() == ["interrupted"] * 30


@pytest.mark.parametrize(
    ("half", "far"),
    [("dispatch", "shm"), ("dispatch", "tcp"), ("combine", "shm"), ("combine", "tcp"), ("close", "tcp")],
)
def test_ctrl_c_ends_the_wait_for_a_rank_of_experts(far: str, half: str) -> None:
    source = f"""
        import os, threading, time
        import numpy as np
        import crossrail as xr
        from crossrail.moe import AllToAll, EngineGroup

        CONFIG = dict(experts=4, hidden=8, top_k=1, max_tokens=4, dtype="float32", scale_block=None,
                      out_dtype="float32", timeout_s=100, node_size=1)
        polling = "manual" if "{half}" == "close" else "adaptive"  # of the other, which nobody drives then
        engines = [
            xr.Engine(f"rank{{i}}", transport="{far}", polling=polling if i else "adaptive", peer_timeout_s=100)
            for i in range(2)
        ]
        made, is_over = {{}}, threading.Event()

        def drive():
            while not is_over.is_set():
                engines[1].progress()
                time.sleep(0.001)

        def make(i):
            made[i] = AllToAll(engines[i], EngineGroup(engines[i], [each.address for each in engines]), **CONFIG)

        driver = threading.Thread(target=drive)
        other = threading.Thread(target=make, args=(1,))
        driver.start()
        other.start()
        make(0)
        other.join()
        is_over.set()
        driver.join()
        ours, theirs = made[0], made[1]
        tokens, experts = np.arange(16, dtype=np.float32).reshape(2, 8), np.array([[3], [0]])
        weights = np.ones((2, 1), np.float32)

        sent = ours.dispatch_send(tokens, None, experts)
        if "{half}" == "close":
            print("waiting", flush=True)
            try:
                ours.close()
            except KeyboardInterrupt:
                print("interrupted", flush=True)
            os._exit(0)
        late = theirs.dispatch_send(tokens, None, experts) if "{half}" == "combine" else None
        if late is not None:
            received = ours.dispatch_recv(sent)
        print("waiting", flush=True)
        try:
            if late is None:
                ours.dispatch_recv(sent)
            else:
                ours.combine(ours.expert_output(received), received, weights)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        os._exit(0)
    """
    with start_script(source) as script:
        out, err = interrupted(script)

    assert out == "interrupted\n", err


def test_engine_whose_close_is_interrupted_is_closed() -> None:
    source = """
        import gc, threading
        import crossrail as xr
        engine = xr.Engine("waiting")
        engine.on_event(lambda event: None)
        pending = engine.submit_send(engine.address, b"x")
        print("waiting", flush=True)
        try:
            engine.close(None)
        except KeyboardInterrupt:
            print("interrupted", engine.closed, pending.status, threading.active_count())
        del engine, pending
        gc.collect()
    """
    with start_script(source) as script:
        out, err = interrupted(script)

    assert out == "interrupted True engine-closed 1\n"
    assert not err


def test_other_signals_run_their_handlers_and_the_wait_goes_on() -> None:
    source = """
        import signal
        import crossrail as xr
        engine = xr.Engine("waiting")
        src = engine.alloc(10)
        signal.signal(signal.SIGINT, lambda *_: engine.submit_write(src, src.descriptor, imm=1))
        print("waiting", flush=True)
        engine.imm_counter(1).wait(1, 15)
        engine.close()
        print("served by the handler's write")
    """
    with start_script(source) as script:
        out, err = interrupted(script)

    assert out == "served by the handler's write\n", err


def test_handler_that_raises_while_the_count_arrives_ends_the_wait_and_takes_nothing() -> None:
    source = """
        import signal
        import crossrail as xr

        class Stop(Exception):
            pass

        def handle(*_):
            engine.submit_write(src, src.descriptor, imm=1)
            engine.submit_write(src, src.descriptor, imm=2)
            other.wait(1, 15)
            while engine.stats()["imm_units_received"] < 96:
                pass
            raise Stop

        engine = xr.Engine("waiting")
        src, counter, other = engine.alloc(10), engine.imm_counter(1), engine.imm_counter(2)
        signal.signal(signal.SIGINT, handle)
        print("waiting", flush=True)
        try:
            counter.wait(1, 15)
            print("returned")
        except Stop:
            print("stopped")
        counter.wait(1, 15)
        engine.close()
        print("and nothing was taken")
    """
    with start_script(source) as script:
        out, err = interrupted(script)

    assert out == "stopped\nand nothing was taken\n", err


def test_engine_is_driven_while_a_handler_runs_in_a_wait() -> None:
    # Over tcp the target's engine places the bytes: of the thread that waits there, nothing may be needed.
    source = """
        import signal
        import crossrail as xr
        engine, sender = xr.Engine("waiting", transport="tcp"), xr.Engine("sender", transport="tcp")
        src, target = sender.alloc(10), engine.alloc(10)
        sender.connect(engine.address)
        signal.signal(signal.SIGINT, lambda *_: sender.submit_write(src, target.descriptor, imm=1).wait(10))
        print("waiting", flush=True)
        engine.imm_counter(1).wait(1, 15)
        engine.close()
        sender.close()
        print("served by the handler's write")
    """
    with start_script(source) as script:
        out, err = interrupted(script)

    assert out == "served by the handler's write\n", err


def test_engine_is_driven_while_another_thread_keeps_the_gil() -> None:
    source = """
        import ctypes, threading
        import crossrail as xr
        from tests.support.process import PeerProcess

        child = PeerProcess()
        with xr.Engine("waiting", transport="tcp", peer_timeout_s=30) as engine:
            there = child.open(transport="tcp", peer_timeout_s=1.0)
            target = engine.alloc(10)
            source = there.memory(10)
            waiter = threading.Thread(target=lambda: engine.imm_counter(1).wait(2, 30))
            there.operate("write", source, [target.descriptor], imm=1)
            waiter.start()
            stream = there.stream("write", source, [target.descriptor], imm=2)
            ctypes.PyDLL(None).sleep(3)  # unlike CDLL's, its calls keep the GIL
            stopped = child.call("stop_stream", stream=stream)
            print(stopped["failures"])
            there.operate("write", source, [target.descriptor], imm=1)
            waiter.join(30)
        child.close()
    """
    with start_script(source) as script:
        out, err = script.communicate(timeout=PROGRAM_S)

    assert out == "[]\n", err


def test_ctrl_c_ends_a_program_with_transfers_pending() -> None:
    source = """
        import crossrail as xr
        engine = xr.Engine("waiting")
        transfers = [engine.submit_send(engine.address, b"x") for _ in range(100)]
        print("waiting", flush=True)
        transfers[0].wait()
    """
    with start_script(source) as script:
        _, err = interrupted(script)

    assert script.returncode in (1, 130, -signal.SIGINT)
    assert "KeyboardInterrupt" in err
    assert "leaked" not in err and "Fatal" not in err

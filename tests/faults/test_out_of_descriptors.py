"""A process that runs out of file descriptors: what fails says so, and all is well once there are some again."""

import re

import pytest

from tests.conftest import PeerFactory
from tests.contract.setups import why_not
from tests.support.limits import SLOWNESS
from tests.support.process import assert_clean, run_script

# Held: all that the limit allows, but `left`.
STARVING = """
    import os, resource, sys
    import crossrail as xr

    xr.Engine  # its module is loaded now, as long as there are some
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
    held = []

    def starve(left):
        try:
            while True:
                held.append(os.dup(0))
        except OSError:
            pass
        for _ in range(left):
            os.close(held.pop())

    def feed():
        while held:
            os.close(held.pop())
"""

CONNECTS = (
    STARVING
    + """
    with xr.Engine("b", transport="shm") as b:
        source_of = lambda engine: engine.register(bytearray(b"x" * 1000), access="local")
        allocated, private = b.alloc(1000), b.register(bytearray(1000))
        events, counted = [], 0
        b.on_event(events.append)
        for left in range(16):
            events.clear()
            with xr.Engine("a", transport="shm", connect_timeout_s=TIMEOUT) as a:
                source = source_of(a)
                starve(left)
                for target in (allocated, private):
                    try:
                        a.submit_write(source, target.descriptor, imm=1).wait(20)
                        counted += 1
                    except xr.TransferError as error:
                        said = " ".join([str(error), *(event.detail for event in events)])
                        assert "file descriptors" in said or "open files" in said, (left, said)
                feed()
                a.forget_peer(b.address)  # b, which is in this process, may have kept silent for want of them
                for target in (allocated, private):
                    a.submit_write(source, target.descriptor, imm=1).wait(20)
                    counted += 1
        b.imm_counter(1).wait(counted, 20)
        assert b.imm_counter(1).poll() == 0
        print(counted)
"""
)


def test_shared_memory_peers_that_run_out_say_so_and_come_back() -> None:
    script = run_script(CONNECTS.replace("TIMEOUT", str(1.0 * SLOWNESS)))

    assert_clean(script)
    assert int(script.stdout) > 32, "nothing but the second tries succeeded"


TOLD_ONCE = (
    STARVING
    + """
    import socket, time

    def newcomer():
        with xr.Engine("a", transport="shm") as a:
            a.connect(b.address, 20)

    def open_here():
        return len(os.listdir("/proc/self/fd"))

    with xr.Engine("b", transport="shm") as b:
        told = []
        b.on_event(told.append)
        newcomer()
        deadline = time.monotonic() + 20
        at_rest, since = open_here(), time.monotonic()
        while time.monotonic() < since + 0.5:  # a newcomer leaves something behind for a while
            assert time.monotonic() < deadline
            time.sleep(0.05)
            if open_here() != at_rest:
                at_rest, since = open_here(), time.monotonic()
        for _ in range(2):
            deadline = time.monotonic() + 20
            caller = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            starve(0)
            told.clear()
            caller.connect(f"\\0crossrail.{b.address.incarnation}")
            while not told:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            time.sleep(0.5)
            print([event.kind for event in told])
            feed()
            newcomer()
            caller.close()
            while open_here() > at_rest:  # or what b gives back ends the next shortage at once
                assert time.monotonic() < deadline
                time.sleep(0.01)
"""
)


def test_peers_that_cannot_be_let_in_are_told_once_each_time() -> None:
    script = run_script(TOLD_ONCE)

    assert_clean(script)
    assert script.stdout.splitlines() == ["['protocol-error']"] * 2


COMES_BACK = (
    STARVING
    + """
    import time

    with xr.Engine("b", transport="shm") as b, xr.Engine("a", transport="shm") as a:
        a.connect(b.address, 20)
        source, target = a.alloc(1000), b.alloc(1000)
        starve(0)
        try:
            a.submit_write(source, target.descriptor).wait(20)
        except xr.TransferError as error:
            print(error.error_code, "file descriptors" in str(error))
        feed()
        deadline = time.monotonic() + 20
        while True:
            try:
                a.submit_write(source, target.descriptor, imm=1).wait(20)
                break
            except xr.TransferError as error:
                assert time.monotonic() < deadline, error
                time.sleep(0.01)
        b.imm_counter(1).wait(1, 20)
"""
)


def test_a_region_that_could_not_be_mapped_is_mapped_later() -> None:
    script = run_script(COMES_BACK)

    assert_clean(script)
    assert script.stdout == "transfer-error True\n"


VERDICT = (
    STARVING
    + """
    import time

    with xr.Engine("asker", transport="shm") as asker, xr.Engine("target", transport="shm") as target:
        told = []
        target.on_event(told.append)
        source, memory = asker.alloc(1000), target.alloc(1000)
        asker.submit_write(source, memory.descriptor).wait(20)
        starve(0)
        transfer = asker.submit_write(source, memory.descriptor, imm=1, verify=True)
        target.imm_counter(1).wait(1, 20)
        deadline = time.monotonic() + 20
        while not told:  # tries to connect to the asker, who is to have the answer
            assert time.monotonic() < deadline, told
            time.sleep(0.01)
        time.sleep(0.5)  # more of them, which are told of no more
        assert not transfer.done and len(told) == 1
        feed()
        transfer.wait(15)
        print({event.kind for event in told if "file descriptors" in event.detail or "open files" in event.detail})
"""
)


def test_checked_write_is_answered_once_there_are_some_again() -> None:
    script = run_script(VERDICT)

    assert_clean(script)
    assert script.stdout == "{'peer-lost'}\n"


# Each engine tells peers which host it is on: by the first answer that the process ever got.
LATE = (
    STARVING
    + """
    target = xr.RegionDescriptor.from_bytes(bytes.fromhex("DESCRIPTOR"))
    refused = set()
    for left in range(30):
        starve(left)
        try:
            xr.Engine("early", transport="shm").close()
        except xr.TransportError as error:
            refused.add(str(error))
        feed()
    with xr.Engine("late", transport="shm") as late:
        late.submit_write(late.alloc(100), target, imm=7).wait(20)
    print("\\n".join(sorted(refused)))
"""
)


def test_engine_opened_when_there_are_none_left_forgets_that(spawn_peer: PeerFactory) -> None:
    there = spawn_peer().open(transport="shm")
    target = there.memory(100)

    script = run_script(LATE.replace("DESCRIPTOR", target.descriptor.to_bytes().hex()))

    assert_clean(script)
    there.expect_count(7, 1)
    refused = script.stdout.splitlines()
    assert any("which host" in line for line in refused), refused
    for line in refused:
        assert re.search("open files|file descriptors", line), line


@pytest.mark.skipif(bool(why_not("ofi:tcp")), reason=why_not("ofi:tcp") or "-")
def test_ofi_that_runs_out_says_so_and_not_that_the_peer_is_gone() -> None:
    script = run_script(
        STARVING
        + """
    options = {"transport": "ofi:tcp", "rails": ["127.0.0.1"], "connect_timeout_s": 1.0}
    with xr.Engine("a", **options) as a, xr.Engine("b", **options) as b:
        src, dst = a.alloc(1000), b.alloc(1000)
        starve(0)
        try:
            a.submit_write(src, dst.descriptor).wait(20)
        except xr.PeerLost as error:
            said = str(error)
        feed()
        a.forget_peer(b.address)
        a.submit_write(src, dst.descriptor).wait(20)
        print(said)
"""
    )

    assert_clean(script)
    assert re.search("Too many open files|limit on open files|file descriptors", script.stdout), script.stdout


UNMADE = (
    STARVING
    + """
    options = {"transport": "TRANSPORT", "connect_timeout_s": 1.0}
    if "TRANSPORT" != "shm":
        options["rails"] = ["127.0.0.1"]
    with xr.Engine("a", **options) as a, xr.Engine("b", **options) as b:
        told = []
        a.on_event(lambda event: told.append(event.kind))
        src, dst = a.alloc(1000), b.alloc(1000)
        watcher = a.alloc_watcher(lambda old, new: None)
        starve(0)
        for submit in (lambda: a.submit_write(src, dst.descriptor), lambda: a.submit_send(b.address, b"x")):
            try:
                submit().wait(20)
            except xr.PeerLost as error:
                print(str(error).endswith("Next: try again once there is room"))
        print(a.peer_state(b.address))
        feed()
        waiting = a.submit_write(src, dst.descriptor, imm=1, trigger=(watcher, 1))
        a.connect(b.address, 20)
        a.submit_write(src, dst.descriptor, imm=1).wait(20)
        print(a.peer_state(b.address), waiting.done)
        watcher.add()
        waiting.wait(20)
        b.imm_counter(1).wait(2, 20)
        b.close()
        try:
            a.submit_write(src, dst.descriptor).wait(20)
        except xr.PeerLost as error:
            print("forget_peer" in str(error))
    print(told)
"""
)


@pytest.mark.parametrize(
    "transport",
    [
        "shm",
        "tcp",
        pytest.param("ofi:tcp", marks=pytest.mark.skipif(bool(why_not("ofi:tcp")), reason=why_not("ofi:tcp") or "-")),
    ],
)
def test_peer_that_was_not_reached_for_want_of_descriptors_is_tried_anew(transport: str) -> None:
    """It is there: what is submitted once there are some again reaches it, and nothing begins before its trigger."""
    script = run_script(UNMADE.replace("TRANSPORT", transport))

    assert_clean(script)
    assert script.stdout.splitlines() == [
        "True",
        "True",
        "lost",
        "connected False",
        "True",
        "['peer-lost', 'peer-connected', 'peer-left']",
    ]


CALLS = (
    STARVING
    + """
    import asyncio, contextlib

    def attempt(call):
        try:
            print(call())
        except xr.CrossrailError as error:
            print(type(error).__name__, "ulimit -n" in str(error))

    async def finished(transfer):
        return await transfer

    with xr.Engine("b", transport="shm") as b, xr.Engine("a", transport="shm") as a:
        a.connect(b.address, 20)
        transfer = a.submit_send(b.address, b"x")
        with b.submit_recvs(1, 100) as pool, contextlib.closing(asyncio.new_event_loop()) as loop:
            pool.recv(20)
            transfer.wait(20)
            memory = b.alloc(1000)
            starve(0)
            attempt(lambda: loop.run_until_complete(finished(transfer)))
            attempt(lambda: transfer.add_done_callback(lambda _: None))
            attempt(lambda: a.require(b.address, "shm"))
            attempt(lambda: a.map(memory.descriptor, 20))
            feed()
"""
)


def test_calls_that_need_some_say_so_in_our_words() -> None:
    """What is awaited or called back when it is over needs none, though nothing of it was imported before."""
    script = run_script(CALLS)

    assert_clean(script)
    assert script.stdout.splitlines() == ["None", "None", "TransportError True", "TransferError True"]

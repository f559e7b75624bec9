"""Sandboxes that show no /proc, or none of the other process, or keep from its sockets."""

import ctypes
import os
import platform
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

import crossrail as xr
from tests.support.limits import PROGRAM_S, WAIT_S
from tests.support.process import REPOSITORY, run_script

WITHOUT_PROC = ["unshare", "--mount", "sh", "-c", 'umount -l /proc && exec "$@"', "--"]
STORE = """
    import sys
    from pathlib import Path
    from crossrail.cli.files.inbox import Inbox

    for force in (False, True):
        with Inbox(Path(sys.argv[1])) as inbox:
            part = inbox.create("new", 3, force=force)
            part.append(memoryview(b"abc"))
            part.commit(0o644)
"""
OTHER_PIDS = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
FIRST_OUTLIVED = ["sh", "-c", '"$@"; read _', "--"]  # whose end is not that of all processes of the namespace
HOST = """
    import os, signal, sys
    import crossrail as xr

    with xr.Engine("confined", transport="shm") as engine:
        print(engine.address.to_bytes().hex(), flush=True)
        sys.stdin.readline()
        if os.fork() == 0:
            signal.pause()  # with copies of the engine's descriptors
        os.kill(os.getpid(), signal.SIGKILL)
"""
VISITOR = """
    import queue, sys
    import crossrail as xr

    losses = queue.Queue()
    with xr.Engine("visitor", transport="shm") as engine:
        engine.on_event(lambda event: event.kind == "peer-lost" and losses.put(event.detail))
        engine.connect(xr.Address.from_bytes(bytes.fromhex(sys.argv[1])), 15)
        print("connected", flush=True)
        print(losses.get(timeout=15))
"""
WRITE = """
    import os
    import crossrail as xr

    read_end, write_end = os.pipe()
    done_read, done_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        with xr.Engine("target", rails=["127.0.0.1"]) as engine:
            region = engine.alloc(64)
            os.write(write_end, region.descriptor.to_bytes())
            engine.imm_counter(1).wait(1, 15)
            os.read(done_read, 1)
        os._exit(0)
    with xr.Engine("writer", rails=["127.0.0.1"]) as engine:
        target = xr.RegionDescriptor.from_bytes(os.read(read_end, 1000))
        engine.submit_write(engine.alloc(64), target, imm=1).wait(15)
        print(engine.explain(target.owner))
    os.write(done_write, b".")
    assert os.waitpid(pid, 0)[1] == 0
"""


FORBIDDEN = """
    import ctypes, struct, sys
    import crossrail as xr
    xr.Engine, xr.TransportError  # loads numpy, which has threads of its own

    PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, FILTER, EPERM = 38, 22, 2, 1
    LOAD, JUMP_IF_EQUAL, RETURN, ALLOW, ERRNO = 0x20, 0x15, 0x06, 0x7FFF0000, 0x00050000
    call = int(sys.argv[1])
    steps = [(LOAD, 0, 0, 0), (JUMP_IF_EQUAL, 0, 1, call), (RETURN, 0, 0, ERRNO | EPERM), (RETURN, 0, 0, ALLOW)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("H6xQ", len(steps), ctypes.addressof(code)))
    libc = ctypes.CDLL(None)
    assert libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 and libc.prctl(PR_SET_SECCOMP, FILTER, program) == 0
    for transport, rails in (("auto", 1), ("tcp", ["127.0.0.1"])):
        try:
            with xr.Engine(transport=transport, rails=rails) as engine:
                print(engine.address.transports)
        except xr.TransportError as error:
            print(error)
"""
MEMFD_CREATE, CLONE3 = 319, 435


EXPLAIN = """
    import sys
    import crossrail as xr

    with xr.Engine("there", rails=["127.0.0.1"]) as engine:
        print(engine.explain(xr.Address.from_bytes(bytes.fromhex(sys.argv[1]))).reason)
        print(engine.address.to_bytes().hex())
"""


T = TypeVar("T")


def only_if(is_possible: bool) -> Callable[[T], T | None]:
    """What this kernel, or this user, cannot do is no test here: CI allows no skips."""
    return lambda test: test if is_possible else None


def can_run(command: list[str]) -> bool:
    return subprocess.run([*command, "true"], capture_output=True).returncode == 0


def has_scopes() -> bool:
    """Whether Landlock can keep processes from abstract unix sockets: its version 6."""
    landlock_create_ruleset, version_is_asked = 444, 1
    return int(ctypes.CDLL(None).syscall(landlock_create_ruleset, None, ctypes.c_size_t(0), version_is_asked)) >= 6


CONFINED = """
    import ctypes, struct, sys
    import crossrail as xr

    transport, target = sys.argv[1], xr.RegionDescriptor.from_bytes(bytes.fromhex(sys.argv[2]))
    CREATE_RULESET, RESTRICT_SELF, ABSTRACT_UNIX_SOCKETS, PR_SET_NO_NEW_PRIVS = 444, 446, 1, 38
    libc = ctypes.CDLL(None)
    rules = struct.pack("QQQ", 0, 0, ABSTRACT_UNIX_SOCKETS)
    ruleset = libc.syscall(CREATE_RULESET, rules, ctypes.c_size_t(len(rules)), 0)
    assert ruleset >= 0 and libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    assert libc.syscall(RESTRICT_SELF, ruleset, 0) == 0
    with xr.Engine("confined", transport=transport, rails=1 if transport == "shm" else ["127.0.0.1"]) as engine:
        try:
            engine.submit_write(engine.alloc(64), target, 64).wait(20)
            print(engine.explain(target.owner).reason)
        except xr.PeerLost as error:
            print(error)
"""


@only_if(has_scopes())
@pytest.mark.parametrize(
    ("transport", "said"),
    [
        ("auto", "it is on this host; no shm: a security policy (AppArmor, SELinux, Landlock) forbids this process to"),
        ("shm", "forbids this process to connect to the peer's unix socket; allow it, or use transport='tcp'"),
    ],
)
def test_who_may_not_connect_to_the_peers_socket_uses_tcp_or_says_so(transport: str, said: str) -> None:
    with xr.Engine("target", rails=["127.0.0.1"]) as engine:
        region = engine.alloc(64)

        script = run_script(CONFINED, transport, region.descriptor.to_bytes().hex(), timeout_s=WAIT_S)

    assert said in script.stdout, script


@only_if(can_run(WITHOUT_PROC))
def test_without_proc_a_peer_of_the_same_host_is_reached_by_tcp() -> None:
    script = subprocess.run(
        [*WITHOUT_PROC, sys.executable, "-W", "ignore", "-c", textwrap.dedent(WRITE)],
        capture_output=True,
        text=True,
        timeout=PROGRAM_S,
        cwd=REPOSITORY,
    )

    assert script.returncode == 0, script
    assert "over tcp: connected" in script.stdout
    assert "no shm: this process sees no /proc" in script.stdout


@only_if(can_run(WITHOUT_PROC))
def test_whose_host_cannot_be_told_is_not_said_to_be_on_another() -> None:
    def run(script: str, address: xr.Address) -> str:
        command = [*WITHOUT_PROC, sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)]
        told = subprocess.run(
            [*command, address.to_bytes().hex()], capture_output=True, text=True, timeout=PROGRAM_S, cwd=REPOSITORY
        )
        assert told.returncode == 0, told
        return told.stdout

    with xr.Engine("here", rails=["127.0.0.1"]) as engine:
        ours, theirs = run(EXPLAIN, engine.address).splitlines()

        assert ours == "it is on an unknown host (this process cannot read its own boot id in /proc)"
        there = xr.Address.from_bytes(bytes.fromhex(theirs))
        reason = "it is on an unknown host (it cannot read its boot id in /proc)"
        assert engine.explain(there).reason == reason


def has_peer_pidfd() -> bool:
    """Whether a socket tells who is at its other end by more than a number: Linux 6.5."""
    here, there = socket.socketpair(socket.AF_UNIX)
    with here, there:
        try:
            os.close(here.getsockopt(socket.SOL_SOCKET, 77))  # SO_PEERPIDFD
        except OSError:
            return False
    return True


def has_seccomp() -> bool:
    return platform.machine() == "x86_64" and Path("/proc/sys/kernel/seccomp").exists()


@only_if(has_seccomp())
def test_without_shared_memory_auto_names_tcp_which_goes_on() -> None:
    script = run_script(FORBIDDEN, str(MEMFD_CREATE))

    assert script.returncode == 0, script
    refused, opened = script.stdout.splitlines()
    assert refused.startswith("memfd_create: cannot make shared memory: Operation not permitted")
    assert refused.endswith("; or open the engine with transport='tcp', which needs no shared memory")
    assert opened == "('tcp',)"


@only_if(has_seccomp())
def test_where_no_thread_may_start_neither_shared_memory_nor_limits_are_blamed() -> None:
    script = run_script(FORBIDDEN, str(CLONE3))

    assert script.returncode == 0, script
    refused = script.stdout.splitlines()
    assert len(refused) == 2
    for said in refused:
        assert said.startswith("pthread_create: cannot start a thread of the engine: Operation not permitted")
        assert "clone3" in said and "Docker before 20.10.10" in said
        assert "ulimit" not in said and "shared memory" not in said


@only_if(can_run(WITHOUT_PROC))
def test_without_proc_serve_stores_what_is_pushed(tmp_path: Path) -> None:
    command = [*WITHOUT_PROC, sys.executable, "-c", textwrap.dedent(STORE), str(tmp_path)]
    script = subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM_S, cwd=REPOSITORY)

    assert script.returncode == 0, script
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("new", b"abc")]


@only_if(can_run(OTHER_PIDS) and has_peer_pidfd())
def test_end_of_a_process_whose_pid_is_not_seen_is_noticed_though_its_child_holds_its_sockets() -> None:
    def start(*command: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [*OTHER_PIDS, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY
        )

    python = [sys.executable, "-W", "ignore", "-c"]
    with start(*FIRST_OUTLIVED, *python, textwrap.dedent(HOST)) as host:
        assert host.stdin is not None and host.stdout is not None
        address = host.stdout.readline().strip()
        with start(*python, textwrap.dedent(VISITOR), address) as visitor:
            try:
                assert visitor.stdout is not None
                while (line := visitor.stdout.readline()) != "connected\n":
                    assert line.startswith("peer-connected"), line
                host.stdin.write("end\n")
                host.stdin.flush()
                said, _ = visitor.communicate(timeout=PROGRAM_S)
            finally:
                visitor.kill()
                host.kill()
    assert said == "its process, of another pid namespace, exited\n"

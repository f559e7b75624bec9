"""Shared memory is given to processes of the same user, and to root's."""

import contextlib
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

import crossrail as xr
from tests.support.limits import PROGRAM_S, WAIT_S, eventually
from tests.support.process import REPOSITORY, run_script

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, which takes root")

WRITE = """
    import os, sys
    import crossrail as xr
    xr.Engine, xr.PeerLost, xr.RegionDescriptor  # loads all of it, while this process may read it

    os.setgid(65534)
    os.setuid(65534)
    target = xr.RegionDescriptor.from_bytes(bytes.fromhex(sys.argv[1]))
    with xr.Engine("intruder", transport=sys.argv[2], rails=1 if sys.argv[2] == "shm" else ["127.0.0.1"]) as engine:
        source = engine.alloc(64)
        try:
            engine.submit_write(source, target, 64).wait(20)
            print(engine.explain(target.owner).reason)
        except xr.PeerLost as error:
            print(error)
"""


def test_root_gives_its_memory_to_no_other_user() -> None:
    memory = np.full(64, 7, np.uint8)
    with xr.Engine("root's", transport="shm") as engine:
        region = engine.register(memory)

        answer = run_script(WRITE, region.descriptor.to_bytes().hex(), "shm", timeout_s=WAIT_S)

    assert "it belongs to user 0, and this process to user 65534" in answer.stdout, answer
    assert "transport='tcp'" in answer.stdout
    assert (memory == 7).all()


KNOCK = """
    import os, socket, sys

    os.setgid(65534)
    os.setuid(65534)
    for _ in range(int(sys.argv[2])):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as knocking:
            knocking.settimeout(20)
            knocking.connect("\\0" + sys.argv[1])
            try:
                print("answered" if knocking.recv(1) else "hung up")
            except ConnectionError:
                print("hung up")
"""


REFUSED = "refused a connection of user 65534: shm is for processes of one user, and for root's"


def own_listener() -> str:
    """Name of the only socket of this process that engines listen at: everybody on the host can read it, as here."""
    own = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself
            own.add(os.fstat(int(fd)).st_ino)
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[-1].startswith("@crossrail.") and int(fields[-2]) in own:
            return fields[-1].removeprefix("@")
    raise AssertionError("no engine listens in this process")


def test_who_does_not_ask_first_is_hung_up_on() -> None:
    said: list[str] = []
    with xr.Engine("root's", transport="shm") as engine:
        engine.on_event(lambda event: said.append(event.detail))
        answer = run_script(KNOCK, own_listener(), "1", timeout_s=WAIT_S)

        eventually(lambda: said, "the engine tells of it")

    assert answer.stdout == "hung up\n", answer
    assert said == [REFUSED]


def test_who_comes_again_and_again_fills_no_log() -> None:
    many = 500
    said: list[str] = []
    with xr.Engine("root's", transport="shm") as engine:
        engine.on_event(lambda event: said.append(event.detail))
        answer = run_script(KNOCK, own_listener(), str(many), timeout_s=WAIT_S)

        eventually(lambda: said, "the engine tells of it")

    assert answer.stdout == "hung up\n" * many, answer
    assert said[0] == REFUSED
    assert all("earlier refusals" in again for again in said[1:])  # one a minute
    assert len(said) <= many // 10


@pytest.mark.parametrize(
    ("transport", "reason"),
    [
        ("tcp", "requested by transport='tcp'"),
        ("auto", "it is on this host; no shm: it belongs to user 0, and this process to user 65534"),
    ],
)
def test_another_users_process_reaches_root_by_tcp(transport: str, reason: str) -> None:
    memory = np.full(64, 7, np.uint8)
    with xr.Engine("root's", transport=transport, rails=["127.0.0.1"]) as engine:
        region = engine.register(memory)

        answer = run_script(WRITE, region.descriptor.to_bytes().hex(), transport, timeout_s=WAIT_S)

    assert answer.stdout.startswith(reason), answer
    assert (memory == 0).all()


# Both are process 1 of a pid namespace of their own, as in two containers of one pod.
CONTAINER = ["unshare", "--pid", "--fork", "--mount-proc"]
SERVE = """
    import os, sys
    import crossrail as xr
    xr.Engine, xr.PeerLost, xr.RegionDescriptor  # loads all of it, while this process may read it

    os.setgid(int(sys.argv[1]))
    os.setuid(int(sys.argv[1]))
    with xr.Engine("served", rails=["127.0.0.1"]) as engine:
        engine.on_event(lambda event: print("event:", event.detail, flush=True))
        region = engine.alloc(64)
        print(region.descriptor.to_bytes().hex(), flush=True)
        sys.stdin.readline()
"""


@pytest.mark.skipif(subprocess.run([*CONTAINER, "true"], capture_output=True).returncode != 0, reason="needs unshare")
def test_users_with_a_pid_namespace_each_reach_each_other_by_tcp() -> None:
    served = subprocess.Popen(
        [*CONTAINER, sys.executable, "-c", textwrap.dedent(SERVE), "65533"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
    )
    try:
        assert served.stdout is not None
        descriptor = served.stdout.readline().strip()
        answer = subprocess.run(
            [*CONTAINER, sys.executable, "-c", textwrap.dedent(WRITE), descriptor, "auto"],
            capture_output=True,
            text=True,
            timeout=PROGRAM_S,
            cwd=REPOSITORY,
        )
        said, _ = served.communicate("\n", WAIT_S)
    finally:
        served.kill()
        served.wait()
    assert answer.stdout.startswith(
        "it is on this host; no shm: it belongs to user 65533, and this process to user 65534"
    ), answer
    assert "refused" not in said


# As in rootless containers on the host's network: each user is alone in a user namespace, as `inside`. "unmapped": it
# knows nobody. "host": no namespace.
OF_ITS_OWN = """
    import ctypes, os, sys
    import crossrail as xr
    xr.Engine, xr.PeerLost, xr.RegionDescriptor  # loads all of it, while this process may read it

    CLONE_NEWUSER, PR_SET_DUMPABLE = 0x10000000, 4
    outside, inside = int(sys.argv[1]), sys.argv[2]
    libc = ctypes.CDLL(None)
    os.setgroups([])
    os.setresgid(outside, outside, outside)
    os.setresuid(outside, outside, outside)
    libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # its maps are its own again
    if inside != "host":
        assert libc.unshare(CLONE_NEWUSER) == 0
    if inside not in ("host", "unmapped"):
        open("/proc/self/uid_map", "w").write(f"{inside} {outside} 1")
        open("/proc/self/setgroups", "w").write("deny")
        open("/proc/self/gid_map", "w").write(f"{inside} {outside} 1")
    with xr.Engine("contained", rails=["127.0.0.1"]) as engine:
        if len(sys.argv) == 3:
            region = engine.alloc(64)
            print(region.descriptor.to_bytes().hex(), flush=True)
            sys.stdin.readline()
        else:
            target = xr.RegionDescriptor.from_bytes(bytes.fromhex(sys.argv[3]))
            engine.submit_write(engine.alloc(64), target, 64).wait(20)
            print(engine.explain(target.owner).reason)
"""

needs_user_namespaces = pytest.mark.skipif(
    subprocess.run(["unshare", "--user", "true"], capture_output=True).returncode != 0, reason="unshare"
)


def reason_between(server: tuple[int, str], client: tuple[int, str]) -> str:
    """How the client, (user, number inside), reached the server."""
    # A process of several threads enters no user namespace.
    command = ["env", "OPENBLAS_NUM_THREADS=1", sys.executable, "-c", textwrap.dedent(OF_ITS_OWN)]
    served = subprocess.Popen(
        [*command, *map(str, server)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY
    )
    try:
        assert served.stdout is not None
        descriptor = served.stdout.readline().strip()
        answer = subprocess.run(
            [*command, *map(str, client), descriptor],
            capture_output=True,
            text=True,
            timeout=PROGRAM_S,
            cwd=REPOSITORY,
        )
        served.communicate("\n", WAIT_S)
    finally:
        served.kill()
        served.wait()
    return answer.stdout + answer.stderr


@needs_user_namespaces
@pytest.mark.parametrize("inside", ["0", "65534", "1000", "unmapped"])
def test_users_with_a_user_namespace_each_reach_each_other_by_tcp(inside: str) -> None:
    reason = reason_between(server=(65532, inside), client=(65533, inside))

    assert reason.startswith("it is on this host; no shm: it belongs to user 65534"), reason


@needs_user_namespaces
@pytest.mark.parametrize("user", [0, 65533])
@pytest.mark.parametrize("inside", ["65534", "unmapped"])
def test_a_user_is_reached_by_tcp_in_a_user_namespace_that_does_not_know_him(user: int, inside: str) -> None:
    reason = reason_between(server=(user, inside), client=(user, "host"))

    assert "whom its user namespace does not know or calls nobody: shm is for processes of one user" in reason, reason


@needs_user_namespaces
@pytest.mark.parametrize("inside", ["0", "1000"])
def test_a_user_is_reached_by_shared_memory_in_a_user_namespace_that_knows_him(inside: str) -> None:
    reason = reason_between(server=(65533, inside), client=(65533, "host"))

    assert reason.startswith("same host: shared memory"), reason

"""Sandboxes that show no /proc, or none of the other process."""

import subprocess
import sys
import textwrap

import pytest

from tests.support.limits import WAIT_S
from tests.support.process import REPOSITORY

WITHOUT_PROC = ["unshare", "--mount", "sh", "-c", 'umount -l /proc && exec "$@"', "--"]
OTHER_PIDS = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
HOST = """
    import sys
    import crossrail as xr

    with xr.Engine("confined") as engine:
        print(engine.address.to_bytes().hex(), flush=True)
        sys.stdin.readline()
"""
VISITOR = """
    import sys, threading
    import crossrail as xr

    is_lost = threading.Event()
    with xr.Engine("visitor") as engine:
        engine.on_event(lambda event: (print(event.kind, event.detail), event.kind == "peer-lost" and is_lost.set()))
        engine.connect(xr.Address.from_bytes(bytes.fromhex(sys.argv[1])), 15)
        print("connected", flush=True)
        assert is_lost.wait(15)
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


@pytest.mark.skipif(
    subprocess.run([*WITHOUT_PROC, "true"], capture_output=True).returncode != 0, reason="needs unshare"
)
def test_without_proc_a_peer_of_the_same_host_is_reached_by_tcp() -> None:
    script = subprocess.run(
        [*WITHOUT_PROC, sys.executable, "-W", "ignore", "-c", textwrap.dedent(WRITE)],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        cwd=REPOSITORY,
    )

    assert script.returncode == 0, script
    assert "over tcp: connected" in script.stdout
    assert "no shm: this process sees no /proc" in script.stdout


@pytest.mark.skipif(subprocess.run([*OTHER_PIDS, "true"], capture_output=True).returncode != 0, reason="needs unshare")
def test_a_process_whose_pid_is_not_seen_has_none_in_what_is_said_of_its_end() -> None:
    def start(script: str, *arguments: str) -> subprocess.Popen[str]:
        command = [*OTHER_PIDS, sys.executable, "-c", textwrap.dedent(script), *arguments]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)

    with start(HOST) as host:
        assert host.stdout is not None
        with start(VISITOR, host.stdout.readline().strip()) as visitor:
            try:
                assert visitor.stdout is not None
                while (line := visitor.stdout.readline()) != "connected\n":
                    assert line.startswith("peer-connected"), line
                host.kill()
                said, _ = visitor.communicate(timeout=WAIT_S)
            finally:
                visitor.kill()
                host.kill()
    assert "peer-lost its process, of another pid namespace, exited" in said

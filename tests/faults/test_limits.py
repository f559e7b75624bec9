"""What the system does not give any more is an error that names it, and what to do; what there was before goes on."""

import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support.limits import PROGRAM_S
from tests.support.process import REPOSITORY, run_script

MOVES = """
    import pathlib, resource
    import crossrail as xr

    def room_bytes():
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
        return pages * 4096 + (256 << 20)

    with xr.Engine("a", transport="shm") as a, xr.Engine("b", transport="shm") as b:
        source, target = a.alloc(1000), b.alloc(1000)
        a.submit_write(source, target.descriptor, imm=1).wait(10)
        before = resource.getrlimit(resource.LIMIT)
        resource.setrlimit(resource.LIMIT, (SOFT, before[1]))
        try:
            REFUSED
        except xr.TransportError as error:
            print(error)
        a.submit_write(source, target.descriptor, imm=1).wait(10)
        b.imm_counter(1).wait(2, timeout_s=10)
        print("and the others go on")
        resource.setrlimit(resource.LIMIT, before)  # what counts lines of this process writes files at its end
"""

CASES = {
    # The kernel wants room for a whole stack, of which the shell says how long it is.
    "threads": (
        ("RLIMIT_AS", "room_bytes()"),
        "xr.Engine('c', transport='shm')",
        "cannot start a thread of the engine: .*ulimit",
    ),
    "thread-of-callbacks": (
        ("RLIMIT_AS", "room_bytes()"),
        "a.on_event(print)",
        "cannot start the thread of the engine's callbacks: .*ulimit",
    ),
    "address-space": (
        ("RLIMIT_AS", "room_bytes()"),
        "a.alloc(1 << 30)",
        "no address space for 1073741824 bytes: .*ulimit -v",
    ),
    "address-space-of-private-memory": (
        ("RLIMIT_AS", "room_bytes()"),
        "with xr.Engine('c', transport='tcp') as c: c.alloc(1 << 30)",
        "cannot allocate 1073741824 bytes: .*ulimit -v",
    ),
    "descriptors": (
        ("RLIMIT_NOFILE", "3"),
        "a.alloc(1 << 20)",
        "cannot make shared memory: .*ulimit -n.*fewer, longer regions",
    ),
    "descriptors-for-the-first-engine-of-all-transports": (
        ("RLIMIT_NOFILE", "3"),
        "xr.Engine('c')",
        "Too many open files.*ulimit -n",
    ),
    "file-size": (
        ("RLIMIT_FSIZE", "0"),
        "a.alloc(1 << 20)",
        "cannot size shared memory to 1048576 bytes: .*ulimit -f",
    ),
}


@pytest.mark.no_sanitizer  # they take terabytes of address space
@pytest.mark.parametrize("case", CASES)
def test_limit_of_the_system_is_named(case: str) -> None:
    (limit, soft), refused, words = CASES[case]
    script = textwrap.dedent(MOVES)
    for name, value in {"LIMIT": limit, "SOFT": soft, "REFUSED": refused}.items():
        script = script.replace(name, value)
    large_stacks = ["bash", "-c", 'ulimit -s 1048576 && exec "$@"', "-"]  # KiB: of each thread, 1 GiB
    run = subprocess.run(
        [*(large_stacks if "thread" in case else []), sys.executable, "-W", "error", "-c", script],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        timeout=PROGRAM_S,
    )
    assert run.returncode == 0 and not run.stderr, run.stdout + run.stderr
    told, rest = run.stdout.splitlines()
    assert rest == "and the others go on"
    assert re.search(words, told), told


NO_THREAD = """
    import pathlib, resource
    import crossrail as xr

    with xr.Engine("a", transport="shm") as a, xr.Engine("b", transport="shm") as b:
        source, target = a.alloc(1000), b.alloc(1000)
        done = a.submit_write(source, target.descriptor, imm=1)
        done.wait(10)
        b.imm_counter(1).wait(1, 10)
        a.submit_write(source, target.descriptor, imm=1).wait(10)
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + (256 << 20), resource.RLIM_INFINITY))
        ran = []
        for ask in (
            lambda: done.add_done_callback(lambda _: ran.append("done")),
            lambda: b.imm_counter(1).on_count(1, lambda: ran.append("count")),
            lambda: b.submit_recvs(1, 100, lambda _: ran.append("message")),
            lambda: b.alloc_watcher(lambda old, new: ran.append("word")),
            lambda: b.on_event(lambda _: ran.append("event")),
        ):
            try:
                ask()
                print("taken")
            except xr.TransportError:
                pass
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        b.imm_counter(1).wait(1, 10)
        with b.submit_recvs(1, 100) as pool:
            a.submit_send(b.address, b"x").wait(10)
            pool.recv(10)
        for engine in (a, b):
            engine.submit_write(source if engine is a else target, target.descriptor).add_done_callback(
                lambda _: ran.append("later")
            )
    print(ran)
"""


@pytest.mark.no_sanitizer  # as above
def test_callback_that_no_thread_is_had_for_was_not_asked_for() -> None:
    large_stacks = ["bash", "-c", 'ulimit -s 1048576 && exec "$@"', "-"]
    run = subprocess.run(
        [*large_stacks, sys.executable, "-W", "error", "-c", textwrap.dedent(NO_THREAD)],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        timeout=PROGRAM_S,
    )
    assert run.returncode == 0 and not run.stderr, run.stdout + run.stderr
    assert run.stdout == "['later', 'later']\n"


OUT_OF_MEMORY = """
    import pathlib, resource, sys
    import crossrail as xr

    with xr.Engine("b", transport="shm") as b, xr.Engine(
        "a", transport="shm", polling="manual", dump_dir=sys.argv[1]
    ) as a:
        a.connect(b.address, 10)
        holes = [bytes(4000) for _ in range(20_000)]
        del holes[::2]  # room for what is short, and none for the queue of those that wait, once it is to grow
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * 4096, resource.RLIM_INFINITY))
        for _ in range(60_000):
            a.submit_send(b.address, b"x")
"""


@pytest.mark.no_sanitizer  # they take terabytes of address space
def test_out_of_memory_where_an_engine_moves_data_ends_the_process_in_words(tmp_path: Path) -> None:
    """Whoever drives holds a lock that all its threads need: they would wait for good."""
    run = run_script(OUT_OF_MEMORY, str(tmp_path))

    assert run.returncode == -signal.SIGABRT, run.stdout + run.stderr
    assert "crossrail: out of memory while engine 'a' was moving data" in run.stderr
    assert "out of memory: flight recorder of engine 'a' is in" in run.stderr
    assert "ulimit -v" in run.stderr

"""fork(): the child gets a clear error, the parent keeps working. In scripts of their own: pytest has threads."""

import pytest

from tests.support.process import assert_clean, run_script

FORK = """
    import gc, os, signal, sys, warnings
    warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of threads at fork
    import crossrail as xr

    def in_child(body):
        pid = os.fork()
        if pid == 0:
            signal.alarm(10)
            try:
                body()
                os._exit(0)
            except BaseException:
                import traceback
                traceback.print_exc()
                os._exit(1)
        status = os.waitpid(pid, 0)[1]
        assert status == 0, f"child ended with {status}"

    engine = xr.Engine("parent")
    region = engine.alloc(1000)
    counter = engine.imm_counter(1)
    transfer = engine.submit_write(region, region.descriptor, imm=1)
    transfer.wait(10)
    counter.wait(1, 10)

    def parent_works():
        engine.submit_write(region, region.descriptor, imm=5).wait(10)
        engine.imm_counter(5).wait(1, 10)
"""


@pytest.mark.parametrize(
    "call",
    [
        "engine.submit_write(region, region.descriptor)",
        "engine.submit_read(region, region.descriptor)",
        "engine.submit_send(engine.address, b'x')",
        "engine.alloc(10)",
        "engine.register(bytearray(10))",
        "engine.connect(engine.address)",
        "engine.submit_recvs(1, 16)",
        "counter.wait(1, 1)",
        "counter.poll()",
        "engine.imm_counter(7)",
        "engine.alloc_watcher(print)",
        "engine.stats()",
        "engine.explain(engine.address)",
        "region.close()",
    ],
)
def test_call_in_the_child_names_both_processes(call: str) -> None:
    script = run_script(
        FORK
        + f"""
    parent = os.getpid()
    def body():
        try:
            {call}
        except (xr.UsageError, xr.EngineClosed) as error:
            assert str(parent) in str(error), error
            assert str(os.getpid()) in str(error), error
        else:
            raise AssertionError("the call worked in the child")
    in_child(body)
    parent_works()
    """
    )

    assert_clean(script)


def test_what_belongs_to_the_parent_can_be_shown_in_the_child() -> None:
    script = run_script(
        FORK
        + """
    things = [
        region, counter, transfer, counter.on_count(9, print), engine.submit_recvs(1, 16), engine.alloc_watcher(print),
        counter.raise_flag(),
    ]
    def body():
        said = [repr(thing) for thing in things]
        assert said == [
            "<Region of the parent process>", "<ImmCounter of the parent process>", "<Transfer of the parent process>",
            "<CountTicket of <ImmCounter of the parent process>>", "<ReceivePool of the parent process>",
            "<Watcher of the parent process>", "<CountFlag of the parent process>",
        ], said
        things[-1].close()  # nothing
    in_child(body)
    parent_works()
    """
    )
    assert_clean(script)


def test_descriptor_that_the_parent_asked_for_is_known_in_the_child_and_no_other() -> None:
    script = run_script(
        FORK
        + """
    known, never_asked_for = region.descriptor, engine.alloc(10)
    def body():
        assert region.descriptor == known == xr.RegionDescriptor.from_bytes(known.to_bytes())
        try:
            never_asked_for.descriptor
        except xr.EngineClosed as error:
            assert "forked child" in str(error), error
        else:
            raise AssertionError("the child was given a descriptor by an engine that is not there")
    in_child(body)
    parent_works()
    """
    )
    assert_clean(script)


def test_parent_works_while_and_after_children_live() -> None:
    script = run_script(
        FORK
        + """
    for _ in range(5):
        in_child(lambda: None)
        parent_works()
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(write_end)
        os.read(read_end, 1)
        os._exit(0)
    for _ in range(100):
        parent_works()
    os.close(write_end)
    os.waitpid(pid, 0)
    parent_works()
    engine.close()
    """
    )

    assert_clean(script)


def test_child_may_leave_the_blocks_of_its_parent() -> None:
    script = run_script(
        """
    import os, sys, warnings
    warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of threads at fork
    import crossrail as xr

    with xr.Engine("parent") as engine, engine.alloc(10) as region, engine.submit_recvs(1, 16):
        child = os.fork()
        if child == 0:
            sys.exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        engine.submit_write(region, region.descriptor).wait(10)
    """
    )
    assert_clean(script)


def test_child_may_drop_and_collect_everything() -> None:
    script = run_script(
        FORK
        + """
    def body():
        global engine, region, counter, transfer
        engine.close()
        del engine, region, counter, transfer
        gc.collect()
    in_child(body)
    parent_works()
    """
    )

    assert_clean(script)


def test_child_that_exits_normally_leaves_the_parents_peers_alone() -> None:
    script = run_script(
        FORK
        + """
    other = xr.Engine("other")
    target = other.alloc(1000)
    engine.submit_write(region, target.descriptor, imm=1).wait(10)
    pid = os.fork()
    if pid == 0:
        signal.alarm(10)
        sys.exit(0)  # with atexit and all finalizers
    assert os.waitpid(pid, 0)[1] == 0
    assert engine.peer_state(other.address) == "connected"
    engine.submit_write(region, target.descriptor, imm=1).wait(10)
    other.imm_counter(1).wait(2, 10)
    """
    )

    assert_clean(script)


def test_child_that_exits_normally_blames_nobody_for_what_the_parents_threads_hold() -> None:
    script = run_script(
        FORK
        + """
    import threading, time
    waiting = threading.Thread(target=lambda: engine.imm_counter(5).wait(1, 10))
    waiting.start()
    time.sleep(0.05)  # until it waits: sooner would only test less
    pid = os.fork()
    if pid == 0:
        signal.alarm(10)
        sys.exit(0)  # with atexit and all finalizers
    assert os.waitpid(pid, 0)[1] == 0
    engine.submit_write(region, region.descriptor, 10, dst_offset=20, imm=5).wait(10)
    waiting.join(10)
    """
    )

    assert_clean(script)


def test_child_may_open_an_engine_of_its_own_and_reach_the_parent() -> None:
    script = run_script(
        FORK
        + """
    descriptor = region.descriptor.to_bytes()
    def body():
        with xr.Engine("child") as mine:
            assert mine.address != engine.address
            src = mine.alloc(1000)
            mine.submit_write(src, xr.RegionDescriptor.from_bytes(descriptor), imm=8).wait(10)
    in_child(body)
    engine.imm_counter(8).wait(1, 10)
    parent_works()
    """
    )

    assert_clean(script)


VICTIM = """
import os, time, warnings
warnings.simplefilter("ignore")
import crossrail as xr
engine = xr.Engine("victim")
if os.fork() == 0:
    time.sleep(3)
    os._exit(0)
print(engine.address, flush=True)
time.sleep(60)
"""


def test_child_does_not_hide_the_parents_death() -> None:
    script = run_script(
        """
    import subprocess, sys, time
    import crossrail as xr

    victim = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, text=True)
    address = xr.Address.from_text(victim.stdout.readline().strip())
    with xr.Engine("here") as engine:
        engine.connect(address, 10)
        transfer = engine.submit_send(address, b"x")
        victim.kill()
        victim.wait()
        killed = time.monotonic()
        try:
            transfer.wait(10)
        except xr.PeerLost:
            assert time.monotonic() - killed < 2, "only seen when the forked child ended, too"
        else:
            raise AssertionError("the message was received by a dead process")
    victim.stdout.close()
    """,
        VICTIM,
    )

    assert_clean(script)


GUEST = """
import os, sys
import crossrail as xr
with xr.Engine("guest") as engine:
    engine.connect(xr.Address.from_text(sys.argv[1]), 10)
    print("connected", flush=True)
    sys.stdin.readline()
    if sys.argv[2] == "dies":
        os._exit(0)
"""

AWAIT_NO_GUEST = """
    def watched():
        sets = []
        for name in os.listdir("/proc/self/fdinfo"):
            try:
                what = os.readlink(f"/proc/self/fd/{name}")
                lines = pathlib.Path(f"/proc/self/fdinfo/{name}").read_text().splitlines()
            except OSError:  # closed meanwhile
                continue
            if what == "anon_inode:[eventpoll]":
                sets.append(sum(line.startswith("tfd:") for line in lines))
        return sorted(sets)

    def await_no_guest():
        deadline = time.monotonic() + 10
        while watched() != alone:
            assert time.monotonic() < deadline, f"{watched()} are watched, {alone} were before"
            time.sleep(0.01)
"""


@pytest.mark.parametrize("end", ["leaves", "dies"])
@pytest.mark.parametrize("keeper", ["a child", "an engine that nobody drives"])
def test_peer_that_is_gone_is_watched_no_more_though_its_descriptors_are_kept(end: str, keeper: str) -> None:
    """Else the control thread is told of it again and again, and takes a core for that."""
    script = run_script(
        FORK
        + AWAIT_NO_GUEST
        + """
    import pathlib, subprocess, time
    guest_script, end, keeper = sys.argv[1:]
    host = xr.Engine("host", transport="shm", polling="adaptive" if keeper == "a child" else "manual")
    alone = watched()
    guest = subprocess.Popen(
        [sys.executable, "-c", guest_script, str(host.address), end],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )
    assert guest.stdout.readline() == "connected\\n"
    assert watched() != alone
    read_end, write_end = os.pipe()
    child = os.fork() if keeper == "a child" else None
    if child == 0:
        os.close(write_end)
        os.read(read_end, 1)  # until its parent ends
        os._exit(0)
    guest.communicate("end\\n")

    await_no_guest()

    os.close(write_end)
    if child is not None:
        assert os.waitpid(child, 0)[1] == 0
    host.close()
    """,
        GUEST,
        end,
        keeper,
    )

    assert_clean(script)


def test_engine_that_did_not_open_is_forgotten() -> None:
    script = run_script(
        FORK
        + """
    import resource
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    for spare in range(12):
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1 + spare, hard))
        try:
            xr.Engine("too many descriptors").close()
        except xr.TransportError:
            pass
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    junk = [bytearray(b"\\xff" * size) for size in range(64, 8192, 8)]  # where the engines were
    in_child(lambda: None)
    parent_works()
    engine.close()
    """
    )

    assert_clean(script)


# gcc's AddressSanitizer forks without its allocator's locks: a child that allocates from threads may wait for ever.
FORK_AND_GO_ON = pytest.param("fork", marks=pytest.mark.no_sanitizer)
# Under coverage the arguments of a spawned process outlive the interpreter, whatever they are.
SPAWN = pytest.param("spawn", marks=pytest.mark.no_coverage)


@pytest.mark.parametrize("method", [FORK_AND_GO_ON, SPAWN, "forkserver"])
def test_multiprocessing_workers_open_engines_of_their_own(method: str) -> None:
    script = run_script(
        f"""
    import multiprocessing, sys, warnings
    warnings.simplefilter("ignore", DeprecationWarning)
    sys.path.insert(0, ".")
    from tests.support.worker import write_to
    import crossrail as xr
    with xr.Engine("parent") as engine:
        region = engine.alloc(8)
        context = multiprocessing.get_context("{method}")
        workers = [context.Process(target=write_to, args=(region.descriptor, i)) for i in range(3)]
        for worker in workers:
            worker.start()
        for i in range(3):
            engine.imm_counter(i).wait(1, 15)
        for worker in workers:
            worker.join(15)
            assert worker.exitcode == 0, worker.exitcode
    """,
        timeout_s=40,
    )

    assert_clean(script)


@pytest.mark.no_sanitizer  # under one a fork takes most of a second,
@pytest.mark.no_coverage  # and much of one where each child writes down what it has reached
def test_child_of_a_fork_in_the_midst_of_mapping_opens_an_engine() -> None:
    script = run_script(
        FORK
        + """
    import threading

    stop = threading.Event()

    def map_and_unmap():
        while not stop.is_set():
            engine.alloc(4 << 20).close()

    threads = [threading.Thread(target=map_and_unmap) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(100):
            in_child(lambda: xr.Engine("child", transport="shm"))
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    print("all opened")
    """,
        timeout_s=60,
    )
    assert "all opened" in script.stdout, script

"""No root, no capability: what the kernel then forbids or bounds."""

from tests.support.process import assert_clean, run_script

BECOME_NOBODY = """
    import array, ctypes, os, resource, socket, warnings
    import numpy as np
    import crossrail as xr
    xr.Engine, xr.PeerLost, xr.RegionDescriptor  # loads all of it, while this process may read it

    warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of threads at fork
    if os.geteuid() == 0:
        nobody = 65534
        os.setgroups([])
        os.setresgid(nobody, nobody, nobody)
        os.setresuid(nobody, nobody, nobody)
"""

ATTACH = """
    NBYTES, PR_SET_DUMPABLE = 3_000_001, 4
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # from now on nobody may attach

    def receive(pipe, seen):
        with xr.Engine("receiver", private_path="cma") as engine:
            values = np.zeros(NBYTES, np.uint8)
            region = engine.register(values)
            os.write(pipe, region.descriptor.to_bytes())
            engine.imm_counter(1).wait(1, 15)
            assert (values == 7).all()
            os.read(seen, 1)  # who is gone has no paths any more

    def send(pipe, seen):
        with xr.Engine("sender", private_path="cma") as engine:
            target = xr.RegionDescriptor.from_bytes(os.read(pipe, 1000))
            engine.submit_write(engine.register(np.full(NBYTES, 7, np.uint8)), target, imm=1).wait(15)
            paths = [path for path in engine.explain(target.owner).paths if path.bytes]
            os.write(seen, b".")
        assert {path.path for path in paths} == {"staged"}, paths
        print(*(path.reason for path in paths))

    read_end, write_end = os.pipe()
    wait_end, seen_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        receive(write_end, wait_end)
        os._exit(0)
    send(read_end, seen_end)
    assert os.waitpid(pid, 0)[1] == 0
"""


def test_unprivileged_processes_stage_where_attach_is_forbidden_and_say_so() -> None:
    script = run_script(BECOME_NOBODY + ATTACH)

    assert_clean(script)
    assert "attach" in script.stdout or "process_vm" in script.stdout


# In flight, here: sent by some process of the user's, and not yet received.
IN_FLIGHT = """
    MANY = 250  # as many as one message takes, or nearly
    in_flight = []

    def send():
        for _ in range(2):
            sender, receiver = socket.socketpair()
            socket.send_fds(sender, [b"x"], [0] * MANY)
            in_flight.append((sender, receiver))

    def receive():
        while in_flight:
            sender, receiver = in_flight.pop()
            _, fds, _, _ = socket.recv_fds(receiver, 1, MANY)
            for fd in fds:
                os.close(fd)
            sender.close()
            receiver.close()

    def waits(transfer):
        try:
            transfer.wait(0.2)
        except xr.WaitTimeout:
            return True
        return False

    # What the kernel compares with how many are in flight.
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    a = xr.Engine("a", transport="shm", connect_timeout_s=TIMEOUT)
    b = xr.Engine("b", transport="shm")
    source, target, another = a.register(bytearray(b"x" * 1000)), b.alloc(1000), b.alloc(1000)
    send()
    transfer = a.submit_write(source, target.descriptor, imm=1)
"""


def test_descriptors_that_wait_for_others_to_be_received_are_passed_then() -> None:
    script = run_script(
        BECOME_NOBODY
        + IN_FLIGHT.replace("TIMEOUT", "20")
        + """
    assert waits(transfer), "nothing was in the way"
    receive()
    transfer.wait(15)
    send()
    transfer = a.submit_write(source, another.descriptor, imm=1)
    assert waits(transfer), "nothing was in the way of its memory"
    receive()
    transfer.wait(15)
    b.imm_counter(1).wait(2, 15)
    a.close()
    b.close()
    """
    )

    assert_clean(script)


def test_descriptors_that_cannot_be_passed_in_time_are_told_of_and_a_later_operation_tries_anew() -> None:
    script = run_script(
        BECOME_NOBODY
        + IN_FLIGHT.replace("TIMEOUT", "0.2")
        + """
    try:
        transfer.wait(15)
    except xr.PeerLost as error:
        assert "cannot send it descriptors" in str(error) and "ulimit -n" in str(error), error
    else:
        raise AssertionError("nothing was in the way")
    receive()
    a.submit_write(source, target.descriptor, imm=1).wait(15)
    b.imm_counter(1).wait(1, 15)
    a.close()
    b.close()
    """
    )

    assert_clean(script)

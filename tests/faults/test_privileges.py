"""No root, no capability, and a kernel that forbids cross-memory attach: it says so, and stages."""

from tests.support.process import assert_clean, run_script

SCRIPT = """
    import ctypes, os, sys, warnings
    import numpy as np
    import crossrail as xr
    xr.Engine, xr.PeerLost, xr.RegionDescriptor  # loads all of it, while this process may read it

    warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of threads at fork
    NBYTES, PR_SET_DUMPABLE = 3_000_001, 4
    if os.geteuid() == 0:
        nobody = 65534
        os.setgroups([])
        os.setresgid(nobody, nobody, nobody)
        os.setresuid(nobody, nobody, nobody)
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
    script = run_script(SCRIPT)

    assert_clean(script)
    assert "attach" in script.stdout or "process_vm" in script.stdout

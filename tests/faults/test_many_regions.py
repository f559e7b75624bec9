"""shm: a peer that is stopped while tens of thousands of regions are asked for, or close, misses nothing."""

import os

from tests.conftest import EngineFactory, PeerFactory
from tests.support.limits import WAIT_S
from tests.support.process import assert_clean, run_script

SCRIPT = """
    import os, signal, sys, time, warnings
    import crossrail as xr

    warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of threads at fork
    patience_s = int(sys.argv[1])
    COUNT = 20_000  # far more than sockets hold
    from_owner, to_writer = os.pipe()
    from_writer, to_owner = os.pipe()

    def wait_stopped(pid):
        assert os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1])

    def own():
        with xr.Engine("owner", transport="shm") as engine:
            memory = bytearray(8)
            regions = [engine.register(memory) for _ in range(COUNT)]
            kept = engine.alloc(8)
            with os.fdopen(to_writer, "wb") as pipe:
                for region in [kept, *regions]:
                    descriptor = region.descriptor.to_bytes()
                    pipe.write(len(descriptor).to_bytes(4, "little") + descriptor)
            os.read(from_writer, 1)  # connected
            os.kill(os.getpid(), signal.SIGSTOP)
            engine.imm_counter(1).wait(COUNT + 1, 30)
            os.read(from_writer, 1)  # it is stopped from here on
            for region in regions:
                region.close()
            os.kill(os.getpid(), signal.SIGSTOP)
            engine.imm_counter(1).wait(1, 30)
            os.read(from_writer, 1)  # it is done

    pid = os.fork()
    if pid == 0:
        signal.alarm(patience_s)
        own()
        os._exit(0)

    def write():
        with os.fdopen(from_owner, "rb") as pipe:
            read = lambda: xr.RegionDescriptor.from_bytes(pipe.read(int.from_bytes(pipe.read(4), "little")))
            kept, *targets = [read() for _ in range(COUNT + 1)]
        with xr.Engine("writer", transport="shm") as engine:
            events = []
            engine.on_event(events.append)
            source = engine.alloc(8)
            engine.submit_write(source, kept, imm=1).wait(20)
            os.write(to_owner, b".")
            os.kill(os.getpid(), signal.SIGSTOP)  # until the owner is stopped
            transfers = [engine.submit_write(source, target, imm=1) for target in targets]
            os.kill(os.getpid(), signal.SIGSTOP)  # until the owner goes on
            for transfer in transfers:
                transfer.wait(20)
            os.kill(os.getpid(), signal.SIGSTOP)  # until all are closed
            engine.submit_write(source, kept, imm=1).wait(20)
            for target in targets[:: COUNT // 10]:
                try:
                    engine.submit_write(source, target, imm=1).wait(20)
                    raise AssertionError("written to a region that is closed")
                except xr.RemoteRegionClosed:
                    pass
            assert not [event for event in events if event.kind in ("peer-lost", "peer-left")], events
            os.write(to_owner, b".")

    writer = os.fork()
    if writer == 0:
        signal.alarm(patience_s)
        write()
        os._exit(0)

    wait_stopped(writer)
    wait_stopped(pid)
    os.kill(writer, signal.SIGCONT)
    wait_stopped(writer)
    os.kill(pid, signal.SIGCONT)
    os.kill(writer, signal.SIGCONT)
    wait_stopped(writer)
    os.write(to_owner, b".")
    wait_stopped(pid)
    os.kill(writer, signal.SIGCONT)
    os.kill(pid, signal.SIGCONT)
    assert os.waitpid(writer, 0)[1] == 0
    assert os.waitpid(pid, 0)[1] == 0
"""


def test_stopped_peer_of_many_regions_is_not_lost() -> None:
    assert_clean(run_script(SCRIPT, str(int(WAIT_S)), timeout_s=2 * WAIT_S))


def test_regions_of_a_peer_that_are_mapped_hold_no_descriptors(
    open_engine: EngineFactory, spawn_peer: PeerFactory
) -> None:
    engine, there = open_engine(transport="shm"), spawn_peer().open("there", transport="shm")
    source, targets = engine.alloc(64), [there.memory(64) for _ in range(21)]
    engine.submit_write(source, targets[0].descriptor).wait(WAIT_S)
    before = len(os.listdir("/proc/self/fd"))

    for target in targets[1:]:
        engine.submit_write(source, target.descriptor).wait(WAIT_S)

    assert len(os.listdir("/proc/self/fd")) == before

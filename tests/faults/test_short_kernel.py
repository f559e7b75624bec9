"""A kernel that is short of memory: calls on sockets that fail now and then cost time, and no peer."""

import os
import subprocess
import sys
import textwrap

import pytest

from tests.support.fake_gpu import driver_file
from tests.support.limits import WAIT_S
from tests.support.process import REPOSITORY, assert_clean

PEERS = """
    import ctypes, sys
    import numpy as np
    import crossrail as xr

    ctypes.CDLL(sys.argv[1]).fail_calls(30)
    transport = sys.argv[2]
    options = {"transport": transport, "rails": 2 if transport == "shm" else ["127.0.0.1", "127.0.0.2"]}
    for round in range(5):
        with xr.Engine("a", **options) as a, xr.Engine("b", **options) as b:
            source = a.register(np.full(200_000, round, np.uint8))
            targets = [b.alloc(200_000) for _ in range(5)]
            back_from, back_to = b.alloc(100), a.alloc(100)
            pool = b.submit_recvs(20, 1000)
            transfers = [a.submit_write(source, t.descriptor, imm=1) for t in targets for _ in range(4)]
            transfers += [a.submit_send(b.address, b"%d" % i) for i in range(20)]
            transfers += [b.submit_write(back_from, back_to.descriptor, imm=2) for _ in range(20)]
            for transfer in transfers:
                transfer.wait(30)
            b.imm_counter(1).wait(20, 30)
            a.imm_counter(2).wait(20, 30)
            assert a.imm_counter(2).poll() == b.imm_counter(1).poll() == 0
            assert sorted(int(pool.recv(30).data) for _ in range(20)) == list(range(20))
            assert all((t.array() == round).all() for t in targets)
    print("ok")
"""


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_calls_on_sockets_that_fail_for_want_of_memory_cost_no_peer(transport: str) -> None:
    library = driver_file().parents[1] / "sockets" / "libshort_kernel.so"
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PEERS), str(library), transport],
        env=os.environ | {"LD_PRELOAD": f"{os.environ.get('LD_PRELOAD', '')} {library}"},  # after a sanitizer's
        capture_output=True,
        text=True,
        timeout=4 * WAIT_S,
        cwd=REPOSITORY,
    )

    assert_clean(done)
    assert done.stdout == "ok\n", done

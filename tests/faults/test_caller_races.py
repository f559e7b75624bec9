"""Other threads of the caller change, or close, what a call is looking at. In scripts: what goes wrong is a crash."""

from tests.support.process import assert_clean, run_script

CLOSES_WHAT_IS_SUMMED_UP = """
    import ctypes, mmap, sys, threading, time
    import crossrail as xr

    NBYTES = 256 << 20
    libc = ctypes.CDLL(None)
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]

    with xr.Engine("a", transport="shm") as a, xr.Engine("b", transport="shm") as b:
        target = b.alloc(NBYTES)
        a.connect(b.address, 10)
        for delay_s in (0.001, 0.002, 0.004, 0.008):
            private_anonymous_populated = 0x8022
            memory = libc.mmap(None, NBYTES, 3, private_anonymous_populated, -1, 0)
            source = a.register((memory, NBYTES))
            begun = threading.Event()

            def close() -> None:
                begun.wait(10)
                time.sleep(delay_s)
                source.close(20)
                libc.munmap(memory, NBYTES)

            closing = threading.Thread(target=close)
            closing.start()
            begun.set()
            try:
                a.submit_write(source, target.descriptor, NBYTES, verify=True).wait(20)
            except (xr.UsageError, xr.TransferError):
                pass
            closing.join(20)
    print("nobody read what was unmapped")
"""

CHANGES_OFFSETS = """
    import sys, threading
    import numpy as np
    import crossrail as xr

    FAR, CALLS = 1 << 40, 20_000
    sys.setswitchinterval(1e-5)  # else whoever waits gets the GIL back from the other thread after 5 ms

    with xr.Engine("a", transport="shm") as a, xr.Engine("b", transport="shm") as b:
        source, region = a.alloc(1 << 16), b.alloc(1 << 16)
        target = region.descriptor
        a.submit_write(source, target, 64).wait(10)
        offsets, stop = np.zeros(100, np.int64), threading.Event()

        def change():
            while not stop.is_set():
                offsets[:] = FAR
                offsets[:] = 0

        changing = threading.Thread(target=change)
        changing.start()
        refused = 0
        for _ in range(CALLS):
            try:
                a.submit_scatter(source, [target] * 100, lengths=64, src_offsets=offsets, dst_offsets=0).wait(10)
            except xr.UsageError:
                refused += 1
        stop.set()
        changing.join(10)
    print("nothing was read from afar")
"""


def test_close_waits_for_a_submit_that_sums_the_source_up() -> None:
    script = run_script(CLOSES_WHAT_IS_SUMMED_UP, timeout_s=60)
    assert_clean(script)
    assert script.stdout == "nobody read what was unmapped\n"


def test_scatter_moves_what_it_has_checked() -> None:
    script = run_script(CHANGES_OFFSETS, timeout_s=60)
    assert_clean(script)
    assert script.stdout == "nothing was read from afar\n"

"""Offers memory, and counts the pages that another process writes into it.

    $ python target.py
    run: python initiator.py 5852...
    1024 pages are here; those that begin it: [0, 1, 2, 3]

Run the command that it prints in a second shell, on this host or on another: initiator.py is the other half.
"""

import crossrail as xr

PAGES, PAGE_BYTES = 1024, 64 << 10
IMM = 7  # a number that both sides know: what is written with it is counted under it

if __name__ == "__main__":
    with xr.Engine("target") as engine:
        pool = engine.alloc(PAGES * PAGE_BYTES)  # memory that other processes of this host map
        # The descriptor says where the memory is, and how to reach it: some 120 bytes, for any channel that you have.
        print("run: python initiator.py", bytes(pool.descriptor).hex(), flush=True)

        # Pages come in any order. Once all are counted, all bytes are here.
        engine.imm_counter(IMM).wait(PAGES, timeout_s=600)

        pages = pool.array("uint32").reshape(PAGES, -1)
        print(f"{PAGES} pages are here; those that begin it: {pages[:4, 0].tolist()}")

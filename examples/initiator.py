"""Writes pages into memory of another process.

    $ python initiator.py 5852...
    1024 pages of 64 KiB went to target by shm

target.py prints the command for this one.
"""

import sys

import numpy as np

import crossrail as xr
from target import IMM, PAGE_BYTES, PAGES

if __name__ == "__main__":
    target = xr.RegionDescriptor.from_bytes(bytes.fromhex(sys.argv[1]))
    with xr.Engine("initiator") as engine:
        # Page i is full of the number i. Memory of your own, used in place; a torch tensor works as well.
        source = engine.register(np.repeat(np.arange(PAGES, dtype=np.uint32), PAGE_BYTES // 4))
        pages = np.random.default_rng().permutation(PAGES)

        transfer = engine.submit_paged_writes(source, pages, target, pages, PAGE_BYTES, imm=IMM)  # returns at once
        transfer.wait(timeout_s=30)  # the source is ours again; what has arrived, only the target knows

        way = engine.explain(target.owner).transport
        print(f"{PAGES} pages of {PAGE_BYTES >> 10} KiB went to {target.owner.name} by {way}")

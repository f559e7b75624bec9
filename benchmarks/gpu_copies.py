"""Writes from a GPU's memory to another process's on the same GPU, beside the driver's own copies of the same bytes.

    ./dev run python benchmarks/gpu_copies.py [--transport shm] [--path auto] [--mib 256] [--runs 15]

Two processes share cuda:0. Each line is a write (or paged write) with its wait, median of the runs, and beside it, in
turns, torch's device-to-device copy of as many bytes with its synchronisation. --path staged: through the host.
Every byte is compared once before. Needs torch with CUDA.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

import crossrail as xr

DEADLINE_S = 60.0
PAGES = (4 << 10, 16 << 10, 64 << 10, 256 << 10)
LENGTHS = (8, 4 << 10, 64 << 10, 1 << 20, 16 << 20)


def hold(pipe: Connection, options: dict[str, Any], nbytes: int) -> None:
    """The other process: owns the target."""
    memory = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    with xr.Engine("target", **options) as engine:
        region = engine.register(memory)
        pipe.send(region.descriptor.to_bytes())
        while (seed := pipe.recv()) is not None:
            pipe.send(bool(torch.equal(memory, noise(nbytes, seed))))


def noise(nbytes: int, seed: int) -> Any:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device="cuda", generator=generator)


def took_s(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", default="shm")
    parser.add_argument("--path", default="auto", choices=["auto", "staged"])
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--runs", type=int, default=15)
    given = parser.parse_args()
    nbytes = given.mib << 20
    options: dict[str, Any] = {"transport": given.transport, "private_path": given.path}
    if given.transport == "tcp":
        options = {"transport": "tcp", "rails": ["127.0.0.1"]}
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=hold, args=(theirs, options, nbytes), daemon=True)
    child.start()
    source, scratch = noise(nbytes, 7), torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    with xr.Engine("source", **options) as engine:
        region, remote = engine.register(source), xr.RegionDescriptor.from_bytes(ours.recv())
        engine.submit_write(region, remote).wait(DEADLINE_S)
        ours.send(7)
        if not (ours.poll(DEADLINE_S) and ours.recv()):
            raise SystemExit("the bytes are not those that were written")

        def beside(title: str, moved: int, write: Callable[[], object], copy: Callable[[], object]) -> None:
            writes, copies = [], []
            for _ in range(given.runs):
                copies.append(took_s(copy))
                writes.append(took_s(write))
            ours_s, theirs_s = statistics.median(writes), statistics.median(copies)
            print(
                f"{title:24} {ours_s * 1e6:10.1f} us {moved / ours_s / 1e9:8.1f} GB/s   copy {theirs_s * 1e6:10.1f} us "
                f"{moved / theirs_s / 1e9:8.1f} GB/s   {theirs_s / ours_s:5.2f}x",
                flush=True,
            )

        for length in [*LENGTHS, nbytes]:

            def copy(length: int = length) -> None:
                scratch[:length].copy_(source[:length])
                torch.cuda.synchronize()

            beside(
                f"write {length:,}",
                length,
                lambda length=length: engine.submit_write(region, remote, length).wait(DEADLINE_S),
                copy,
            )
        for page in PAGES:
            count = min(nbytes // page, 4096)
            order = np.random.default_rng(1).permutation(nbytes // page)[:count]
            at = torch.from_numpy(order).cuda()
            rows_from, rows_to = source.view(-1, page), scratch.view(-1, page)

            def gather(at: Any = at, rows_from: Any = rows_from, rows_to: Any = rows_to) -> None:
                torch.index_select(rows_from, 0, at, out=rows_to[: len(at)])
                torch.cuda.synchronize()

            beside(
                f"{count} pages of {page >> 10} KiB",
                count * page,
                lambda page=page, order=order: engine.submit_paged_writes(
                    region, order, remote, np.arange(len(order)), page
                ).wait(DEADLINE_S),
                gather,
            )
        print(engine.explain(remote.owner))
    ours.send(None)
    child.join(DEADLINE_S)


if __name__ == "__main__":
    main()
